"""As Alembic's template has it, with the application's two lines about its guest."""

import sqlalchemy as sa
from alembic import context

import tsg
from tests.guest.models import Base

config = context.config
filters = {"include_name": tsg.include_name} if config.get_main_option("filter") == "yes" else {}

engine = sa.create_engine(config.get_main_option("sqlalchemy.url"), poolclass=sa.NullPool)
with engine.connect() as connection:
    context.configure(connection=connection, target_metadata=Base.metadata, **filters)
    with context.begin_transaction():
        if config.get_main_option("ledger") == "inside":
            tsg.upgrade(connection)
        context.run_migrations()
