"""How a plan is run, and what is on its way to an agent.

Revision ID: 0002
Revises: 0001
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from tsg.errors import StateConflict

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

KEY = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
ID = sa.String(36).with_variant(sa.UUID(as_uuid=False), "postgresql")
# What a plan has that nobody runs: all of it can go, and come back.
_PLAIN = (
    "agent IS NULL AND session_name IS NULL AND NOT halted AND global_retry = 0 AND cockpit IS NULL "
    "AND theme IS NULL AND source IS NULL"
)


def upgrade() -> None:
    op.create_table(
        "tsg_plan_runs",
        sa.Column("plan_pk", KEY, autoincrement=False, nullable=False),
        sa.Column("agent", sa.Text(), nullable=True),
        sa.Column("session_name", sa.Text(), nullable=True),
        sa.Column("halted", sa.Boolean(), nullable=False),
        sa.Column("global_retry", sa.Integer(), nullable=False),
        sa.Column("cockpit", sa.Text(), nullable=True),
        sa.Column("theme", sa.Text(), nullable=True),
        sa.Column("source", sa.Text(), nullable=True),
        sa.CheckConstraint("global_retry >= 0", name=op.f("ck_tsg_plan_runs_global_retry")),
        sa.PrimaryKeyConstraint("plan_pk", name=op.f("pk_tsg_plan_runs")),
        sa.ForeignKeyConstraint(
            ["plan_pk"], ["tsg_plans.pk"], name=op.f("fk_tsg_plan_runs_plan_pk"), ondelete="CASCADE"
        ),
    )
    op.create_table(
        "tsg_plan_dispatches",
        sa.Column("id", ID, nullable=False),
        sa.Column("agent", sa.Text(), nullable=False),
        sa.Column("session", sa.Text(), nullable=False),
        sa.Column("deliveries", sa.Integer(), nullable=False),
        sa.Column("lease_until", sa.Double(), nullable=True),
        sa.Column("inbox_at", sa.Double(), nullable=True),
        sa.CheckConstraint(
            "lease_until IS NOT NULL OR inbox_at IS NOT NULL", name=op.f("ck_tsg_plan_dispatches_lease_until")
        ),
        sa.CheckConstraint("deliveries > 0", name=op.f("ck_tsg_plan_dispatches_deliveries")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_tsg_plan_dispatches")),
        sa.ForeignKeyConstraint(
            ["id"], ["tsg_plan_attempts.id"], name=op.f("fk_tsg_plan_dispatches_id"), ondelete="CASCADE"
        ),
    )
    in_inbox = sa.text("inbox_at IS NOT NULL")
    op.create_index(
        op.f("ix_tsg_plan_dispatches_inbox"),
        "tsg_plan_dispatches",
        ["agent", "inbox_at"],
        sqlite_where=in_inbox,
        postgresql_where=in_inbox,
    )
    made_before = sa.text(
        "INSERT INTO tsg_plan_runs (plan_pk, halted, global_retry) SELECT pk, :halted, 0 FROM tsg_plans"
    )
    op.get_bind().execute(made_before.bindparams(sa.bindparam("halted", False, sa.Boolean())))


def downgrade() -> None:
    told = sa.text(
        f"SELECT 1 FROM tsg_plan_runs WHERE NOT ({_PLAIN}) UNION ALL SELECT 1 FROM tsg_plan_dispatches LIMIT 1"
    )
    if op.get_bind().scalar(told) is not None:
        raise StateConflict("there are plans that are run by themselves; remove them first")
    op.drop_table("tsg_plan_dispatches")
    op.drop_table("tsg_plan_runs")
