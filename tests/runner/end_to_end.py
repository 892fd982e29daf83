"""What tests of whole runs stand on: runners as processes, agents that tell what they did, and the story of both."""

from __future__ import annotations

import contextlib
import fcntl
import io
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tests.faults import writers
from tests.faults.test_kills import wait_until
from tests.faults.writers import Zygote
from tests.test_concurrency import Place, named
from tsg import Ledger, Plans
from tsg.cli import main as command_line

AGENTS = Path(__file__).parent / "agents"
TSG = [sys.executable, "-m", "tsg"]
#: Of the runners that are forked, instead of 60 seconds, so that fifty of them can die in reasonable time.
LEASE_SECONDS = 1.5


# -- processes ---------------------------------------------------------------------------------------------


class Forks(Zygote):
    """Forks runners and commands from a process that is warm: a real process each, that need not import anything."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-W", "error", "-m", "tests.runner.end_to_end"],
            cwd=writers.ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._alive = set()

    def answer(self, *arguments: object) -> tuple[int, dict[str, Any]]:
        """The real command line, in a process of its own: its exit status, and what it said."""
        status, said = self.run(*arguments)
        return status, json.loads(said)


def runner(arguments: list[str], output: str) -> int:
    """Role: one runner, with shorter leases."""
    from tsg.runner import deliveries, dispatch

    dispatch.LEASE_SECONDS = deliveries.LEASE_SECONDS = LEASE_SECONDS  # type: ignore[misc]  # it is said to be final
    os.open(os.devnull, os.O_RDONLY)
    return writers.command(arguments, output)


def gated(arguments: list[str], output: str, gate: str) -> int:
    """Role: one command, held back until whoever has locked the gate lets go of it."""
    with open(gate, "rb") as held:
        fcntl.flock(held, fcntl.LOCK_SH)
    return writers.command(arguments, output)


def warm_up_runs() -> None:
    """Have every statement of a run compiled."""
    with tempfile.TemporaryDirectory(prefix="tsg-warm-") as folder:
        path = Path(folder, "warm", "ledger.sqlite")
        words: list[list[str]] = [["init"], ["plan", "create", "warm", "--agent", "a", "--base-seconds", "0"]]
        words += [["step", "add", "warm", "--subject", "Warm up"]]
        words += [["step", "add", "warm", "--subject", "Come after", "--blocked-by", "T-001"]]
        words += [["run", "warm"], ["inbox", "list", "a"], ["inbox", "take", "a"]]
        words += [["step", "heartbeat", "warm", "T-001"], ["step", "complete", "warm", "T-001", "failed"]]
        words += [["run", "warm", "--stall-seconds", "0"], ["inbox", "take", "a"], ["plan", "show", "warm"]]
        words += [["step", "complete", "warm", "T-001", "success", "--learning", "how"], ["doctor"]]
        for arguments in words:
            silent = (
                contextlib.redirect_stdout(io.StringIO()),
                contextlib.redirect_stderr(io.TextIOWrapper(io.BytesIO())),
            )
            with silent[0], silent[1], contextlib.suppress(SystemExit):
                command_line(["--db", str(path), *arguments])


def living(place: Place) -> list[int]:
    """The processes that were started for agents of a ledger: what all of them, and theirs, have in the environment."""
    mark = f"TSG_DB={named(place)}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and mark in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
    return found


def end_what_lives(place: Place) -> None:
    """SIGKILL what a test has left behind."""
    for process in living(place):
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)


@contextlib.contextmanager
def running(place: Place, *arguments: object, env: Mapping[str, str] | None = None) -> Iterator[subprocess.Popen[str]]:
    """A real ``tsg`` in a process of its own, which is ended with the block."""
    words = [*TSG, "--db", named(place), *(str(part) for part in arguments)]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(words, env={**os.environ, **(env or {})}, **pipes) as process:
        try:
            yield process
        finally:
            process.kill()


def answered(process: subprocess.Popen[str], seconds: float = 30) -> tuple[int, dict[str, Any]]:
    """How a command has ended, and what it said."""
    out, err = process.communicate(timeout=seconds)
    assert err == ""
    return process.returncode, json.loads(out)


# -- what is told ------------------------------------------------------------------------------------------


class Told(NamedTuple):
    """A line of an agent's."""

    token: str
    step: str
    event: str
    time: float


def story(folder: Path) -> list[Told]:
    """What the agents have told, in the order of time."""
    file = folder / "story"
    lines = [line.split() for line in file.read_text().splitlines()] if file.exists() else []
    return sorted((Told(token, step, event, float(at)) for token, step, event, at in lines), key=lambda told: told.time)


def log(folder: Path, name: str = "daemon.log") -> list[dict[str, Any]]:
    """The lines of a log; none may be torn."""
    file = folder / name
    return [json.loads(line) for line in file.read_bytes().splitlines()] if file.exists() else []


def events(folder: Path, event: str, name: str = "daemon.log") -> list[dict[str, Any]]:
    return [line for line in log(folder, name) if line["event"] == event]


def agents_file(folder: Path, commands: Mapping[str, Sequence[object]], *, timeout_seconds: float = 60) -> Path:
    """A file that names agents, and the command of each."""
    known = [
        {
            "agent_id": agent,
            "agent_name": agent.title(),
            "command": [str(part) for part in command],
            "timeout_seconds": timeout_seconds,
        }
        for agent, command in commands.items()
    ]
    path = folder / "agents.json"
    path.write_text(json.dumps({"agents": known}))
    return path


# -- what must be true of any story ------------------------------------------------------------------------


