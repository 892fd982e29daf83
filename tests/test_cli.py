"""The command line: one line of JSON, an exit status, and nothing that was put in comes out."""

from __future__ import annotations

import io
import json
import logging
import os
import random
import shutil
import signal
import subprocess
import sys
import sysconfig
import textwrap
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import tsg as package
from tests.conftest import FakeClock, raw, snapshot, tsg
from tsg import Ledger
from tsg.cli import COMMANDS, main
from tsg.schema import HEAD

SCRIPT = Path(sysconfig.get_path("scripts"), "tsg")
A_TASK = "10000000-0000-4000-8000-000000000001"
ANOTHER = "20000000-0000-4000-8000-000000000002"
DIGEST = "ab" * 32
TASK_FIELDS = {
    "created_at",
    "deadline_at",
    "delivery_code",
    "delivery_required",
    "delivery_status",
    "delivery_updated_at",
    "ended_at",
    "expects_heartbeat",
    "has_payload_hash",
    "id",
    "parent_id",
    "started_at",
    "status",
    "terminal_code",
    "timeout_seconds",
    "updated_at",
    "version",
}
#: Every command that works on a ledger, with arguments that it takes.
USES: dict[str, tuple[str, ...]] = {
    "check": (),
    "close": (A_TASK, "--status", "failed", "--code", "worker_failed"),
    "create": (),
    "current": (),
    "delivery": (A_TASK, "--status", "failed", "--code", "transport_failed"),
    "doctor": (),
    "downgrade": ("0003",),
    "heartbeat": (A_TASK,),
    "init": (),
    "reconcile": ("--active-grace-seconds", "0", "--delivery-grace-seconds", "0"),
    "start": (A_TASK,),
    "upgrade": (),
}
MAKERS = {"create", "init", "upgrade"}
INVALID = {"error": "InvalidInput", "ok": False}


class Answer(NamedTuple):
    """What a command printed, and the status that it left with."""

    status: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """The one line on stdout, which must be compact and sorted, with nothing on stderr."""
        assert self.err == ""
        assert self.out.endswith("\n")
        assert self.out.count("\n") == 1
        fields = json.loads(self.out)
        assert json.dumps(fields, sort_keys=True, separators=(",", ":")) + "\n" == self.out
        return fields


def call(*arguments: str | Path) -> Answer:
    """The command line within this process."""
    out, err = (io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True) for _ in range(2))
    kept = sys.stdout, sys.stderr
    handlers = list(logging.getLogger().handlers)
    sys.stdout, sys.stderr = out, err
    try:
        with pytest.raises(SystemExit) as left:
            main([str(argument) for argument in arguments])
    finally:
        sys.stdout, sys.stderr = kept
        logging.getLogger().handlers[:] = handlers
    texts = [stream.buffer.getvalue().decode() for stream in (out, err)]
    return Answer(int(left.value.code or 0), *texts)


def process(*arguments: str | bytes | Path, script: bool = True, **options: Any) -> subprocess.CompletedProcess[bytes]:
    """The installed command in a process of its own."""
    program = [SCRIPT] if script else [sys.executable, "-m", "tsg"]
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "timeout": 120, **options}
    return subprocess.run([*program, *arguments], check=False, **options)


@pytest.fixture
def made(path: Path) -> Path:
    """A ledger with one queued task."""
    with Ledger(path) as ledger:
        ledger.create_task(task_id=A_TASK, timeout_seconds=60)
    return path


# -- what each command prints ----------------------------------------------------------------------------


def test_init_makes_a_ledger_and_says_how_it_is_kept(path: Path) -> None:
    answer = call("--db", path, "init")
    assert answer.status == 0
    assert answer.json == {
        "ok": True,
        "storage": {
            "busy_timeout_ms": 5000,
            "foreign_keys": True,
            "journal_mode": "wal",
            "permission_model": "posix_mode",
        },
    }
    assert path.stat().st_mode & 0o777 == 0o600
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]
    before = snapshot(path.parent)
    assert call("--db", path, "init").json["ok"]
    assert snapshot(path.parent) == before


def test_create_records_a_queued_task_and_shows_all_but_its_fingerprint(path: Path) -> None:
    answer = call("--db", path, "create", "--payload-sha256", DIGEST, "--timeout-seconds", "1.5")
    assert answer.status == 0
    assert set(answer.json) == {"ok", "task"}
    task = answer.json["task"]
    assert set(task) == TASK_FIELDS
    assert DIGEST not in answer.out
    assert str(uuid.UUID(task["id"])) == task["id"]
    assert task["created_at"] == task["updated_at"] == task["delivery_updated_at"]
    assert {name: task[name] for name in TASK_FIELDS - {"id", "created_at", "updated_at", "delivery_updated_at"}} == {
        "deadline_at": None,
        "delivery_code": None,
        "delivery_required": True,
        "delivery_status": "pending",
        "ended_at": None,
        "expects_heartbeat": True,
        "has_payload_hash": True,
        "parent_id": None,
        "started_at": None,
        "status": "queued",
        "terminal_code": None,
        "timeout_seconds": 1.5,
        "version": 0,
    }


