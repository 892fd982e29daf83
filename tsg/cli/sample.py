"""A sample plan that moves by itself, to be watched in the cockpit: real agents, one of them flaky, one slow."""

from __future__ import annotations

import sys
import tempfile
import threading
import webbrowser
from pathlib import Path
from typing import Any, Final

import click

from tsg.errors import LedgerError
from tsg.ledger import Ledger
from tsg.plan.store import Plans
from tsg.runner.agents import Agent, Agents
from tsg.runner.logs import Logs
from tsg.runner.loop import Runner

__all__ = ["watch"]

_NAME: Final = "bedtime stories"
#: What is to be done, by whom, after what, and what else there is to say of it.
_STEPS: Final[tuple[tuple[str, str, tuple[str, ...], dict[str, Any]], ...]] = (
    ("Collect what the village remembers", "mimi", (), {}),
    ("Choose the seven tales", "mimi", ("T-001",), {}),
    ("Draw a map of the forest", "waldo", ("T-002",), {}),
    ("Write the tale of the fox", "mimi", ("T-002",), {}),
    ("Write the tale of the owl", "pip", ("T-002",), {"retries": 2}),
    ("Write the tale of the well", "mimi", ("T-002",), {}),
    ("Paint the fox", "waldo", ("T-003", "T-004"), {}),
    ("Paint the owl at night", "waldo", ("T-003", "T-005"), {"timeout_seconds": 8, "retries": 0, "partial_ok": True}),
    ("Paint the well", "waldo", ("T-003", "T-006"), {}),
    ("Read all aloud, once", "pip", ("T-004", "T-005", "T-006"), {"retries": 0}),
    ("Bind the book", "mimi", ("T-007", "T-009"), {}),
)
#: What an agent does: work for some seconds, as its step's number has it; who is flaky fails at a step's first try.
_WORK: Final = """
import os, subprocess, sys, time
step, tried = os.environ["TSG_STEP"], os.environ["TSG_DB"] + "." + os.environ["TSG_STEP"]
tsg = [sys.executable, "-P", "-m", "tsg", "step", "heartbeat", os.environ["TSG_PLAN"], step]
time.sleep(2 + int(step[2:]) % 4)
if step == "T-008":
    subprocess.run([*tsg, "--output", "the sky is done, the owl is not"], stdout=subprocess.DEVNULL, check=True)
    time.sleep(30)
if os.environ["TSG_AGENT"] == "pip" and not os.path.exists(tried):
    open(tried, "x").close()
    sys.exit(1)
"""


def watch(*, port: int, theme: str) -> None:
    """Run the sample on a ledger of its own, and show it in the browser until an interrupt."""
    from tsg.cockpit.server import serve

    with tempfile.TemporaryDirectory(prefix="tsg-demo-", ignore_cleanup_errors=True) as folder:
        place = str(Path(folder, "ledger.sqlite"))
        with Ledger(place) as ledger, Ledger(place) as own:
            plans = Plans(ledger)
            _make(plans)
            runner = _runner(Plans(own), place, folder)
            at_work = threading.Thread(target=_carry, args=(runner,), name="tsg-sample")

            def announce(address: str) -> None:
                click.echo(f"The cockpit is at {address}\nIt moves by itself; an interrupt (Ctrl-C) ends it.")
                at_work.start()
                webbrowser.open(address)

            try:
                serve(plans, port=port, theme=theme, announce=announce)
            finally:
                # Whoever is at work hears by the next heartbeat that it is over.
                plans.cancel_plan(_NAME)
                runner.stop()
                if at_work.is_alive():
                    at_work.join()
                runner.close()


def _make(plans: Plans) -> None:
    plans.create(_NAME, description="A book of seven tales, by three agents", grace_seconds=8, base_seconds=2)
    for subject, owner, blocked_by, more in _STEPS:
        plans.add_step(_NAME, subject=subject, owner=owner, blocked_by=blocked_by, **more)


def _runner(plans: Plans, place: str, folder: str) -> Runner:
    tsg = (sys.executable, "-P", "-m", "tsg")
    command = (*tsg, "agent", "exec", "{plan}", "{step}", "--", sys.executable, "-c", _WORK)
    agents = Agents([Agent(name, name.capitalize(), command) for name in ("mimi", "waldo", "pip")])
    logs = Logs(Path(folder, "logs"), _NAME)
    return Runner(
        plans,
        _NAME,
        database=place,
        agents=agents,
        interval_seconds=1,
        max_parallel=3,
        on_undelivered="wait",
        logs=logs,
    )


def _carry(runner: Runner) -> None:
    try:
        runner.run()
    except LedgerError as error:
        click.echo(f"the run ended: {type(error).__name__}", err=True)
