"""An agent in Python, ``worker.py FOLDER slow|patient|taken|mortal``: it starts what it is asked to do, and reports.

It works with heartbeats until its gate is opened. A slow one takes a while to come to it the first time; what is taken
was started already; a mortal one waits for no gate, and dies at its first try.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

from story import is_first, tell

#: Longer than any test lasts, so that nothing is left behind by one that fails.
LONGEST = 150.0
#: Longer than a lease of these tests.
SLEEPY_SECONDS = 3.0

FOLDER, KIND = Path(sys.argv[1]), sys.argv[2]
PLAN, STEP, TOKEN = (os.environ[name] for name in ("TSG_PLAN", "TSG_STEP", "TSG_ATTEMPT"))

tell(FOLDER, "launched")
if KIND == "slow" and is_first(FOLDER, "sleepy"):
    time.sleep(SLEEPY_SECONDS)

from tsg import Ledger, Plans, StateConflict  # noqa: E402  # what was slow so far was the agent


def persistently(do: Callable[[], object]) -> None:
    """Others at the same moment are no reason to give up."""
    while True:
        try:
            do()
        except StateConflict as refused:
            if not refused.retriable:
                raise
            time.sleep(0.05)
        else:
            return


def work(plans: Plans) -> None:
    if KIND != "taken":
        try:
            persistently(lambda: plans.start(PLAN, STEP, attempt=TOKEN))
        except StateConflict:
            tell(FOLDER, "refused")
            sys.exit(4)
    tell(FOLDER, "begins")
    if KIND == "mortal" and is_first(FOLDER, f"died-{STEP}"):
        tell(FOLDER, "dies")
        os.kill(os.getpid(), signal.SIGKILL)
    give_up = time.monotonic() + LONGEST
    while KIND != "mortal" and not (FOLDER / f"gate-{STEP}").exists():
        persistently(lambda: plans.heartbeat(TOKEN))
        # Not by time.sleep, which fails where a clock is made to jump.
        select.select([], [], [], 0.25)
        if time.monotonic() > give_up:
            sys.exit(5)
    tell(FOLDER, "ends")
    persistently(lambda: plans.complete(PLAN, STEP, attempt=TOKEN, learnings=[f"learned by {KIND}"]))
    tell(FOLDER, "succeeded")


with Ledger(os.environ["TSG_DB"]) as ledger:
    work(Plans(ledger))
