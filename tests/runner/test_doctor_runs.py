"""Doctor on how plans are run: what runners do is healthy, and everything that contradicts is counted."""

from __future__ import annotations

import pytest
import sqlalchemy as sa

from tests.runner.conftest import hand_over, put_back, take_round
from tsg import Ledger, Plans

OTHER = "99999999-9999-4999-8999-999999999999"

#: What is done behind our back to the plans of :func:`grown`.
DAMAGE = {
    "what is on its way is no attempt": (
        "INSERT INTO tsg_plan_dispatches (id, agent, session, deliveries, inbox_at) "
        f"VALUES ('{OTHER}', 'a', 'agent:a:main', 1, 1000)"
    ),
    "what is on its way is over": (
        "UPDATE tsg_plan_attempts SET ended_as = 'failed', ended_at = 1000 "
        "WHERE id IN (SELECT id FROM tsg_plan_dispatches WHERE inbox_at IS NOT NULL)"
    ),
    "an entry lies in another agent's inbox": ("UPDATE tsg_plan_dispatches SET agent = 'b' WHERE inbox_at IS NOT NULL"),
    "an entry is stale": (
        "INSERT INTO tsg_plan_dispatches (id, agent, session, deliveries, inbox_at) "
        "SELECT id, 'a', 'agent:a:main', 1, 1000 FROM tsg_plan_attempts WHERE ended_as = 'succeeded'"
    ),
    "the run of a plan is lost": "DELETE FROM tsg_plan_runs WHERE plan_pk = 1",
    "the run of a failed plan is lost": "DELETE FROM tsg_plan_runs WHERE plan_pk = 3",
    "a run is of no plan": ("INSERT INTO tsg_plan_runs (plan_pk, halted, global_retry) VALUES (99, {false}, 0)"),
    "a plan that goes on is halted": "UPDATE tsg_plan_runs SET halted = {true} WHERE plan_pk = 1",
    "a plan that has failed for a delivery is not halted": (
        "UPDATE tsg_plan_runs SET halted = {false} WHERE plan_pk = 2"
    ),
    "a plan is completed and halted": "UPDATE tsg_plan_runs SET halted = {true} WHERE plan_pk = 4",
    "a plan that goes on is failed": "UPDATE tsg_plans SET status = 'failed' WHERE pk = 1",
    "a plan is pending that has never gone on": "UPDATE tsg_plans SET status = 'pending' WHERE pk = 1",
}


@pytest.fixture
def grown(ledger: Ledger) -> Plans:
    """A plan of each kind: running, with steps done, on their way and in the inbox; halted; failed; completed."""
    plans = Plans(ledger)
    for name in ("running", "halted", "failed", "completed"):
        plans.create(name, agent="a", retries=0, on_exhausted="fail")
        for _ in range(3):
            plans.add_step(name, subject="Do it")
        errands = take_round(plans, name, most=3).errands
        plans.complete(name, "T-001", attempt=errands[0].attempt)
        if name in ("running", "halted"):
            put_back(plans, errands[1], halt=name == "halted")
        elif name == "failed":
            hand_over(plans, errands[1])
            plans.fail(name, "T-002", attempt=errands[1].attempt)
        else:
            for errand in errands[1:]:
                plans.complete(name, errand.step["id"], attempt=errand.attempt)
    return plans


def test_plans_of_each_kind_are_healthy(grown: Plans) -> None:
    report = grown.doctor()
    assert (report["healthy"], report["plan_inconsistency_count"]) == (True, 0)
    assert [view["status"] for view in grown.plans()] == ["running", "failed", "failed", "completed"]


def test_what_contradicts_itself_or_the_plan_is_counted(grown: Plans, engine: sa.Engine) -> None:
    is_postgresql = engine.dialect.name == "postgresql"
    words = {"true": "TRUE", "false": "FALSE"} if is_postgresql else {"true": "1", "false": "0"}
    unseen = []
    with engine.connect() as connection:
        # As a restored or a merged file may be: with what no foreign key allows.
        if not is_postgresql:
            connection.exec_driver_sql("PRAGMA foreign_keys = OFF")
            connection.commit()
        for damage, statement in DAMAGE.items():
            if is_postgresql:
                connection.exec_driver_sql("SET LOCAL session_replication_role = replica")
            assert connection.exec_driver_sql(statement.format(**words)).rowcount >= 1, damage
            if is_postgresql:
                # Doctor says of a connection that asks no trigger that it can't be relied on.
                connection.exec_driver_sql("SET LOCAL session_replication_role = origin")
            report = Plans.within(connection).doctor()
            assert report["doctor_error_count"] == 0, damage
            if report["healthy"] or not report["plan_inconsistency_count"]:
                unseen.append(damage)
            connection.rollback()
    assert unseen == []
    assert grown.doctor()["healthy"]


def test_a_row_that_contradicts_itself_is_refused_by_the_database(grown: Plans, engine: sa.Engine) -> None:
    for statement in (
        "UPDATE tsg_plan_runs SET global_retry = -1",
        "UPDATE tsg_plan_runs SET halted = NULL",
        "UPDATE tsg_plan_dispatches SET lease_until = NULL, inbox_at = NULL",
        "UPDATE tsg_plan_dispatches SET deliveries = 0",
        "UPDATE tsg_plan_dispatches SET agent = NULL",
    ):
        with engine.connect() as connection, pytest.raises(sa.exc.IntegrityError):
            connection.exec_driver_sql(statement)
    assert grown.doctor()["healthy"]
