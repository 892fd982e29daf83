# ruff: noqa: T201
"""A feature built by three agents: five steps, three of them free at once, each done once, whatever is killed.

    python examples/product_reviews.py --db reviews/ledger.sqlite

Demeter makes the schema; then Hermes writes two endpoints while Aphrodite builds the component; last come the tests,
which are handed what the others have learned. Each agent is a process of its own that asks the plan for its next step,
sends heartbeats while it works, and reports. Kill the whole of it at any moment and run it again with the same
``--db``: steps that are done stay done, and one that was left in the middle is tried again as soon as its agent has
been silent for two seconds. Without ``--db`` the ledger is a temporary one.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from tsg import Ledger, Plans, StateConflict

PLAN = "Add Product Reviews"
AGENTS = ("Demeter", "Hermes", "Aphrodite")


class Step(NamedTuple):
    subject: str
    owner: str
    blocked_by: tuple[str, ...] = ()


#: Their keys are T-001, T-002 and so on.
STEPS = (
    Step("Create reviews schema", "Demeter"),
    Step("Implement POST /reviews", "Hermes", ("T-001",)),
    Step("Implement GET /reviews", "Hermes", ("T-001",)),
    Step("Build ReviewCard component", "Aphrodite", ("T-001",)),
    Step("Integration tests", "Hermes", ("T-002", "T-003", "T-004")),
)


def make(plans: Plans) -> None:
    """Make the plan, or what is missing of it since the last time."""
    if PLAN not in [plan["name"] for plan in plans.plans()]:
        # Without a timeout it is silence alone that tells that an agent is gone, and here that is a matter of seconds.
        # Nobody is there to decide anything: what fails too often fails the plan.
        plans.create(PLAN, timeout_seconds=None, grace_seconds=2, retries=10, base_seconds=0.5, on_exhausted="fail")
    for step in STEPS[len(plans.steps(PLAN, all=True)) :]:
        plans.add_step(PLAN, subject=step.subject, owner=step.owner, blocked_by=step.blocked_by)


def is_over(plans: Plans) -> bool:
    return plans.show(PLAN)["status"] in ("completed", "failed", "cancelled")


def work(db: str, agent: str, seconds: float) -> None:
    """One agent: claim, work, complete, until there is nothing left to do."""
    starter = os.getppid()
    with Ledger(db, busy_timeout_ms=30_000) as ledger:
        plans = Plans(ledger)
        # Who is left behind by the program that started it makes no new claims.
        while not is_over(plans) and os.getppid() == starter:
            step = plans.claim(PLAN, agent)
            if step is None:
                time.sleep(0.1)
                continue
            attempt, key = step["attempt"], step["id"]
            assert attempt is not None
            print(f"{agent} begins {key}, attempt {step['attempts']}: {step['subject']}", flush=True)
            try:
                for _ in range(4):
                    time.sleep(seconds / 4)
                    plans.heartbeat(attempt)
                plans.complete(
                    PLAN,
                    key,
                    attempt=attempt,
                    output="; ".join(["knew", *step["learnings"]]),
                    learnings=[f"{agent} did '{step['subject']}'"],
                )
            except StateConflict:
                # Its time was over, and somebody else has it now.
                print(f"{agent} was too late with {key}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description="A plan that five steps and three agents carry out.")
    parser.add_argument("--db", help="a path or a database URL; made if it is missing")
    parser.add_argument("--seconds", type=float, default=0.4, help="how long a step takes (default: 0.4)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        db = options.db or str(Path(folder, "ledger.sqlite"))
        with Ledger(db, busy_timeout_ms=30_000) as ledger:
            make(Plans(ledger))
        workers = [multiprocessing.Process(target=work, args=(db, agent, options.seconds)) for agent in AGENTS]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        with Ledger(db) as ledger:
            plans = Plans(ledger)
            for step in plans.steps(PLAN, all=True):
                print(f"{step['id']} {step['status']} by {step['owner']}, attempts: {step['attempts']}")
            status, report = plans.show(PLAN)["status"], plans.doctor()
        print(f"{PLAN}: {status}; doctor: {'healthy' if report['healthy'] else 'not healthy'}")
    return 0 if status == "completed" and report["healthy"] else 1


if __name__ == "__main__":
    sys.exit(main())
