"""What set-based work is given to work on, a connection or an ORM session that has one, and whose clock it keeps."""

from __future__ import annotations

import time
from typing import Any, Final, Protocol

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from tsg import values
from tsg.errors import InvalidInput
from tsg.states import Clock

__all__ = ["Session", "clock_of", "connection_of", "server_clock"]

_SERVER_TIME: Final[sa.Select[Any]] = sa.select(
    sa.cast(sa.func.extract("epoch", sa.func.clock_timestamp()), sa.Double())
)


class Session(Protocol):
    """What is asked of an ORM session; the ORM itself is not needed here."""

    @property
    def info(self) -> dict[Any, Any]:
        """What its maker keeps in it."""

    def connection(self, bind_arguments: Any = None) -> Connection:
        """The connection of its transaction, by what is asked of it."""

    def flush(self) -> None:
        """Send what is pending."""

    def expire_all(self) -> None:
        """Forget what was loaded."""


def connection_of(target: Connection | Session) -> Connection:
    """The connection of `target`, with all that a session holds sent to it.

    Raises:
        InvalidInput: neither.
    """
    if values.is_a(target, Connection):
        return target
    session = _session(target)
    session.flush()
    return _bound(session)


def server_clock(target: Connection | Session) -> Clock:
    """The clock of the database's server, which is one for all its hosts; with SQLite, it is this machine's.

    For ``session.info["tsg_clock"]`` where the clocks of hosts may disagree. A reading is a question to the server, in
    the transaction that `target` has then.

    Returns:
        Gives seconds since the epoch.

    Raises:
        InvalidInput: neither a connection nor a session.
    """
    given = target if values.is_a(target, Connection) else _session(target)

    def read() -> float:
        connection = given if isinstance(given, Connection) else _bound(given)
        if connection.dialect.name != "postgresql":
            return time.time()
        now: float = connection.execute(_SERVER_TIME).scalar_one()
        return now

    return read


def clock_of(target: Connection | Session) -> Clock:
    """The clock of the session's own tasks; on a connection, the server's."""
    if values.is_a(target, Connection):
        return server_clock(target)
    clock: Clock = _session(target).info.get("tsg_clock", time.time)
    return clock


def _bound(session: Session) -> Connection:
    # Who passes a session has the ORM loaded; and a session may be bound by class.
    from tsg.models import Task

    return session.connection(bind_arguments={"mapper": Task})


def _session(target: object) -> Session:
    """`target`, which is no connection, as a session."""
    if not all(callable(getattr(type(target), name, None)) for name in ("connection", "flush", "expire_all")):
        raise InvalidInput("give a Connection or a Session")
    return target  # type: ignore[return-value]  # it has just been looked at