def test_create_takes_an_id_a_parent_and_its_flags(path: Path) -> None:
    call("--db", path, "create", "--task-id", A_TASK.upper())
    arguments = ("create", "--task-id", f"{{{ANOTHER}}}", "--parent-id", f"urn:uuid:{A_TASK}", "--internal")
    child = call("--db", path, *arguments, "--no-heartbeat", "--timeout-seconds", "9").json["task"]
    assert (child["id"], child["parent_id"]) == (ANOTHER, A_TASK)
    assert (child["delivery_required"], child["expects_heartbeat"]) == (False, False)
    again = call("--db", path, *arguments, "--no-heartbeat", "--timeout-seconds", "9")
    assert (again.status, again.json["task"]) == (0, child)
    other = call("--db", path, *arguments, "--no-heartbeat", "--timeout-seconds", "8")
    assert (other.status, other.json) == (2, {"error": "StateConflict", "ok": False})
    orphan = call("--db", path, "create", "--parent-id", str(uuid.uuid4()))
    assert (orphan.status, orphan.json) == (2, {"error": "TaskNotFound", "ok": False})


def test_a_task_goes_through_its_life(made: Path) -> None:
    started = call("--db", made, "start", A_TASK).json["task"]
    assert (started["status"], started["version"]) == ("running", 1)
    assert started["deadline_at"] == started["started_at"] + 60
    assert call("--db", made, "start", A_TASK).json["task"] == started
    beaten = call("--db", made, "heartbeat", A_TASK.upper()).json["task"]
    assert (beaten["version"], beaten["updated_at"] >= started["updated_at"]) == (2, True)
    closed = call("--db", made, "close", A_TASK, "--status", "succeeded", "--code", "completed").json["task"]
    assert (closed["status"], closed["terminal_code"]) == ("succeeded", "completed")
    assert call("--db", made, "close", A_TASK, "--status", "succeeded", "--code", "nonsense").json["task"] == closed
    for refused in (("start", A_TASK), ("heartbeat", A_TASK), ("close", A_TASK, "--status", "failed")):
        answer = call("--db", made, *refused)
        assert (answer.status, answer.json) == (2, {"error": "StateConflict", "ok": False})
    unfit = call("--db", made, "delivery", A_TASK, "--status", "not_applicable")
    assert (unfit.status, unfit.json["error"]) == (2, "StateConflict")
    delivered = call(
        "--db", made, "delivery", A_TASK, "--status", "delivered", "--code", "transport_acknowledged"
    ).json["task"]
    assert (delivered["delivery_status"], delivered["version"]) == ("delivered", 4)
    assert call("--db", made, "doctor").json["healthy"]


def test_a_task_that_is_not_there_is_not_found(made: Path) -> None:
    before = snapshot(made.parent)
    for name in ("start", "heartbeat", "close", "delivery"):
        answer = call("--db", made, name, *(ANOTHER if part == A_TASK else part for part in USES[name]))
        assert (answer.status, answer.json) == (2, {"error": "TaskNotFound", "ok": False})
    assert snapshot(made.parent) == before


def test_reconcile_reports_and_a_preview_touches_nothing(path: Path, clock: FakeClock) -> None:
    with Ledger(path, clock=clock) as ledger:
        late = ledger.create_task(task_id=A_TASK, timeout_seconds=1)
        ledger.start_task(late.id)
        ledger.create_task()
    before = snapshot(path.parent)
    preview = call("--db", path, "reconcile", "--dry-run")
    assert preview.status == 0
    assert preview.json == {
        "ok": True,
        "reconcile": {
            "active_examined": 2,
            "applied": False,
            "deliveries_failed": 0,
            "deliveries_not_applicable": 0,
            "dry_run": True,
            "fresh_active_retained": 1,
            "pending_delivery_examined": 1,
            "pending_delivery_retained": 1,
            "tasks_timed_out": 1,
        },
    }
    assert snapshot(path.parent) == before
    applied = call("--db", path, "reconcile", "--active-grace-seconds", "1e3", "--delivery-grace-seconds", "0").json
    assert applied["reconcile"] == {
        **preview.json["reconcile"],
        "applied": True,
        "dry_run": False,
        "deliveries_failed": 1,
        "pending_delivery_retained": 0,
    }
    again = call("--db", path, "reconcile", "--skip-conflicts").json["reconcile"]
    assert (again["tasks_timed_out"], again["conflicts_skipped"]) == (0, 0)


def test_reconcile_refuses_a_time_of_the_future_and_passes_over_it_when_asked(path: Path) -> None:
    now = time.time()
    clock = FakeClock(now)
    with Ledger(path, clock=clock) as ledger:
        late = ledger.create_task(timeout_seconds=0)
        ledger.start_task(late.id)
        clock.now = now + 3600
        ledger.heartbeat(late.id)
    for mode in ((), ("--dry-run",)):
        answer = call("--db", path, "reconcile", *mode)
        assert (answer.status, answer.json) == (2, {"error": "StateConflict", "ok": False})
        report = call("--db", path, "reconcile", "--skip-conflicts", *mode).json["reconcile"]
        assert (report["tasks_timed_out"], report["conflicts_skipped"]) == (0, 1)


