"""The commands on a ledger's schema."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click
from sqlalchemy.engine import Connection

from tsg import opening, schema
from tsg.cli import Answer, answer
from tsg.engine import reading, refusing
from tsg.errors import InvalidInput

_Seen = TypeVar("_Seen")

__all__ = ["check", "current", "downgrade", "upgrade"]

_plan_option = click.option("--plan", "of_plans", is_flag=True, help="The tables of plans, which have their own.")


def _history(of_plans: bool) -> Any:
    """The module of the history that is asked about."""
    if not of_plans:
        return schema
    from tsg.plan import schema as plan_schema

    return plan_schema


@click.command()
@_plan_option
@click.argument("revision", default="head")
@click.pass_obj
def upgrade(place: dict[str, Any], of_plans: bool, revision: str) -> Answer:
    """Bring the schema to REVISION (head by default); adopt a file of the published package."""
    history = _history(of_plans)
    destination = history.revision_named(revision)
    with opening.migration(opening.place_of(**place)) as connection:
        report = history.upgrade(connection, destination)
    return answer({"ok": True, "schema": report.to_dict()})


@click.command()
@_plan_option
@click.argument("revision")
@click.pass_obj
def downgrade(place: dict[str, Any], of_plans: bool, revision: str) -> Answer:
    """Take the schema back to REVISION (base: none)."""
    history = _history(of_plans)
    destination = history.revision_named(revision, downgrade=True)
    with opening.migration(_existing(place)) as connection:
        report = history.downgrade(connection, destination)
    return answer({"ok": True, "schema": report.to_dict()})


@click.command()
@_plan_option
@click.pass_obj
def current(place: dict[str, Any], of_plans: bool) -> Answer:
    """Say which revision the schema has."""
    report: schema.Report = _look(place, _history(of_plans).current)
    return answer({"ok": True, "schema": report.to_dict()})


@click.command()
@_plan_option
@click.pass_obj
def check(place: dict[str, Any], of_plans: bool) -> Answer:
    """Exit 1 where the schema is behind or differs from what its revision says."""
    report, is_head = _look(place, _history(of_plans).check)
    return answer({"ok": is_head, "schema": report.to_dict()}, status=0 if is_head else 1)


def _existing(place: dict[str, Any]) -> opening.Place:
    there = opening.place_of(**place)
    if not opening.is_there(there):
        raise InvalidInput("there is no ledger at this place; tsg init makes one")
    return there


def _look(place: dict[str, Any], look: Callable[[Connection], _Seen]) -> _Seen:
    opened = opening.open_as_it_is(_existing(place))
    try:
        with refusing(), reading(opened.engine) as connection:
            return look(connection)
    finally:
        opened.close()
