"""Whatever a command is given, one line of JSON comes out, and nothing of what was given in it."""

from __future__ import annotations

import json
import os
import random
import shutil
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.conftest import FakeClock
from tests.fuzz import hostile
from tests.fuzz.hostile import MARKER
from tests.fuzz.targets import ENDED, QUEUED, RUNNING, TASKS, UNKNOWN, World, commands, fill
from tests.fuzz.test_hostile_values import SECONDS, examples
from tests.test_cli import Answer, call, call_all, process
from tsg import Ledger

COMMANDS = commands()
FIRST_WORDS = {name.partition(" ")[0] for name in COMMANDS}
#: Linux's limit for one argument, which a NUL ends.
LONGEST = 32 * 4096 - 1
#: What an option may well be given; a flag takes nothing.
LIKELY: dict[str, tuple[str, ...]] = {
    "": (*TASKS, "head", "0004", "0003", "base", "feature", "T-001", "T-002", "success", "retry", "files"),
    "--active-form": ("Doing it",),
    "--active-grace-seconds": ("0", "600"),
    "--add-blocked-by": ("T-001",),
    "--add-blocks": ("T-002",),
    "--agent": ("Demeter",),
    "--agents": ("agents.json",),
    "--all": (),
    "--attempt": (UNKNOWN,),
    "--backoff": ("fixed",),
    "--base-seconds": ("1",),
    "--batch-size": ("1", "5000"),
    "--blocked-by": ("T-001",),
    "--blocks": ("T-002",),
    "--cap-seconds": ("60",),
    "--clear": ("owner",),
    "--cockpit": ("page.html",),
    "--code": ("completed", "worker_failed", "transport_failed"),
    "--delivery-grace-seconds": ("0", "600"),
    "--delivery-required": (),
    "--description": ("More of it",),
    "--error": ("no route",),
    "--factor": ("2",),
    "--fallback-agent": ("Talos",),
    "--format": ("json",),
    "--grace-seconds": ("60",),
    "--dry-run": (),
    "--internal": (),
    "--interval": ("0.1",),
    "--interval-seconds": ("0.1",),
    "--learning": ("ids are UUIDs",),
    "--log-dir": ("logs",),
    "--log-format": ("json",),
    "--max-parallel": ("2",),
    "--metadata": ('{"a":1}',),
    "--name": ("another",),
    "--no-heartbeat": (),
    "--no-reset": (),
    "--older-than": ("0", "1e9"),
    "--on-exhausted": ("fail",),
    "--on-undelivered": ("stop",),
    "--output": ("out",),
    "--owner": ("Demeter",),
    "--params": ("{}",),
    "--parent-id": (QUEUED, RUNNING),
    "--partial-ok": (),
    "--payload-sha256": ("ab" * 32,),
    "--plan": ("none",),
    "--port": ("0",),
    "--progress": (),
    "--ready": (),
    "--remaining": ("the rest",),
    "--resume": (),
    "--retries": ("1",),
    "--session-name": ("main",),
    "--session-resume": ("Demeter-1",),
    "--skip-conflicts": (),
    "--snapshot-limit-mib": ("0", "64"),
    "--stall-seconds": ("1",),
    "--status": ("succeeded", "failed", "delivered"),
    "--subject": ("Do it",),
    "--task-id": (ENDED, hostile.AN_ID),
    "--theme": ("plain",),
    "--thread-id": ("thread",),
    "--timeout-seconds": ("0", "60", "1e3"),
    "--to": ("Talos",),
}


def relative(text: str) -> str:
    """A path that stays below the working folder, or is a device or a URL that nothing can come of."""
    if text.startswith(("/dev/", "\\", "sqlite://host", f"sqlite://{MARKER}", "postgresql://")):
        return text
    return text.lstrip("/")[:100].replace("sqlite:////", "sqlite:///")


places = st.one_of(
    *[st.just("ledger.sqlite")] * 6, hostile.texts.map(relative), hostile.texts.map(lambda text: f"f/{relative(text)}")
)