def test_the_snapshot_limit_bounds_what_a_preview_copies(made: Path) -> None:
    answer = call("--db", made, "reconcile", "--dry-run", "--snapshot-limit-mib", "0")
    assert (answer.status, answer.json) == (2, {"error": "StateConflict", "ok": False})
    assert call("--db", made, "reconcile", "--dry-run", "--snapshot-limit-mib", "1").status == 0


def test_doctor_prints_its_bare_report(made: Path) -> None:
    answer = call("--db", made, "doctor")
    assert answer.status == 0
    with Ledger(made) as ledger:
        assert answer.json == dict(ledger.doctor())
    assert answer.json["schema_version"] == int(HEAD)


def test_doctor_leaves_with_1_where_the_ledger_is_unhealthy(made: Path) -> None:
    with closing(raw(made)) as connection:
        connection.execute("DROP TRIGGER tsg_task_events_delete_guard")
        connection.execute("DELETE FROM tsg_task_events")
    answer = call("--db", made, "doctor")
    assert answer.status == 1
    assert not answer.json["healthy"]


def test_upgrade_downgrade_current_and_check_say_where_the_schema_stands(path: Path) -> None:
    def stands(revision: str | None, *, ok: bool = True) -> dict[str, Any]:
        return {"ok": ok, "schema": {"adopted": False, "current": revision, "head": HEAD}}

    assert call("--db", path, "upgrade", "0002").json == stands("0002")
    assert call("--db", path, "current").json == stands("0002")
    behind = call("--db", path, "check")
    assert (behind.status, behind.json) == (1, stands("0002", ok=False))
    assert call("--db", path, "upgrade").json == stands(HEAD)
    assert call("--db", path, "upgrade", "head").json == stands(HEAD)
    exact = call("--db", path, "check")
    assert (exact.status, exact.json) == (0, stands(HEAD))
    assert call("--db", path, "downgrade", "0003").json == stands("0003")
    assert call("--db", path, "downgrade", "base").json == stands(None)
    assert call("--db", path, "current").json == stands(None)
    assert call("--db", path, "check").status == 1


@pytest.mark.parametrize(
    "statement",
    [
        "DROP INDEX ix_tsg_tasks_active",
        "DROP TRIGGER tsg_tasks_status_guard",
        "CREATE INDEX more ON tsg_tasks (version)",
        "CREATE TABLE tsg_more (id INTEGER)",
        "ALTER TABLE tsg_tasks ADD COLUMN note TEXT",
    ],
)
def test_check_leaves_with_1_where_the_schema_differs(made: Path, statement: str) -> None:
    with closing(raw(made)) as connection:
        connection.execute(statement)
    answer = call("--db", made, "check")
    assert (answer.status, answer.json["ok"], answer.json["schema"]["current"]) == (1, False, HEAD)
    assert call("--db", made, "start", A_TASK).json == {"error": "StateConflict", "ok": False}


def test_an_older_ledger_is_upgraded_by_a_command_that_writes(path: Path) -> None:
    call("--db", path, "upgrade", "0001")
    assert call("--db", path, "reconcile", "--dry-run").status == 0
    assert call("--db", path, "current").json["schema"]["current"] == "0001"
    assert call("--db", path, "create").status == 0
    assert call("--db", path, "check").status == 0


def test_a_url_names_the_same_ledger_as_its_path(path: Path) -> None:
    assert call("--db", f"sqlite:///{path}", "create", "--task-id", A_TASK).status == 0
    assert call("--db", f"sqlite+pysqlite:///{path}", "start", A_TASK).status == 0
    assert call("--db", path, "heartbeat", A_TASK).status == 0


def test_where_there_are_modes_the_flag_for_systems_without_changes_nothing(path: Path) -> None:
    assert call("--db", path, "--allow-external-acl", "init").json["storage"]["permission_model"] == "posix_mode"


# -- help ------------------------------------------------------------------------------------------------


def test_help_lists_every_command_with_what_it_is_for() -> None:
    answer = call("--help")
    assert (answer.status, answer.err) == (0, "")
    for name in COMMANDS:
        (line,) = [line for line in answer.out.splitlines() if line.split()[:1] == [name]]
        assert len(line.split()) > 3


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_every_command_has_a_help_that_describes_each_option(name: str) -> None:
    answer = call(name, "--help")
    assert (answer.status, answer.err) == (0, "")
    assert f"Usage: tsg {name}" in answer.out
    options = [line.split() for line in answer.out.splitlines() if line.lstrip().startswith("--")]
    assert options
    assert all(len(words) > 1 for words in options)


def test_the_commands_are_those_of_the_contract() -> None:
    assert set(COMMANDS) >= {*USES, "demo"}


