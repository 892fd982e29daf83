"""What the set-based work is given to work on: a connection, or an ORM session that has one."""

from __future__ import annotations

from typing import Any, Protocol

from sqlalchemy.engine import Connection

__all__ = ["Session", "connection_of"]


class Session(Protocol):
    """What is asked of an ORM session; the ORM itself is not needed here."""

    def connection(self, bind_arguments: Any = None) -> Connection:
        """The connection of its transaction, by what is asked of it."""

    def flush(self) -> None:
        """Send what is pending."""

    def expire_all(self) -> None:
        """Forget what was loaded."""


def connection_of(target: Connection | Session) -> Connection:
    """The connection of `target`, with all that a session holds sent to it."""
    if isinstance(target, Connection):
        return target
    # Who passes a session has the ORM loaded; and a session may be bound by class.
    from tsg.models import Task

    target.flush()
    return target.connection(bind_arguments={"mapper": Task})