@st.composite
def command_lines(draw: st.DrawFn) -> list[str]:
    """A command with likely options, of which one or two were replaced or followed by something hostile."""
    name = draw(st.sampled_from(sorted(COMMANDS)))
    rest: list[str] = []
    for option in COMMANDS[name]:
        if option == "":
            rest.append(draw(st.sampled_from(LIKELY[option])))
        elif draw(st.booleans()):
            rest += [option, *(draw(st.sampled_from([each])) for each in LIKELY[option][:1])]
    words = [draw(hostile.texts) for _ in range(draw(st.sampled_from([0, 1, 1, 1, 1, 2, 2])))]
    if name == "demo":
        # By itself it works on a ledger of its own, with processes; tests/test_demo.py runs it.
        return ["--db", "ledger.sqlite", "demo", f"-{draw(hostile.texts)}"]
    if name == "cockpit serve":
        # It serves until it is ended; tests/cockpit runs it.
        return ["--db", "ledger.sqlite", *name.split(), f"-{draw(hostile.texts)}"]
    if not words:
        return ["--db", "ledger.sqlite", *name.split(), *rest]
    for word in words:
        how = draw(st.sampled_from(("replace", "insert", "option", "join")))
        if how == "replace" and rest:
            rest[draw(st.integers(0, len(rest) - 1))] = word
        elif how == "option" and COMMANDS[name]:
            rest += [draw(st.sampled_from(COMMANDS[name])), word]
        elif how == "join" and COMMANDS[name]:
            rest.append(f"{draw(st.sampled_from(COMMANDS[name])) or '--'}={word}")
        else:
            rest.insert(draw(st.integers(0, len(rest))), word)
    front = ["--db", draw(places)]
    return [*front, *draw(st.sampled_from(([], [], ["--allow-external-acl"]))), *name.split(), *rest]


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    folder = tmp_path_factory.mktemp("filled")
    folder.chmod(0o700)
    clock = FakeClock()
    with Ledger(folder / "ledger.sqlite", clock=clock) as ledger:
        fill(ledger, clock)
    return (folder / "ledger.sqlite").read_bytes()


