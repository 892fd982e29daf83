"""Orders, each with the task of its guest."""

import sqlalchemy as sa
from alembic import op

revision = "abc"
down_revision = None
branch_labels = ("guest",)
depends_on = None


def upgrade():
    op.create_table(
        "orders",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("title", sa.Text(), nullable=False),
        sa.Column("amount", sa.Integer(), nullable=False),
        sa.Column("task_id", sa.String(36).with_variant(sa.Uuid(), "postgresql")),
        sa.PrimaryKeyConstraint("id", name=op.f("guest_orders_pk")),
        sa.ForeignKeyConstraint(["task_id"], ["tsg_tasks.id"], name=op.f("guest_orders_task_id_fk")),
        sa.CheckConstraint("amount > 0", name=op.f("guest_orders_amount_ck")),
    )
    op.create_index(op.f("guest_orders_title_ix"), "orders", ["title"])


def downgrade():
    op.drop_table("orders")
