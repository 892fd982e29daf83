"""The other env.py: as Alembic's template for asyncio has it."""

import asyncio

import sqlalchemy as sa
from alembic import context
from sqlalchemy.ext.asyncio import create_async_engine

import tsg
from tests.guest.models import Base

config = context.config


def run(connection: sa.Connection) -> None:
    context.configure(connection=connection, target_metadata=Base.metadata, include_name=tsg.include_name)
    with context.begin_transaction():
        tsg.upgrade(connection)
        context.run_migrations()


async def main() -> None:
    engine = create_async_engine(config.get_main_option("sqlalchemy.url"), poolclass=sa.NullPool)
    async with engine.connect() as connection:
        await connection.run_sync(run)
    await engine.dispose()


asyncio.run(main())
