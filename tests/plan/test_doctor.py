"""Doctor on plans: what is right is healthy, and everything that contradicts is counted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import sqlalchemy as sa

from tests.conftest import FakeClock, tsg
from tsg import Ledger, Plans
from tsg import doctor as ledger_doctor

OTHER = "99999999-9999-4999-8999-999999999999"

#: What is done behind our back to the plan of :func:`grown`, and how many rows it makes wrong at the least.
DAMAGE = {
    "an open blocker is forgotten": "UPDATE tsg_plan_steps SET open_blockers = 0 WHERE key = 'T-005'",
    "a dependency is taken away": "DELETE FROM tsg_plan_dependencies WHERE step_pk = 5 AND blocker_pk = 4",
    "a dependency is added": ("INSERT INTO tsg_plan_dependencies (step_pk, blocker_pk, place) VALUES (7, 3, 9)"),
    "two steps wait for each other": (
        "INSERT INTO tsg_plan_dependencies (step_pk, blocker_pk, place) VALUES (4, 5, 9)",
        "UPDATE tsg_plan_steps SET open_blockers = open_blockers + 1 WHERE pk = 4",
    ),
    "a step waits for one of another plan": (
        "INSERT INTO tsg_plan_dependencies (step_pk, blocker_pk, place) VALUES (7, 8, 9)",
        "UPDATE tsg_plan_steps SET open_blockers = open_blockers + 1 WHERE pk = 7",
    ),
    "a blocker is deleted and kept": "UPDATE tsg_plan_steps SET status = 'deleted', due_at = NULL WHERE key = 'T-004'",
    "a live attempt is not the ledger's": (
        f"UPDATE tsg_plan_steps SET attempt_id = '{OTHER}' WHERE key = 'T-003'",
        f"UPDATE tsg_plan_attempts SET id = '{OTHER}' WHERE step_pk = 3",
    ),
    "a live attempt is lost": "DELETE FROM tsg_plan_attempts WHERE step_pk = 3",
    "a live attempt is another step's": "UPDATE tsg_plan_attempts SET step_pk = 6, number = 7 WHERE step_pk = 3",
    "an attempt is said to be over that lives": (
        "UPDATE tsg_plan_attempts SET ended_as = 'failed', ended_at = 1000 WHERE step_pk = 3"
    ),
    "an attempt is over and the step does not know": (
        "UPDATE tsg_plan_attempts SET ended_as = NULL, ended_at = NULL WHERE step_pk = 1"
    ),
    "an attempt ended otherwise": "UPDATE tsg_plan_attempts SET ended_as = 'failed' WHERE step_pk = 1",
    "an attempt ended at another time": "UPDATE tsg_plan_attempts SET ended_at = ended_at + 1 WHERE step_pk = 1",
    "an attempt is not counted": "UPDATE tsg_plan_steps SET attempts = 2 WHERE key = 'T-001'",
    "a second live attempt": (
        f"INSERT INTO tsg_plan_attempts (id, step_pk, number, opened_at) VALUES ('{OTHER}', 3, 2, 1000)",
        "UPDATE tsg_plan_steps SET attempts = 2 WHERE key = 'T-003'",
    ),
    "the plan is completed too early": "UPDATE tsg_plans SET status = 'completed', closed_at = 1000 WHERE pk = 1",
    "the plan has failed for no step": "UPDATE tsg_plans SET status = 'failed' WHERE pk = 1",
    "the plan has not begun": "UPDATE tsg_plans SET status = 'pending' WHERE pk = 1",
    "the root is another task": f"UPDATE tsg_plans SET root_id = '{OTHER}' WHERE pk = 1",
    "a key would be given twice": "UPDATE tsg_plans SET next_number = 3 WHERE pk = 1",
    "something was learned too early": (
        "INSERT INTO tsg_plan_learnings (step_pk, text, learned_at) VALUES (5, 'x', 1000)"
    ),
}


def grow(plans: Plans, clock: FakeClock) -> Plans:
    """Two plans; in the first a step of every kind: completed, retried, live, blocked, escalated."""
    for name in ("feature", "other"):
        plans.create(name, retries=0)
    plans.add_step("feature", subject="completed")
    plans.add_step("feature", subject="completed too", blocked_by=["T-001"])
    plans.add_step("feature", subject="live", blocked_by=["T-001"])
    plans.add_step("feature", subject="waits for its retry", retries=3)
    plans.add_step("feature", subject="blocked", blocked_by=["T-003", "T-004"])
    plans.add_step("feature", subject="escalated")
    plans.add_step("feature", subject="free")
    plans.add_step("other", subject="alone")
    for key in ("T-001", "T-002"):
        clock.advance(1)
        plans.start("feature", key, agent="a")
        clock.advance(1)
        plans.complete("feature", key, learnings=[f"from {key}"])
    plans.start("feature", "T-003", agent="a")
    for key in ("T-004", "T-006"):
        plans.start("feature", key, agent="b")
        plans.fail("feature", key)
    return plans


@pytest.fixture
def grown(plans: Plans, clock: FakeClock) -> Plans:
    return grow(plans, clock)


def test_a_plan_with_a_step_of_every_kind_is_healthy(grown: Plans) -> None:
    report = grown.doctor()
    assert (report["healthy"], report["plan_inconsistency_count"]) == (True, 0)


@pytest.mark.parametrize("damage", DAMAGE)
def test_what_contradicts_itself_or_the_ledger_is_counted(grown: Plans, engine: sa.Engine, damage: str) -> None:
    statements = DAMAGE[damage]
    with engine.begin() as connection:
        for statement in (statements,) if isinstance(statements, str) else statements:
            assert connection.exec_driver_sql(statement).rowcount >= 1
    report = grown.doctor()
    assert report["plan_inconsistency_count"] >= 1
    assert not report["healthy"]
    assert report["doctor_error_count"] == 0


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE tsg_plan_steps SET status = 'ready' WHERE key = 'T-007'",
        "UPDATE tsg_plan_steps SET status = 'in_progress' WHERE key = 'T-007'",
        "UPDATE tsg_plan_steps SET attempt_id = NULL WHERE key = 'T-003'",
        "UPDATE tsg_plan_steps SET open_blockers = 1 WHERE key = 'T-003'",
        "UPDATE tsg_plan_steps SET due_at = 1 WHERE key = 'T-001'",
        "UPDATE tsg_plan_steps SET completed_at = 1 WHERE key = 'T-007'",
        "UPDATE tsg_plan_steps SET failures = -1 WHERE key = 'T-007'",
        "UPDATE tsg_plans SET closed_at = 1 WHERE name = 'feature'",
        "UPDATE tsg_plans SET on_exhausted = 'shrug'",
        "UPDATE tsg_plan_attempts SET ended_as = 'running', ended_at = 1",
        "INSERT INTO tsg_plan_dependencies (step_pk, blocker_pk, place) VALUES (7, 7, 0)",
    ],
)
def test_a_row_that_contradicts_itself_is_refused_by_the_database(
    grown: Plans, engine: sa.Engine, statement: str
) -> None:
    with engine.connect() as connection, pytest.raises(sa.exc.IntegrityError):
        connection.exec_driver_sql(statement)
    assert grown.doctor()["healthy"]


def test_an_attempt_that_reconcile_has_closed_is_healthy_before_it_is_folded(
    grown: Plans, ledger: Ledger, clock: FakeClock
) -> None:
    clock.advance(120)
    assert ledger.reconcile(active_grace_seconds=600, delivery_grace_seconds=600)["tasks_timed_out"] == 1
    assert grown.get("feature", "T-003")["status"] == "in_progress"
    assert grown.doctor()["healthy"]
    grown.advance("feature")
    assert grown.get("feature", "T-003")["status"] == "escalated"
    assert grown.doctor()["healthy"]


def test_what_was_pruned_is_no_contradiction(grown: Plans, ledger: Ledger, clock: FakeClock) -> None:
    clock.advance(1_000_000)
    grown.advance("feature")
    pruned = ledger.prune(1_000)
    assert pruned["tasks_pruned"] >= 4
    assert grown.doctor()["healthy"]


def test_the_ledger_s_own_doctor_does_not_know_of_plans(grown: Plans, ledger: Ledger, engine: sa.Engine) -> None:
    with engine.begin() as connection:
        connection.exec_driver_sql("UPDATE tsg_plans SET status = 'failed' WHERE pk = 1")
    report = ledger.doctor()
    assert report["healthy"]
    assert "plan_inconsistency_count" not in report
    with engine.connect() as connection:
        assert ledger_doctor.examine(connection)["healthy"]


@pytest.mark.parametrize(
    "statement",
    [
        "DROP INDEX ix_tsg_plan_steps_claimable",
        "ALTER TABLE tsg_plans ADD COLUMN more INTEGER",
        "CREATE TABLE tsg_plan_more (a INTEGER)",
        "DELETE FROM tsg_plan_alembic_version",
        "UPDATE tsg_plan_alembic_version SET version_num = '9999'",
    ],
)
def test_a_schema_that_was_altered_is_an_error_of_doctor_s(
    own_place: Path | sa.URL, clock: FakeClock, statement: str
) -> None:
    url = own_place if isinstance(own_place, sa.URL) else sa.URL.create("sqlite", database=str(own_place))
    with Ledger(own_place, clock=clock) as ledger:
        plans = Plans(ledger)
        engine = sa.create_engine(url)
        with engine.begin() as connection:
            connection.exec_driver_sql(statement)
        engine.dispose()
        report = plans.doctor()
    assert (report["healthy"], report["schema_ok"], report["doctor_error_count"]) == (False, True, 1)


def test_the_command_line_shows_the_count_only_where_there_are_plans(path: Path, clock: FakeClock) -> None:
    with Ledger(path) as ledger:
        said = json.loads(tsg("--db", path, "doctor").stdout)
        assert "plan_inconsistency_count" not in said
        Plans(ledger).create("feature")
    ran = tsg("--db", path, "doctor")
    assert ran.returncode == 0
    assert json.loads(ran.stdout)["plan_inconsistency_count"] == 0
    engine = sa.create_engine(f"sqlite:///{path}")
    with engine.begin() as connection:
        connection.exec_driver_sql("UPDATE tsg_plans SET status = 'failed'")
    engine.dispose()
    ran = tsg("--db", path, "doctor")
    assert ran.returncode == 1
    assert json.loads(ran.stdout)["plan_inconsistency_count"] == 1