def require_each_done_once(told: Sequence[Told]) -> None:
    """No token's work is begun twice, and no two attempts of a step are at work at once; each step succeeds once."""
    of_token: dict[str, list[Told]] = defaultdict(list)
    for line in told:
        of_token[line.token].append(line)
    spans: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for lines in of_token.values():
        began = [line.time for line in lines if line.event == "begins"]
        over = [line.time for line in lines if line.event in ("ends", "dies")]
        assert len(began) == len(over) <= 1, lines
        if began:
            spans[lines[0].step].append((began[0], over[0]))
    for step, of_step in spans.items():
        of_step.sort()
        for (_, end), (begin, _) in zip(of_step, of_step[1:], strict=False):
            assert end <= begin, f"two at work at {step}"


def require_ledger_agrees(plans: Plans, ledger: Ledger, plan: str, told: Sequence[Told]) -> None:
    """Every step was completed by one attempt, which its agent knows of, and none had two that lived at once."""
    steps = plans.steps(plan, all=True)
    assert {step["status"] for step in steps} == {"completed"}
    tasks = {task.id: task for task in ledger.children_of(plans.show(plan)["root"])}
    of_step: dict[str, list[Any]] = defaultdict(list)
    for line in told:
        task = tasks[line.token]
        if task not in of_step[line.step]:
            of_step[line.step].append(task)
    assert sum(map(len, of_step.values())) == len(tasks) == sum(step["attempts"] for step in steps)
    ended = {line.token for line in told if line.event == "ends"}
    for step, found in of_step.items():
        found.sort(key=lambda task: task.created_at)
        assert [task.status for task in found].count("succeeded") == 1, step
        assert found[-1].status == "succeeded"
        assert found[-1].id in ended
        for earlier, later in zip(found, found[1:], strict=False):
            assert earlier.ended_at is not None
            assert earlier.ended_at <= later.created_at, f"two attempts of {step} lived at once"


def require_sent_again_only_if_not_taken(logs: Path, told: Sequence[Told], slack_seconds: float = 1.0) -> int:
    """That no token was sent once it was taken, and no agent was launched but for a dispatch; how often one was again.

    Args:
        slack_seconds: between the transaction that sends a token once more and the line that tells of it.
    """
    began = {line.token: line.time for line in told if line.event == "begins"}
    sent: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for line in events(logs, "dispatch", "trigger.log"):
        sent[line["attempt"]].append(line)
    assert {line.token for line in told} == set(sent), "an attempt without a dispatch that was told of"
    again = 0
    for token, lines in sent.items():
        numbers = [line["deliveries"] for line in lines]
        assert len(set(numbers)) == len(numbers), "a delivery was told of twice"
        for earlier, line in zip([None, *lines], lines, strict=False):
            if line["deliveries"] > 1:
                again += 1
                # Where the earlier line was not written any more, its runner has died of that.
                since = LEASE_SECONDS if earlier is None else line["time"] - earlier["time"]
                assert since >= LEASE_SECONDS - slack_seconds, "sent again while there was time to hand it over"
                assert line["time"] <= began[token] + slack_seconds, "sent to somebody else though it was taken"
    return again


def wait_for_the_end_of(place: Place, seconds: float = 15) -> None:
    """Every agent ends by itself."""
    until = time.monotonic() + seconds
    while found := living(place):
        assert time.monotonic() < until, f"still there: {found}"
        time.sleep(0.05)


# -- whole runs --------------------------------------------------------------------------------------------


class Chain:
    """Two steps of one agent's, one after the other, and runners that are processes."""

    def __init__(self, plans: Plans, place: Place, forks: Forks, folder: Path) -> None:
        self.plans, self.place, self.forks, self.folder = plans, place, forks, folder
        self.logs, self.output = folder / "logs", folder / "output"

    def make(self, *command: object, **settings: Any) -> None:
        agents_file(self.folder, {"a": command} if command else {})
        self.plans.create("plan", agent="a", base_seconds=0, **settings)
        for blockers in ([], ["T-001"]):
            self.plans.add_step("plan", subject="Do it", blocked_by=blockers)

    def make_for_worker(self, kind: str, **settings: Any) -> None:
        self.make(sys.executable, AGENTS / "worker.py", self.folder, kind, **settings)

    def begin(self, *options: str) -> int:
        words = ["--agents", str(self.folder / "agents.json"), "--log-dir", str(self.logs), "--log-format", "json"]
        words = ["--db", named(self.place), "run", "plan", "--interval", "0.1", *words, *options]
        return self.forks.start("runner", arguments=words, output=str(self.output))

    def until(self, event: str, key: str = "T-001") -> None:
        def is_told() -> bool:
            return any((line.step, line.event) == (key, event) for line in story(self.folder))

        wait_until(is_told, f"{key}: {event} was not told of", 30)

    def until_begun(self, runs: int) -> None:
        """So many runners have looked at the plan."""
        wait_until(lambda: len(events(self.logs, "step in_progress")) >= runs, "no round was made", 20)

    def open_gate(self, key: str) -> None:
        (self.folder / f"gate-{key}").touch()

    def require_done_once(self, *runners: int) -> None:
        assert [self.forks.wait(process) for process in runners] == [0] * len(runners), self.output.read_text()
        wait_for_the_end_of(self.place)
        assert [step["attempts"] for step in self.plans.steps("plan", all=True)] == [1, 1]
        told = story(self.folder)
        require_each_done_once(told)
        assert [line.step for line in told if line.event == "begins"] == ["T-001", "T-002"]
        assert len(events(self.logs, "dispatch")) == 2


if __name__ == "__main__":
    writers.ROLES.update({role.__name__: role for role in (runner, gated)})
    warm_up_runs()
    writers.serve()
