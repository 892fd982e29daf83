"""Carries the migrations into the wheel; an editable install finds them in the checkout."""

from __future__ import annotations

from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class MigrationsHook(BuildHookInterface[Any]):
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version != "editable":
            build_data["force_include"] |= {"migrations": "tsg/migrations", "alembic.ini": "tsg/alembic.ini"}