def test_version_is_that_of_the_package() -> None:
    answer = call("--version")
    assert (answer.status, answer.err) == (0, "")
    assert package.__version__ in answer.out


# -- usage errors ----------------------------------------------------------------------------------------

USAGE = [
    (),
    ("nonsense",),
    ("--nonsense",),
    ("--db",),
    ("init", "more"),
    ("init", "--nonsense"),
    ("create", "--task-id"),
    ("create", "--task-id", "x"),
    ("create", "--task-id", ""),
    ("create", "--parent-id", "x"),
    ("create", "--payload-sha256", "AB" * 32),
    ("create", "--timeout-seconds", "-1"),
    ("create", "--timeout-seconds", "nan"),
    ("create", "--timeout-seconds", "1e999"),
    ("create", "--timeout-seconds", "True"),
    ("create", "--no-heartbeat"),
    ("create", "more"),
    ("start",),
    ("start", "x"),
    ("start", A_TASK, ANOTHER),
    ("heartbeat",),
    ("heartbeat", ""),
    ("close",),
    ("close", A_TASK),
    ("close", A_TASK, "--status"),
    ("close", A_TASK, "--status", "running"),
    ("close", A_TASK, "--status", "Failed"),
    ("close", A_TASK, "--status", "failed", "--code", "completed"),
    ("close", "x", "--status", "failed"),
    ("delivery", A_TASK),
    ("delivery", A_TASK, "--status", "pending"),
    ("delivery", "x", "--status", "delivered"),
    ("reconcile", "--active-grace-seconds", "-1"),
    ("reconcile", "--active-grace-seconds", "nan"),
    ("reconcile", "--delivery-grace-seconds", "x"),
    ("reconcile", "--dry-run=1"),
    ("reconcile", "--snapshot-limit-mib", "x"),
    ("reconcile", "--snapshot-limit-mib", "-1"),
    ("doctor", "more"),
    ("upgrade", "0009"),
    ("upgrade", "base"),
    ("upgrade", "0001", "0002"),
    ("downgrade",),
    ("downgrade", "x"),
    ("current", "more"),
    ("check", "more"),
]


@pytest.mark.parametrize("arguments", USAGE, ids=lambda arguments: " ".join(arguments) or "nothing")
def test_a_malformed_call_is_invalid_input_and_changes_nothing(made: Path, arguments: tuple[str, ...]) -> None:
    before = snapshot(made.parent)
    answer = call("--db", made, *arguments)
    assert (answer.status, answer.json) == (2, INVALID)
    assert snapshot(made.parent) == before


