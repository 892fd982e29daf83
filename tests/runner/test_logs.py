"""The story of a run: three files of one's own, a line an event whatever is in it, however many write."""

from __future__ import annotations

import json
import os
import stat
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import FakeClock
from tests.faults.test_kills import wait_until
from tests.runner.conftest import WELL, Begin, chain, done, is_running, on_sqlite
from tests.test_storage import posix
from tsg import InvalidInput, Ledger, Plans
from tsg.runner.logs import Logs, log_name, tail

#: What would end a line somewhere, or be read as a command by a terminal.
HOSTILE = (
    "a\nb\rc\x0bd\x0ce\x1cf\x85g\u2028h\u2029i\x1b[31m\x9b31m\x00\x7f\"'\\ = [1] 2030-01-01T00:00:00Z step done: step=1"
)
NAMES = [
    "plan",
    "two words",
    "..",
    ".",
    "../../etc/passwd",
    "/absolute",
    "a/b\\c:d*e?f",
    "字" * 200,
    "é" * 200,
    "x" * 200,
    "%2F",
    "%",
    "-rf",
    "CON",
    "\u202egnp",
]


def lines(path: Path) -> list[str]:
    """As every reader would find them, the strictest too."""
    text = path.read_text()
    assert text.endswith("\n")
    found = text.splitlines()
    assert found == text[:-1].split("\n")
    return found


