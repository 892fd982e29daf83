"""A small application with its own models and its own Alembic history, in whose database a ledger is a guest."""
