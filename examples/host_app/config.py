"""What the service is told: by the environment, with defaults that suit a first try."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from tsg import ReconcilePolicy


@dataclass(frozen=True)
class Config:
    """Settings; each has an environment variable of its name in capitals.

    Attributes:
        database_url: SQLite or PostgreSQL.
        workers: how many orders are worked on at the same time.
        step_seconds: how long it takes to pack one piece. After each there is a heartbeat.
        timeout_seconds: the most that one task may take.
        active_grace_seconds: after how long a silence a task is given up. It must be well above `step_seconds`.
        delivery_grace_seconds: how long a result waits to be received.
    """

    database_url: str = "sqlite:///orders.sqlite"
    host: str = "127.0.0.1"
    port: int = 8000
    workers: int = 2
    step_seconds: float = 1.0
    timeout_seconds: float = 3600.0
    active_grace_seconds: float = 5.0
    delivery_grace_seconds: float = 3600.0

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> Self:
        given = {name: environment[name.upper()] for name in cls.__dataclass_fields__ if name.upper() in environment}
        default = cls()
        return cls(**{name: type(getattr(default, name))(value) for name, value in given.items()})

    @property
    def policy(self) -> ReconcilePolicy:
        return ReconcilePolicy(self.active_grace_seconds, self.delivery_grace_seconds)