@pytest.fixture
def working(folder: Path, filled: bytes, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a ledger, so deep that a path of several ".." stays in this test's own."""
    deep = folder / "a" / "b" / "c" / "d"
    deep.mkdir(parents=True, mode=0o700)
    renew(deep, filled)
    monkeypatch.chdir(deep)
    return deep


def renew(folder: Path, content: bytes) -> Path:
    place = folder / "ledger.sqlite"
    for entry in folder.iterdir():
        shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()
    place.write_bytes(content)
    place.chmod(0o600)
    return place


def contents(place: Path) -> Any:
    world = World(place, None)
    try:
        return world.contents()
    finally:
        world.close()


def holds(arguments: Any, answer: Answer) -> dict[str, Any]:
    """That an answer keeps to the contract, and says nothing of the arguments; its JSON."""
    assert answer.status in (0, 1, 2), (arguments, answer)
    # What a step says is shown by the commands on plans where they take it.
    shows = answer.status == 0 and bool({"plan", "step"} & set(map(str, arguments)))
    assert shows or MARKER.lower() not in (answer.out + answer.err).lower(), (arguments, answer)
    if "--progress" in arguments:
        # A bar for people.
        answer = answer._replace(err="")
    fields: dict[str, Any] = answer.json
    # That there is nothing to take is told as an error too.
    refused = "error" in fields and fields["error"] != "InboxEmpty"
    assert (answer.status == 2) == refused, (arguments, answer)
    return fields


def test_every_option_of_every_command_is_tried() -> None:
    assert {option for options in COMMANDS.values() for option in options} == LIKELY.keys()


def test_whatever_a_command_is_given_it_answers_in_one_line_and_refuses_without_a_change(
    working: Path, filled: bytes
) -> None:
    untouched = contents(working / "ledger.sqlite")
    statuses: Counter[int] = Counter()
    tried: set[str] = set()

    @examples(300)
    @given(command_lines())
    def try_line(arguments: list[str]) -> None:
        place = working / "ledger.sqlite"
        answer = call(*arguments)
        fields = holds(arguments, answer)
        statuses[answer.status] += 1
        start = next(place for place, word in enumerate(arguments) if word in FIRST_WORDS)
        tried.add(next(name for name in (arguments[start], " ".join(arguments[start : start + 2])) if name in COMMANDS))
        after = contents(place)
        if answer.status == 2:
            assert after == untouched, arguments
        if after != untouched or len(list(working.iterdir())) > 1:
            if len(after) == 3 and after[2] == [(b"0004",)]:
                assert json.loads(call("--db", place, "doctor").out)["healthy"], (arguments, fields)
            renew(working, filled)

    try_line()
    assert statuses[0] > 3
    assert statuses[2] > 60
    assert len(tried) > len(COMMANDS) * 2 / 3


@pytest.mark.parametrize("content", ["9", "a", "-", "\udcff", MARKER])
def test_the_longest_argument_that_a_process_can_have_is_refused_by_every_command(working: Path, content: str) -> None:
    long = (content * LONGEST)[:LONGEST]
    untouched = contents(working / "ledger.sqlite")
    for name, options in COMMANDS.items():
        words = name.split()
        lines = [[*words, f"{option}={long}"] for option in options if option]
        lines.append([*words, long, *(["--status", "failed"] if "--status" in options else [])])
        # What it imports is not what is measured.
        call(*words, "--help")
        for arguments in lines:
            began = time.thread_time()
            answer = call("--db", "ledger.sqlite", *arguments)
            assert time.thread_time() - began < 1.0
            assert (answer.status, answer.json) == (2, {"error": "InvalidInput", "ok": False})
    assert contents(working / "ledger.sqlite") == untouched
    for place in (long, f"sqlite:///{long}"):
        assert call("--db", place, "init").status == 2


def bytes_of(chance: random.Random) -> list[bytes]:
    """A command line of bytes, some of which are no UTF-8."""
    name = chance.choice([name for name in sorted(COMMANDS) if name != "demo"])
    rubbish = [b"\xff\xfe", b"\x80", b"\xc3\x28", b"\xed\xa0\x80", b"\xf5" * 300, b"x\xff", b"\x1b[2J\xff"]
    rest = [chance.choice(rubbish) + MARKER.encode() + chance.choice(rubbish) for _ in range(chance.randrange(1, 3))]
    options = [option for option in COMMANDS[name] if option]
    if options and chance.random() < 0.5:
        rest.insert(0, chance.choice(options).encode())
    place = b"ledger.sqlite" if chance.random() < 0.7 else rest[-1]
    return [b"--db", place, name.encode(), *rest]


def test_a_process_that_is_given_bytes_that_are_no_text_answers_alike(working: Path, tmp_path: Path) -> None:
    chance = random.Random(None if SECONDS else 7)
    untouched = contents(working / "ledger.sqlite")
    lines = [bytes_of(chance) for _ in range(60)]
    answers = call_all([[os.fsdecode(word) for word in line] for line in lines], working, tmp_path / "printed")
    for line, answer in zip(lines, answers, strict=True):
        fields = holds([os.fsdecode(word) for word in line], answer)
        assert fields["ok"] is False, (line, answer)
    assert len(answers) == 60
    assert contents(working / "ledger.sqlite") == untouched


def test_the_installed_command_takes_bytes_that_are_no_text(working: Path) -> None:
    for line in (
        [b"--db", b"ledger.sqlite", b"start", b"\xff" + MARKER.encode()],
        [b"--db", b"\xff\xfe", b"doctor"],
        [b"\xff"],
    ):
        ran = process(*line)
        assert (ran.returncode, ran.stdout, ran.stderr) == (2, b'{"error":"InvalidInput","ok":false}\n', b"")
    # A path may have any bytes.
    ran = process(b"--db", b"\xff" + MARKER.encode(), b"init", env={**os.environ, "LC_ALL": "C"})
    assert (ran.returncode, ran.stderr) == (0, b"")
    assert MARKER.encode() not in ran.stdout
    assert (working / os.fsdecode(b"\xff" + MARKER.encode())).is_file()
