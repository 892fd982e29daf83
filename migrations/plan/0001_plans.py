"""Plans, their steps, and what was tried and learned.

Revision ID: 0001
Revises:
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from tsg.errors import StateConflict

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

KEY = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
ID = sa.String(36).with_variant(sa.UUID(as_uuid=False), "postgresql")


def upgrade() -> None:
    op.create_table(
        "tsg_plans",
        sa.Column("pk", KEY, sa.Identity(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("root_id", ID, nullable=False),
        sa.Column("description", sa.Text(), nullable=True),
        sa.Column("status", sa.Text(), nullable=False),
        sa.Column("on_exhausted", sa.Text(), nullable=False),
        sa.Column("timeout_seconds", sa.Double(), nullable=True),
        sa.Column("retries", sa.Integer(), nullable=False),
        sa.Column("backoff", sa.Text(), nullable=False),
        sa.Column("base_seconds", sa.Double(), nullable=True),
        sa.Column("factor", sa.Double(), nullable=True),
        sa.Column("cap_seconds", sa.Double(), nullable=True),
        sa.Column("fallback_agent", sa.Text(), nullable=True),
        sa.Column("partial_ok", sa.Boolean(), nullable=False),
        sa.Column("grace_seconds", sa.Double(), nullable=False),
        sa.Column("next_number", sa.Integer(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("closed_at", sa.Double(), nullable=True),
        sa.CheckConstraint(
            (
                "status = 'pending' OR status = 'running' OR status = 'failed' OR status = 'completed' OR status "
                "= 'cancelled'"
            ),
            name=op.f("ck_tsg_plans_status"),
        ),
        sa.CheckConstraint(
            "on_exhausted = 'escalate' OR on_exhausted = 'fail'", name=op.f("ck_tsg_plans_on_exhausted")
        ),
        sa.CheckConstraint("backoff = 'exponential' OR backoff = 'fixed'", name=op.f("ck_tsg_plans_backoff")),
        sa.CheckConstraint("retries >= 0", name=op.f("ck_tsg_plans_retries")),
        sa.CheckConstraint("grace_seconds >= 0", name=op.f("ck_tsg_plans_grace_seconds")),
        sa.CheckConstraint(
            "(closed_at IS NOT NULL) = (status = 'completed' OR status = 'cancelled')",
            name=op.f("ck_tsg_plans_closed_at"),
        ),
        sa.PrimaryKeyConstraint("pk", name=op.f("pk_tsg_plans")),
        sa.UniqueConstraint("name", name=op.f("uq_tsg_plans_name")),
        sa.UniqueConstraint("root_id", name=op.f("uq_tsg_plans_root_id")),
    )
    op.create_table(
        "tsg_plan_agents",
        sa.Column("plan_pk", KEY, nullable=False),
        sa.Column("agent", sa.Text(), nullable=False),
        sa.Column("sessions", sa.Integer(), nullable=False),
        sa.PrimaryKeyConstraint("plan_pk", "agent", name=op.f("pk_tsg_plan_agents")),
        sa.ForeignKeyConstraint(
            ["plan_pk"], ["tsg_plans.pk"], name=op.f("fk_tsg_plan_agents_plan_pk"), ondelete="CASCADE"
        ),
    )
    op.create_table(
        "tsg_plan_steps",
        sa.Column("pk", KEY, sa.Identity(), nullable=False),
        sa.Column("plan_pk", KEY, nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("key", sa.Text(), nullable=False),
        sa.Column("subject", sa.Text(), nullable=False),
        sa.Column("description", sa.Text(), nullable=True),
        sa.Column("active_form", sa.Text(), nullable=True),
        sa.Column("status", sa.Text(), nullable=False),
        sa.Column("owner", sa.Text(), nullable=True),
        sa.Column("metadata", sa.Text(), nullable=False),
        sa.Column("params", sa.Text(), nullable=False),
        sa.Column("thread_id", sa.Text(), nullable=True),
        sa.Column("session_name", sa.Text(), nullable=True),
        sa.Column("timeout_seconds", sa.Double(), nullable=True),
        sa.Column("retries", sa.Integer(), nullable=False),
        sa.Column("backoff", sa.Text(), nullable=False),
        sa.Column("base_seconds", sa.Double(), nullable=True),
        sa.Column("factor", sa.Double(), nullable=True),
        sa.Column("cap_seconds", sa.Double(), nullable=True),
        sa.Column("fallback_agent", sa.Text(), nullable=True),
        sa.Column("partial_ok", sa.Boolean(), nullable=False),
        sa.Column("session_id", sa.Text(), nullable=True),
        sa.Column("session_resume", sa.Text(), nullable=True),
        sa.Column("output", sa.Text(), nullable=True),
        sa.Column("error", sa.Text(), nullable=True),
        sa.Column("failures", sa.Integer(), nullable=False),
        sa.Column("fell_back", sa.Boolean(), nullable=False),
        sa.Column("due_at", sa.Double(), nullable=True),
        sa.Column("open_blockers", sa.Integer(), nullable=False),
        sa.Column("attempts", sa.Integer(), nullable=False),
        sa.Column("attempt_id", ID, nullable=True),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("changed_at", sa.Double(), nullable=False),
        sa.Column("completed_at", sa.Double(), nullable=True),
        sa.Column("source", sa.Text(), nullable=True),
        sa.UniqueConstraint("plan_pk", "number", name=op.f("uq_tsg_plan_steps_number")),
        sa.UniqueConstraint("plan_pk", "key", name=op.f("uq_tsg_plan_steps_key")),
        sa.CheckConstraint(
            (
                "status = 'pending' OR status = 'in_progress' OR status = 'completed' OR status = 'failed' OR "
                "status = 'partial' OR status = 'escalated' OR status = 'cancelled' OR status = 'deleted'"
            ),
            name=op.f("ck_tsg_plan_steps_status"),
        ),
        sa.CheckConstraint("backoff = 'exponential' OR backoff = 'fixed'", name=op.f("ck_tsg_plan_steps_backoff")),
        sa.CheckConstraint(
            "(attempt_id IS NOT NULL) = (status = 'in_progress')", name=op.f("ck_tsg_plan_steps_attempt_id")
        ),
        sa.CheckConstraint(
            "(completed_at IS NOT NULL) = (status = 'completed')", name=op.f("ck_tsg_plan_steps_completed_at")
        ),
        sa.CheckConstraint("due_at IS NULL OR status = 'pending'", name=op.f("ck_tsg_plan_steps_due_at")),
        sa.CheckConstraint(
            "open_blockers >= 0 AND attempts >= 0 AND failures >= 0 AND retries >= 0",
            name=op.f("ck_tsg_plan_steps_counts"),
        ),
        sa.CheckConstraint(
            "status <> 'in_progress' OR (open_blockers = 0 AND attempts > 0)",
            name=op.f("ck_tsg_plan_steps_in_progress"),
        ),
        sa.PrimaryKeyConstraint("pk", name=op.f("pk_tsg_plan_steps")),
        sa.ForeignKeyConstraint(
            ["plan_pk"], ["tsg_plans.pk"], name=op.f("fk_tsg_plan_steps_plan_pk"), ondelete="CASCADE"
        ),
        sa.UniqueConstraint("attempt_id", name=op.f("uq_tsg_plan_steps_attempt_id")),
    )
    op.create_index(
        op.f("ix_tsg_plan_steps_claimable"),
        "tsg_plan_steps",
        ["plan_pk", "number"],
        sqlite_where=sa.text("status = 'pending' AND open_blockers = 0"),
        postgresql_where=sa.text("status = 'pending' AND open_blockers = 0"),
    )
    op.create_index(
        op.f("ix_tsg_plan_steps_live"),
        "tsg_plan_steps",
        ["plan_pk"],
        sqlite_where=sa.text("attempt_id IS NOT NULL"),
        postgresql_where=sa.text("attempt_id IS NOT NULL"),
    )
    op.create_index(op.f("ix_tsg_plan_steps_status"), "tsg_plan_steps", ["plan_pk", "status"])
    op.create_table(
        "tsg_plan_attempts",
        sa.Column("id", ID, nullable=False),
        sa.Column("step_pk", KEY, nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("agent", sa.Text(), nullable=True),
        sa.Column("session_id", sa.Text(), nullable=True),
        sa.Column("opened_at", sa.Double(), nullable=False),
        sa.Column("output", sa.Text(), nullable=True),
        sa.Column("error", sa.Text(), nullable=True),
        sa.Column("ended_as", sa.Text(), nullable=True),
        sa.Column("ended_at", sa.Double(), nullable=True),
        sa.UniqueConstraint("step_pk", "number", name=op.f("uq_tsg_plan_attempts_number")),
        sa.CheckConstraint(
            (
                "ended_as IS NULL OR ended_as = 'succeeded' OR ended_as = 'failed' OR ended_as = 'timed_out' OR "
                "ended_as = 'cancelled'"
            ),
            name=op.f("ck_tsg_plan_attempts_ended_as"),
        ),
        sa.CheckConstraint("(ended_at IS NULL) = (ended_as IS NULL)", name=op.f("ck_tsg_plan_attempts_ended_at")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_tsg_plan_attempts")),
        sa.ForeignKeyConstraint(
            ["step_pk"], ["tsg_plan_steps.pk"], name=op.f("fk_tsg_plan_attempts_step_pk"), ondelete="CASCADE"
        ),
    )
    op.create_table(
        "tsg_plan_dependencies",
        sa.Column("step_pk", KEY, nullable=False),
        sa.Column("blocker_pk", KEY, nullable=False),
        sa.Column("place", sa.Integer(), nullable=False),
        sa.CheckConstraint("step_pk <> blocker_pk", name=op.f("ck_tsg_plan_dependencies_itself")),
        sa.PrimaryKeyConstraint("step_pk", "blocker_pk", name=op.f("pk_tsg_plan_dependencies")),
        sa.ForeignKeyConstraint(
            ["step_pk"], ["tsg_plan_steps.pk"], name=op.f("fk_tsg_plan_dependencies_step_pk"), ondelete="CASCADE"
        ),
        sa.ForeignKeyConstraint(
            ["blocker_pk"], ["tsg_plan_steps.pk"], name=op.f("fk_tsg_plan_dependencies_blocker_pk"), ondelete="CASCADE"
        ),
    )
    op.create_index(op.f("ix_tsg_plan_dependencies_blocker_pk"), "tsg_plan_dependencies", ["blocker_pk"])
    op.create_table(
        "tsg_plan_expected",
        sa.Column("blocker_pk", KEY, nullable=False),
        sa.Column("key", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("blocker_pk", "key", name=op.f("pk_tsg_plan_expected")),
        sa.ForeignKeyConstraint(
            ["blocker_pk"], ["tsg_plan_steps.pk"], name=op.f("fk_tsg_plan_expected_blocker_pk"), ondelete="CASCADE"
        ),
    )
    op.create_index(op.f("ix_tsg_plan_expected_key"), "tsg_plan_expected", ["key"])
    op.create_table(
        "tsg_plan_learnings",
        sa.Column("pk", KEY, sa.Identity(), nullable=False),
        sa.Column("step_pk", KEY, nullable=False),
        sa.Column("text", sa.Text(), nullable=False),
        sa.Column("learned_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("pk", name=op.f("pk_tsg_plan_learnings")),
        sa.ForeignKeyConstraint(
            ["step_pk"], ["tsg_plan_steps.pk"], name=op.f("fk_tsg_plan_learnings_step_pk"), ondelete="CASCADE"
        ),
    )
    op.create_index(op.f("ix_tsg_plan_learnings_step_pk"), "tsg_plan_learnings", ["step_pk"])


def downgrade() -> None:
    if op.get_bind().scalar(sa.text("SELECT 1 FROM tsg_plans LIMIT 1")) is not None:
        raise StateConflict("there are plans; remove them first")
    op.drop_table("tsg_plan_learnings")
    op.drop_table("tsg_plan_expected")
    op.drop_table("tsg_plan_dependencies")
    op.drop_table("tsg_plan_attempts")
    op.drop_table("tsg_plan_steps")
    op.drop_table("tsg_plan_agents")
    op.drop_table("tsg_plans")