@pytest.mark.parametrize("name", NAMES)
def test_a_hostile_name_makes_a_file_in_the_folder(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "logs"
    with Logs(folder, name) as logs:
        logs.tell("run begins")
    assert {entry.name for entry in folder.iterdir()} == {"daemon.log", "trigger.log", log_name(name)}
    assert [entry.name for entry in tmp_path.iterdir()] == ["logs"]
    assert len(lines(folder / log_name(name))) == 1


def test_no_two_plans_have_the_same_log() -> None:
    long = "字" * 200
    names = [*NAMES, "a/b", "a%2Fb", "a b", "a_b", "字" * 199 + "子", "字" * 199, long]
    # Not even one that is called as a long one's file.
    names += [log_name(each)[len("task_") : -len(".log")] for each in (long, "a/b", "x" * 200)]
    assert len({log_name(name) for name in names}) == len(set(names))


def test_a_plain_name_is_told_as_it_is() -> None:
    assert log_name("batch_writing-20260313.v2") == "task_batch_writing-20260313.v2.log"
    assert log_name("周报") == "task_周报.log"


@posix
def test_the_files_are_their_owner_s_alone(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        with Logs(tmp_path / "deep" / "logs", "plan") as logs:
            logs.tell("run begins", triggered=True)
            with logs.output("0f8fad5b-d9cb-469f-a165-70867728950e", 1) as output:
                output.write(b"said")
    finally:
        os.umask(before)
    folder = tmp_path / "deep" / "logs"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    names = {entry.name: stat.S_IMODE(entry.stat().st_mode) for entry in folder.iterdir()}
    assert names == dict.fromkeys(
        (
            "daemon.log",
            "task_plan.log",
            "trigger.log",
            "attempt_0f8fad5b-d9cb-469f-a165-70867728950e_1.log",
        ),
        0o600,
    )


def test_dispatches_are_told_of_in_all_three_files_and_all_else_in_two(tmp_path: Path) -> None:
    with Logs(tmp_path, "plan") as logs:
        logs.tell("run begins")
        logs.tell("dispatch", triggered=True, step="T-001")
    with Logs(tmp_path, "other") as logs:
        logs.tell("run begins")
    assert [len(lines(tmp_path / name)) for name in ("daemon.log", "task_plan.log", "trigger.log")] == [3, 2, 1]


def test_a_line_has_the_time_the_process_the_event_and_what_is_known(tmp_path: Path) -> None:
    with Logs(tmp_path, "two words", clock=lambda: 1_700_000_000.25) as logs:
        logs.tell("step failed", step="T-001", error='no "way"', agent=None, attempts=2)
    (line,) = lines(tmp_path / "daemon.log")
    assert line.startswith(f"2023-11-14T22:13:20.250Z [{os.getpid()}] step failed: ")
    assert line.endswith(': plan="two words" step=T-001 error="no \\"way\\"" attempts=2')


@pytest.mark.parametrize("form", ["text", "json"])
def test_an_event_is_one_line_whatever_is_in_it(tmp_path: Path, form: str) -> None:
    with Logs(tmp_path, "plan", form=form) as logs:
        logs.tell("step failed", triggered=True, error=HOSTILE, agent="\ud800")
    for name in ("daemon.log", "task_plan.log", "trigger.log"):
        (line,) = lines(tmp_path / name)
        # Nor does it do anything to a terminal.
        assert line.isprintable()
    if form == "json":
        assert json.loads(line)["error"] == HOSTILE


def test_the_json_form_gives_an_object_a_line(tmp_path: Path) -> None:
    with Logs(tmp_path, "周报", form="json", clock=lambda: 1000.5) as logs:
        logs.tell("dispatch", step="1", deliveries=2, error=None)
    (line,) = lines(tmp_path / "daemon.log")
    assert json.loads(line) == {
        "time": 1000.5,
        "event": "dispatch",
        "pid": os.getpid(),
        "plan": "周报",
        "step": "1",
        "deliveries": 2,
    }


@pytest.mark.parametrize("form", ["text", "json"])
def test_many_that_append_to_one_folder_tear_no_line(tmp_path: Path, form: str) -> None:
    def write(number: int) -> None:
        with Logs(tmp_path, f"plan {number % 2}", form=form) as logs:
            for _ in range(200):
                logs.tell("step failed", triggered=True, error=str(number) * 3000)

    threads = [threading.Thread(target=write, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = lines(tmp_path / "daemon.log")
    assert len(found) == 1600
    whole = [f'"{str(number) * 3000}"' if form == "json" else f"error={str(number) * 3000}" for number in range(8)]
    assert all(any(text in line for text in whole) for line in found)


def test_what_is_there_already_is_gone_on_with(tmp_path: Path) -> None:
    for _ in range(2):
        with Logs(tmp_path, "plan") as logs:
            logs.tell("run begins")
    assert len(lines(tmp_path / "daemon.log")) == 2


@posix
@pytest.mark.parametrize("spoil", ["a link", "a file in its place", "a folder in a log's place"])
def test_a_folder_that_can_t_be_written_into_safely_is_refused(tmp_path: Path, spoil: str) -> None:
    folder = tmp_path / "logs"
    if spoil == "a file in its place":
        folder.write_text("")
    else:
        folder.mkdir()
        if spoil == "a link":
            (folder / "trigger.log").symlink_to(tmp_path / "elsewhere")
        else:
            (folder / "task_plan.log").mkdir()
    with pytest.raises(InvalidInput):
        Logs(folder, "plan")
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize("form", ["xml", "", None, 7])
def test_a_form_that_is_none_is_refused(tmp_path: Path, form: Any) -> None:
    with pytest.raises(InvalidInput):
        Logs(tmp_path / "logs", "plan", form=form)
    assert not (tmp_path / "logs").exists()


def test_without_a_folder_all_is_told_on_stderr(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    with Logs(None, "plan") as logs:
        logs.tell("dispatch", triggered=True, step="T-001", error=HOSTILE)
        with logs.output("attempt", 1) as output:
            output.write(b"said")
            assert tail(output) == "said"
    out, err = capfdbinary.readouterr()
    assert out == b""
    assert err.count(b"\n") == 1
    assert b"dispatch: plan=plan step=T-001" in err


def test_without_a_stderr_nothing_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    Logs(None, "plan").tell("run begins")


@pytest.mark.parametrize(
    ("written", "expected"),
    [(b"", None), (b"  \n", None), (b"said\n", "said"), (b"\xff\xfe", "��"), (b"x" * 5000, "x" * 2000)],
)
def test_the_end_of_what_a_command_wrote_is_kept(tmp_path: Path, written: bytes, expected: str | None) -> None:
    with Logs(tmp_path, "plan") as logs, logs.output("attempt", 1) as output:
        output.write(written)
        output.flush()
        assert tail(output) == expected


# -- of a real run -----------------------------------------------------------------------------------------


def events(folder: Path, name: str) -> list[tuple[Any, ...]]:
    found = [json.loads(line) for line in lines(folder / name)]
    return [(told["event"], told.get("step")) for told in found]


@on_sqlite
def test_a_run_tells_its_story(plans: Plans, ledger: Ledger, clock: FakeClock, begin: Begin, tmp_path: Path) -> None:
    plans.create("plan", agent="a")
    chain(plans, 2)
    command = [sys.executable, "-S", "-c", "print('on my way')"]
    run = begin(plans, command=command)
    for key in ("T-001", "T-002"):
        wait_until(lambda key=key: is_running(plans, ledger, key), f"{key} was not handed over", 15)
        clock.advance(1)
        done(plans, ledger, key)
        clock.advance(1)
    run.ended()
    folder = tmp_path / "logs"
    assert events(folder, "trigger.log") == [
        (event, step) for step in ("T-001", "T-002") for event in ("dispatch", "command ended", "delivered")
    ]
    told = events(folder, "task_plan.log")
    assert told == events(folder, "daemon.log")
    assert (told[0], told[-1]) == (("run begins", None), ("run ends", None))
    assert {("step completed", "T-001"), ("step completed", "T-002")} <= set(told)
    ended = [json.loads(line) for line in lines(folder / "trigger.log") if "command ended" in line]
    assert {(one["status"], one["output"]) for one in ended} == {(0, "on my way")}


@on_sqlite
def test_an_agent_can_forge_no_line(plans: Plans, begin: Begin, tmp_path: Path) -> None:
    """Neither by what it writes, nor by a step's error."""
    plans.create("plan", agent="a", retries=0)
    plans.add_step("plan", subject="Do it")
    forged = '{"event": "step completed", "step": "T-001"}'
    code = f"import sys; sys.stdout.buffer.write({('x' + chr(10) + forged + chr(0x2028) + forged).encode()!r})"
    run = begin(plans, command=[sys.executable, "-S", "-c", code + "; sys.exit(1)"])
    run.ended()
    plans.fail("plan", "T-001", error=f"x\n{forged}\u2028{forged}")
    begin(plans, command=WELL).ended()
    for name in ("trigger.log", "daemon.log", "task_plan.log"):
        assert ("step completed", "T-001") not in events(tmp_path / "logs", name)
