"""Orders, each with its task.

Revision ID: 5b1f0c9d2e7a
Revises:
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "5b1f0c9d2e7a"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "orders",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("item", sa.String(100), nullable=False),
        sa.Column("quantity", sa.Integer(), nullable=False),
        sa.Column("packed", sa.Integer(), nullable=False),
        sa.Column("state", sa.String(10), nullable=False),
        # The type of a task's id: text on SQLite, uuid on PostgreSQL.
        sa.Column("task_id", sa.String(36).with_variant(sa.UUID(as_uuid=False), "postgresql"), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_orders")),
        sa.UniqueConstraint("task_id", name=op.f("uq_orders_task_id")),
        sa.ForeignKeyConstraint(["task_id"], ["tsg_tasks.id"], name=op.f("fk_orders_task_id")),
        sa.CheckConstraint("quantity BETWEEN 1 AND 1000", name=op.f("ck_orders_quantity")),
        sa.CheckConstraint("packed BETWEEN 0 AND quantity", name=op.f("ck_orders_packed")),
        sa.CheckConstraint(
            "state IN ('open', 'done') AND (state = 'open' OR packed = quantity)", name=op.f("ck_orders_state")
        ),
    )


def downgrade() -> None:
    op.drop_table("orders")
