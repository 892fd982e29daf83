"""Runs the service's own revisions, after the ledger's: what refers to a table comes after it.

Where the ledger is at head, its upgrade changes nothing. It is given the engine, not the connection: SQLite can
rebuild a table that others refer to only if foreign keys are off before the transaction begins.
"""

from __future__ import annotations

from alembic import context

import tsg
from host_app.config import Config
from host_app.db import make_engine
from host_app.models import Base

given = context.config.attributes.get("engine")
engine = given or make_engine(Config.from_environment().database_url)
try:
    tsg.upgrade(engine)
    with engine.begin() as connection:
        context.configure(
            connection=connection,
            target_metadata=Base.metadata,
            include_name=tsg.include_name,
        )
        context.run_migrations()
finally:
    if given is None:
        engine.dispose()
