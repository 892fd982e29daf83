"""The service's database: its engine, its sessions and its migrations."""

from __future__ import annotations

from pathlib import Path

from alembic import command
from alembic.config import Config as Alembic
from sqlalchemy import Connection, Engine, create_engine, event, make_url
from sqlalchemy.engine.interfaces import DBAPIConnection
from sqlalchemy.orm import Session, sessionmaker

HERE = Path(__file__).resolve().parent


class Database:
    """One engine and two kinds of session.

    Attributes:
        sessions: for what concerns one order.
        exact: for what looks at all of them and has to see one moment. SQLite's transactions always do;
            PostgreSQL's at REPEATABLE READ.
    """

    def __init__(self, url: str) -> None:
        self.engine = make_engine(url)
        self.sessions = sessionmaker(self.engine)
        is_server = self.engine.dialect.name == "postgresql"
        self.exact: sessionmaker[Session] = sessionmaker(
            self.engine.execution_options(isolation_level="REPEATABLE READ") if is_server else self.engine
        )

    def migrate(self) -> None:
        """Bring the ledger and then the orders to head, as ``alembic upgrade head`` does."""
        configuration = Alembic(HERE / "alembic.ini")
        configuration.attributes["engine"] = self.engine
        command.upgrade(configuration, "head")

    def close(self) -> None:
        self.engine.dispose()


def make_engine(url: str) -> Engine:
    """An engine as this service likes it; the ledger takes it as it is."""
    engine = create_engine(make_url(url))
    if engine.dialect.name == "sqlite":

        @event.listens_for(engine, "connect")
        def prepare(connection: DBAPIConnection, record: object) -> None:
            # The driver would begin late, and leave CREATE TABLE outside.
            connection.isolation_level = None
            cursor = connection.cursor()
            for pragma in ("foreign_keys = ON", "journal_mode = WAL", "synchronous = NORMAL"):
                cursor.execute(f"PRAGMA {pragma}")
            cursor.close()

        @event.listens_for(engine, "begin")
        def begin(connection: Connection) -> None:
            # There is one writer at a time: each waits for its turn here, and nowhere later.
            connection.exec_driver_sql("BEGIN IMMEDIATE")

    return engine
