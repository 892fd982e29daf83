"""Runs our revisions for Alembic's own commands; ``tsg upgrade`` runs the same without it.

The section of ``alembic.ini`` says whose: the ledger's, or with ``-n plan`` the plan layer's, which stand on the
ledger's at head.

The database is, in this order: ``config.attributes["connection"]`` (an engine or a connection), ``-x db=``,
the variable ``TSG_DB``, ``sqlalchemy.url``. A ledger file is opened with all the checks of
:mod:`tsg.storage`, made where it is missing.
"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from logging.config import fileConfig

from alembic import context
from alembic.util import CommandError
from sqlalchemy.engine import Connection, Engine

import tsg.models  # noqa: F401  # the target of autogenerate
from tsg import ddl, migrating, opening, schema
from tsg.plan import schema as plan_schema
from tsg.plan import tables as plan_tables

config = context.config
OF_PLANS = config.config_ini_section == "plan"


def command_name() -> str | None:
    """Which of Alembic's commands this is; none where it is called from Python."""
    command = getattr(config.cmd_opts, "cmd", None)
    return None if command is None else str(command[0].__name__)


def moves() -> bool:
    """Whether the command takes the schema somewhere, and does not only look."""
    try:
        context.get_revision_argument()
    except KeyError:
        return False
    return True


def connections() -> AbstractContextManager[Connection]:
    given = config.attributes.get("connection")
    if isinstance(given, Connection):
        return nullcontext(given)
    if isinstance(given, Engine):
        return migrating.migration(given)
    arguments = context.get_x_argument(as_dictionary=True)
    target = arguments.get("db") or os.environ.get("TSG_DB") or config.get_main_option("sqlalchemy.url")
    if not target:
        raise CommandError("Name the database: -x db=PATH_OR_URL, or TSG_DB, or sqlalchemy.url.")
    if config.config_file_name is not None and command_name() is not None:
        # Only for the command itself: it would switch off the loggers of an application that calls us.
        fileConfig(config.config_file_name, disable_existing_loggers=False)
    place = opening.place_of(target)
    if command_name() not in (None, "upgrade") and not opening.is_there(place):
        raise CommandError("There is no ledger at this place; only upgrade makes one.")
    return opening.migration(place)


def run(connection: Connection) -> None:
    home = plan_schema if OF_PLANS else schema
    context.configure(
        connection=connection,
        target_metadata=plan_tables.metadata if OF_PLANS else ddl.metadata,
        version_table=home.VERSIONS.table,
        include_name=home.include_own_name,
        compare_type=True,
        transactional_ddl=True,
    )
    if OF_PLANS and moves():
        schema.upgrade(connection)
    with context.begin_transaction():
        context.run_migrations()
    home.verify(connection)


if context.is_offline_mode():
    raise CommandError("The revisions look at what is stored; run them on a database, not into a script.")
with connections() as connection:
    run(connection)