@pytest.mark.parametrize("arguments", USAGE, ids=lambda arguments: " ".join(arguments) or "nothing")
def test_a_malformed_call_makes_no_ledger(folder: Path, path: Path, arguments: tuple[str, ...]) -> None:
    answer = call("--db", path, *arguments)
    assert (answer.status, answer.json) == (2, INVALID)
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("name", sorted(USES))
def test_a_command_needs_a_ledger_to_be_named(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    answer = call(name, *USES[name])
    assert (answer.status, answer.json) == (2, INVALID)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", sorted(set(USES) - MAKERS))
def test_a_command_on_a_missing_ledger_is_invalid_input_and_makes_nothing(folder: Path, name: str) -> None:
    for target in (folder / "missing.sqlite", folder / "missing" / "ledger.sqlite"):
        answer = call("--db", target, name, *USES[name])
        assert (answer.status, answer.json) == (2, INVALID)
    assert list(folder.iterdir()) == []


def test_a_preview_on_a_missing_ledger_makes_nothing(folder: Path, path: Path) -> None:
    assert call("--db", path, "reconcile", "--dry-run").json == INVALID
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("name", sorted(MAKERS))
def test_the_makers_make_a_missing_ledger_and_its_folders(folder: Path, name: str) -> None:
    path = folder / "a" / "b" / "ledger.sqlite"
    assert call("--db", path, name, *USES[name]).status == 0
    assert [entry.stat().st_mode & 0o777 for entry in (path, path.parent, path.parent.parent)] == [0o600, 0o700, 0o700]
    assert call("--db", path, "check").status == 0


@pytest.mark.parametrize(
    "target",
    [
        "",
        ".",
        "..",
        ":memory:",
        "file:x",
        "//host/share/ledger",
        "\\\\host\\share\\ledger",
        "sqlite://",
        "sqlite:///",
        "sqlite:///:memory:",
        "sqlite:///x?mode=memory",
        "mysql://someone:secret@host/db",
        "nonsense://x",
        "://",
        "sqlite://user@host/x",
        "a\0b",
        "x" * 5000,
        "folder/",
    ],
)
@pytest.mark.parametrize("name", ["init", "doctor", "reconcile", "upgrade", "current"])
def test_what_names_no_local_file_is_invalid_input(
    folder: Path, target: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    answer = call("--db", target, name)
    assert (answer.status, answer.json) == (2, INVALID)
    assert list(folder.iterdir()) == []


# -- nothing that is put in comes out --------------------------------------------------------------------

MARKER = "qX7secretZ9"

#: Runs calls one after the other, each in a fork of a process that has everything imported, for speed.
FORKS = """
import importlib, json, os, sys, traceback
from tsg.cli import COMMANDS, main
import alembic.operations, alembic.runtime.migration, alembic.script, tsg.models
for module in set(COMMANDS.values()):
    importlib.import_module(module)
with open(sys.argv[1]) as stream:
    calls = json.load(stream)
done = []
for number, arguments in enumerate(calls):
    child = os.fork()
    if not child:
        status = 99
        try:
            for descriptor, name in ((1, "out"), (2, "err")):
                file = os.open(f"{sys.argv[2]}/{number}.{name}", os.O_CREAT | os.O_WRONLY, 0o600)
                os.dup2(file, descriptor)
            try:
                main(arguments)
            except SystemExit as left:
                status = left.code or 0
            sys.stdout.flush()
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
        finally:
            os._exit(status)
    done.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
print(json.dumps(done))
"""


def call_all(calls: list[list[str]], cwd: Path, outside: Path) -> list[Answer]:
    """What each of many calls printed, run in `cwd`; `outside` is a folder for what they print."""
    outside.mkdir(exist_ok=True)
    listed = outside / "calls.json"
    listed.write_text(json.dumps(calls))
    ran = subprocess.run(
        [sys.executable, "-c", FORKS, listed, outside], cwd=cwd, capture_output=True, check=True, timeout=300
    )
    statuses = json.loads(ran.stdout)
    return [
        Answer(
            status,
            (outside / f"{number}.out").read_text(errors="backslashreplace"),
            (outside / f"{number}.err").read_text(errors="backslashreplace"),
        )
        for number, status in enumerate(statuses)
    ]


def garbage(chance: random.Random) -> str:
    """Something that nobody should pass, with the marker in it."""
    around = (
        "",
        " ",
        "-",
        "--",
        "é",
        "\n",
        "\t",
        "'",
        '"',
        "%s",
        "%(x)s",
        "{0}",
        "\x1b[31m",
        "\udcff",
        "💥",
        "\\",
        ";--",
        "=",
        "\u202e",
        "0" * 40,
        A_TASK,
        "1e5",
        "?mode=memory&x=",
        "#",
        "@",
    )
    return chance.choice(around) + chance.choice((MARKER, MARKER.upper(), MARKER * 50)) + chance.choice(around)


def marked_path(chance: random.Random) -> str:
    """A relative path or a URL with the marker in it; nothing that leads out of the working folder."""
    name = garbage(chance).replace("/", "").replace("\0", "")
    return chance.choice(
        (
            name,
            f"folder/{name}",
            f"{name}/ledger.sqlite",
            f"./{name}",
            f"sqlite:///{name}",
            f"sqlite+pysqlite:///{name}",
            f"sqlite://{name}/x",
            f"postgresql://{name}:{name}@127.0.0.1:1/{name}",
            f"mysql+pymysql://{name}",
            f"{name}://{name}",
            f"file:{name}?mode=memory",
            f"//{name}/share",
            f"{name}/",
            f"{name}/..",
            "ledger.sqlite",
            "link.sqlite",
            "noise.sqlite",
            "folder",
            "ledger.sqlite/" + name,
        )
    )


def anything(chance: random.Random) -> list[str]:
    """A call of any command, one part of it or several replaced or joined by garbage."""
    name = chance.choice((*USES, garbage(chance)))
    options = {
        "create": ("--task-id", "--parent-id", "--payload-sha256", "--timeout-seconds", "--internal", "--no-heartbeat"),
        "close": ("--status", "--code"),
        "delivery": ("--status", "--code"),
        "reconcile": (
            "--active-grace-seconds",
            "--delivery-grace-seconds",
            "--dry-run",
            "--skip-conflicts",
            "--snapshot-limit-mib",
        ),
    }
    rest = list(USES.get(name, ()))
    for _ in range(chance.randrange(3)):
        option = chance.choice((*options.get(name, ("--help-me",)), f"--{garbage(chance)}"))
        rest += chance.choice(([option], [option, garbage(chance)], [f"{option}={garbage(chance)}"]))
    if rest and chance.random() < 0.6:
        rest[chance.randrange(len(rest))] = garbage(chance)
    if chance.random() < 0.2:
        rest.insert(chance.randrange(len(rest) + 1), garbage(chance))
    front = ["--db", marked_path(chance) if chance.random() < 0.5 else "ledger.sqlite"]
    if chance.random() < 0.1:
        front = chance.choice(([], ["--db"], [f"--db={marked_path(chance)}"], [garbage(chance), *front]))
    return [*front, *chance.choice(([], ["--allow-external-acl"])), name, *rest]


@pytest.fixture
def working_folder(folder: Path) -> Path:
    """A ledger, a link to it, a file that is none, and a folder."""
    with Ledger(folder / "ledger.sqlite") as ledger:
        ledger.create_task(task_id=A_TASK)
    (folder / "link.sqlite").symlink_to("ledger.sqlite")
    (folder / "noise.sqlite").write_bytes(os.urandom(9000))
    (folder / "noise.sqlite").chmod(0o600)
    (folder / "folder").mkdir(mode=0o700)
    return folder


def assert_nothing_comes_out(answers: list[tuple[Any, Answer]], folder: Path) -> None:
    for arguments, answer in answers:
        assert answer.status in (0, 1, 2), (arguments, answer)
        assert MARKER.lower() not in (answer.out + answer.err).lower(), (arguments, answer)
        assert "Traceback" not in answer.err, (arguments, answer)
        if "--help" not in arguments and "--version" not in arguments:
            assert isinstance(answer.json, dict), (arguments, answer)
    for root, _, names in os.walk(os.fsencode(folder)):
        for name in names:
            content = Path(os.fsdecode(os.path.join(root, name))).read_bytes()
            assert MARKER.lower().encode() not in content.lower(), name


@pytest.mark.parametrize("seed", range(3))
def test_whatever_is_put_in_never_comes_out(working_folder: Path, tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    calls = [anything(chance) for _ in range(150)]
    calls = [[argument.replace("\0", "") for argument in arguments] for arguments in calls]
    answers = call_all(calls, working_folder, tmp_path / "printed")
    assert len({answer.status for answer in answers}) > 1
    assert_nothing_comes_out(list(zip(calls, answers, strict=True)), working_folder)


def test_nothing_comes_out_of_a_process_of_its_own_either(working_folder: Path) -> None:
    chance = random.Random("processes")
    calls = [[argument.replace("\0", "") for argument in anything(chance)] for _ in range(20)]
    answers = []
    for arguments in calls:
        ran = process(*(os.fsencode(argument) for argument in arguments), cwd=working_folder)
        answers.append(Answer(ran.returncode, *(text.decode(errors="replace") for text in (ran.stdout, ran.stderr))))
    assert_nothing_comes_out(list(zip(calls, answers, strict=True)), working_folder)


def test_the_path_of_a_ledger_is_not_in_any_answer_about_it(folder: Path) -> None:
    path = folder / MARKER / f"{MARKER}.sqlite"
    for name, arguments in sorted(USES.items(), key=lambda use: use[0] != "init"):
        answer = call("--db", path, name, *arguments)
        assert MARKER not in answer.out + answer.err
        assert answer.status in (0, 2)


# -- where the answer can't be printed -------------------------------------------------------------------


@pytest.mark.parametrize("name", ["init", "doctor", "nonsense", "--help", "--version"])
def test_a_closed_stdout_is_no_reason_for_a_traceback(made: Path, name: str) -> None:
    program = 'exec "$@" >&-'
    ran = subprocess.run(
        ["sh", "-c", program, "sh", SCRIPT, "--db", made, name], capture_output=True, check=False, timeout=60
    )
    assert ran.stderr == b""
    assert ran.returncode in (0, 2)
    assert call("--db", made, "doctor").json["healthy"]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="a device of Linux")
@pytest.mark.parametrize("name", ["init", "doctor", "nonsense", "--help", "--version"])
def test_a_full_stdout_is_a_refusal_without_a_traceback(made: Path, name: str) -> None:
    with open("/dev/full", "wb") as full:
        ran = process("--db", made, name, stdout=full)
    assert (ran.returncode, ran.stderr) == (2, b"")


@pytest.mark.parametrize("name", ["doctor", "nonsense", "--help"])
def test_a_reader_that_went_away_is_no_reason_for_a_traceback(made: Path, name: str) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    try:
        ran = process("--db", made, name, stdout=writing)
    finally:
        os.close(writing)
    assert ran.stderr == b""
    assert ran.returncode in (0, 2)


def test_closed_standard_streams_do_not_end_up_in_the_database(made: Path) -> None:
    with Ledger(made) as ledger:
        before = ledger.get_task(A_TASK)
    ran = subprocess.run(
        ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", SCRIPT, "--db", made, "create"], check=False, timeout=60
    )
    assert ran.returncode in (0, 2)
    with Ledger(made) as ledger:
        assert ledger.get_task(A_TASK) == before
        assert ledger.doctor()["healthy"]


# -- others on the same ledger ---------------------------------------------------------------------------


def test_while_another_writes_readers_answer_at_once_and_writers_are_refused_in_the_end(made: Path) -> None:
    with closing(raw(made)) as other:
        other.execute("BEGIN IMMEDIATE")
        other.execute("INSERT INTO tsg_alembic_version VALUES ('abc')")
        writers = [
            subprocess.Popen([SCRIPT, "--db", made, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
            for arguments in (("create",), ("reconcile",), ("downgrade", "0003"))
        ]
        began = time.monotonic()
        for arguments in (("doctor",), ("current",), ("check",), ("reconcile", "--dry-run")):
            assert call("--db", made, *arguments).status == 0
        assert time.monotonic() - began < 4
        for writer in writers:
            out, err = writer.communicate(timeout=60)
            assert (writer.returncode, out, err) == (2, b'{"error":"StateConflict","ok":false}\n', b"")
        other.execute("ROLLBACK")
    assert call("--db", made, "create").status == 0


def test_an_interrupted_command_leaves_without_a_traceback(made: Path) -> None:
    program = "import sys, tsg.cli.ledger\nfrom tsg.cli import main\nprint('ready', flush=True)\nmain(sys.argv[1:])"
    with closing(raw(made)) as other:
        other.execute("BEGIN IMMEDIATE")
        with subprocess.Popen(
            [sys.executable, "-c", program, "--db", made, "create"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
        ) as waiting:
            assert waiting.stdout is not None
            assert waiting.stdout.readline() == b"ready\n"
            time.sleep(1)
            waiting.send_signal(signal.SIGINT)
            out, err = waiting.communicate(timeout=60)
        other.execute("ROLLBACK")
    assert b"Traceback" not in out + err
    assert waiting.returncode != 0
    assert call("--db", made, "doctor").json["task_count"] == 1


# -- damage ----------------------------------------------------------------------------------------------


def damages(content: bytes) -> Iterator[bytes]:
    """Ways in which a file of `content` comes back from a bad disk."""
    chance = random.Random("damage")
    page = 4096
    for number in range(len(content) // page):
        noise = chance.choice((bytes(page) if number else b"no", chance.randbytes(page), b"\xff" * page))
        yield content[: number * page] + noise + content[(number + 1) * page :]
    for size in (1, 15, 16, 99, 100, 512, page - 1, page, page + 1, 3 * page, len(content) - page, len(content) - 1):
        yield content[:size]
    for _ in range(15):
        at = chance.randrange(100, len(content) - 64)
        yield content[:at] + chance.randbytes(chance.choice((1, 4, 64))) + content[at + 64 :]
    yield chance.randbytes(page)
    yield b"SQLite format 3\0" + chance.randbytes(page)
    yield content + chance.randbytes(page)


def test_a_damaged_ledger_is_one_clear_refusal_and_never_unexpected(folder: Path, path: Path, tmp_path: Path) -> None:
    with Ledger(path) as ledger:
        for _ in range(40):
            task = ledger.create_task(payload_hash=DIGEST)
            ledger.start_task(task.id)
        ledger.create_task(task_id=A_TASK, parent_id=task.id)
    chance = random.Random("commands")
    calls, kept = [], {}
    for number, content in enumerate(damages(path.read_bytes())):
        for name in ("doctor", chance.choice(sorted(set(USES) - {"doctor"}))):
            damaged = folder / f"{number}-{name}.sqlite"
            damaged.write_bytes(content)
            damaged.chmod(0o600)
            calls.append(["--db", str(damaged), name, *USES[name]])
            kept[str(damaged)] = content
    answers = call_all(calls, folder, tmp_path / "printed")
    for arguments, answer in zip(calls, answers, strict=True):
        assert answer.status in (0, 1, 2), (arguments, answer)
        assert isinstance(answer.json, dict), (arguments, answer)
        damaged, name = arguments[1:3]
        if name in ("doctor", "check", "current"):
            assert Path(damaged).read_bytes() == kept[damaged], (arguments, answer)
        assert Path(damaged).stat().st_size > 0, (arguments, answer)


def test_what_is_no_database_is_not_made_into_one(folder: Path) -> None:
    path = folder / "notes.txt"
    path.write_bytes(b"a text of mine, and none of yours\n" * 100)
    path.chmod(0o644)
    before = snapshot(folder)
    for name, arguments in USES.items():
        answer = call("--db", path, name, *arguments)
        assert (answer.status, answer.json) == (2, {"error": "StateConflict", "ok": False}), name
    assert snapshot(folder) == before


@pytest.mark.parametrize("version", ["9" * 5000, "٣", "-1", "0004 ", "", "\x00", "1e3", "head"])
def test_an_odd_version_row_is_no_reason_for_the_unexpected(made: Path, version: str) -> None:
    with closing(raw(made)) as connection:
        connection.execute("UPDATE tsg_alembic_version SET version_num = ?", (version,))
    for name, arguments in USES.items():
        answer = call("--db", made, name, *arguments)
        assert answer.status in (1, 2) or name == "current", (name, answer)
        assert answer.json


@pytest.mark.parametrize("version", [b"\xff", 4, None, 1.5, b"0004"])
def test_a_version_row_of_another_type_is_no_reason_for_the_unexpected(made: Path, version: Any) -> None:
    with closing(raw(made)) as connection:
        connection.execute("DROP TABLE tsg_alembic_version")
        connection.execute("CREATE TABLE tsg_alembic_version (version_num)")
        connection.execute("INSERT INTO tsg_alembic_version VALUES (?)", (version,))
    for name, arguments in USES.items():
        answer = call("--db", made, name, *arguments)
        assert answer.status in (1, 2) or name == "current", (name, answer)
        assert answer.json


@pytest.mark.parametrize("table", ["tsg_tasks", "tsg_task_events", "tsg_alembic_version"])
def test_a_view_in_the_place_of_a_table_is_no_reason_for_the_unexpected(made: Path, table: str) -> None:
    with closing(raw(made)) as connection:
        connection.execute("PRAGMA foreign_keys = OFF")
        connection.execute(f"DROP TABLE {table}")
        connection.execute(f"CREATE VIEW {table} AS SELECT 1 AS version_num")
    for name, arguments in USES.items():
        answer = call("--db", made, name, *arguments)
        assert answer.status in (1, 2) or name in ("current", "upgrade"), (name, answer)
        assert answer.json


# -- odd surroundings ------------------------------------------------------------------------------------


def test_without_a_home_and_in_the_c_locale_a_path_may_have_any_letters(folder: Path) -> None:
    bare = {"PATH": os.environ["PATH"], "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    for name in ("ä-ledger".encode(), b"\xff\xfe-ledger"):
        path = os.path.join(os.fsencode(folder), name)
        for arguments in (("create", "--task-id", A_TASK), ("doctor",)):
            ran = process("--db", path, *arguments, env=bare)
            assert (ran.returncode, ran.stderr) == (0, b""), arguments
        assert os.path.exists(path)


def test_a_working_folder_that_is_gone_matters_only_to_relative_paths(made: Path, tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    program = 'mkdir "$1" && cd "$1" && rmdir "$1" && shift && exec "$@"'

    def run(*arguments: str | Path) -> Answer:
        ran = subprocess.run(
            ["sh", "-c", program, "sh", gone, SCRIPT, *arguments], capture_output=True, check=False, timeout=60
        )
        return Answer(ran.returncode, ran.stdout.decode(), ran.stderr.decode())

    assert run("--db", made, "doctor").json["healthy"]
    relative = run("--db", "ledger.sqlite", "init")
    assert (relative.status, relative.json) == (2, INVALID)


def test_the_module_and_the_script_are_the_same_command(made: Path) -> None:
    one, other = process("--db", made, "current"), tsg("--db", made, "current")
    assert (one.returncode, one.stdout, one.stderr) == (other.returncode, other.stdout, other.stderr)
    assert one.stdout == f'{{"ok":true,"schema":{{"adopted":false,"current":"{HEAD}","head":"{HEAD}"}}}}\n'.encode()


def test_what_a_user_has_lying_in_the_working_folder_is_not_imported(made: Path, tmp_path: Path) -> None:
    for name in ("click", "sqlalchemy", "json", "alembic"):
        (tmp_path / f"{name}.py").write_text(textwrap.dedent(f"raise SystemExit('{MARKER}')"))
    assert process("--db", made, "doctor", cwd=tmp_path).returncode == 0


def test_four_processes_with_25_updates_each_lose_none(path: Path, tmp_path: Path) -> None:
    with Ledger(path) as ledger:
        ledger.start_task(ledger.create_task(task_id=A_TASK).id)
    calls = tmp_path / "calls.json"
    calls.write_text(json.dumps([["--db", str(path), "heartbeat", A_TASK]] * 25))
    workers = []
    for number in range(4):
        outside = tmp_path / str(number)
        outside.mkdir()
        workers.append(
            subprocess.Popen([sys.executable, "-c", FORKS, calls, outside], stdout=subprocess.PIPE, cwd=tmp_path)
        )
    for worker in workers:
        assert json.loads(worker.communicate(timeout=120)[0]) == [0] * 25
    with Ledger(path) as ledger:
        assert ledger.get_task(A_TASK).version == 101
        assert ledger.doctor()["healthy"]


@pytest.mark.parametrize("name", sorted(USES))
def test_a_ledger_under_a_link_is_refused_and_stays(made: Path, name: str) -> None:
    link = made.with_name("link.sqlite")
    link.symlink_to(made.name)
    hard: Callable[[], None] = lambda: os.link(made, made.with_name("alias.sqlite"))  # noqa: E731
    before = made.read_bytes()
    assert call("--db", link, name, *USES[name]).json == INVALID
    hard()
    assert call("--db", made, name, *USES[name]).json == INVALID
    assert made.read_bytes() == before


def test_the_file_of_another_application_is_left_to_it(folder: Path, path: Path) -> None:
    with closing(raw(path)) as connection:
        connection.execute("CREATE TABLE orders (id INTEGER PRIMARY KEY)")
        connection.execute("INSERT INTO orders VALUES (1)")
    path.chmod(0o644)
    before = snapshot(folder)
    for name in sorted(set(USES) - {"upgrade", "check", "current", "doctor"}):
        answer = call("--db", path, name, *USES[name])
        assert answer.status == 2, (name, answer)
        assert snapshot(folder) == before, name
    assert call("--db", path, "check").status == 1
    assert call("--db", path, "doctor").status == 1
    shutil.copyfile(path, folder / "copy.sqlite")
    assert path.read_bytes() == before[path.name][0]
