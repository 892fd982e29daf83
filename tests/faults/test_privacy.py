"""What comes in does not come out: not in words, not in files, not over the wire. Marks that nobody else writes are
put in everywhere, and looked for everywhere."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click
import pytest
import sqlalchemy as sa

from tests.faults.test_hostile_neighbours import SEVERAL, Ran, Warm, several
from tests.faults.tracing import CHANGES, Call, trace
from tests.tallies import Tally
from tsg import Ledger
from tsg.cli import COMMANDS, app

pytestmark = pytest.mark.skipif(os.name != "posix", reason="the programs here fork, and files have modes")

#: Letters and digits, so that no way of quoting changes it.
MARK = "xq7Zsecret9Kvw"
#: Another for passwords, which not even a driver's own log may show.
PASSWORD = "xq7Zpassword9Kvw"
#: The same where only a UUID will do.
MARKED_ID = "5ec2e75e-c2e7-45ec-92e7-5ec2e75ec2e7"
A_TASK = "10000000-0000-4000-8000-000000000001"
A_CHILD = "20000000-0000-4000-8000-000000000002"
MARKS = {"MARK": MARK, "MARKED_ID": MARKED_ID, "A_TASK": A_TASK, "A_CHILD": A_CHILD}


@pytest.fixture(scope="module")
def warm() -> Iterator[Warm]:
    process = Warm()
    yield process
    process.end()


# -- in Python -------------------------------------------------------------------------------------------------

#: Puts marks into every argument of every public method, one at a time, and prints all that can be seen of it; then
#: the names of the methods that it has called, and how many calls were refused. The marks come in by the environment,
#: and so stand in no line of the program that a traceback could show.
MARKING = '''
import asyncio, inspect, io, json, logging, os, sys, traceback, uuid, warnings
import sqlalchemy as sa
import sqlalchemy.orm as orm
import tsg

MARK, MARKED_ID, TASK, CHILD = (os.environ[name] for name in ("MARK", "MARKED_ID", "A_TASK", "A_CHILD"))
target = os.environ["TARGET"]
seen = []
words = io.StringIO()
handler = logging.StreamHandler(words)
handler.setFormatter(logging.Formatter("%(name)s %(levelname)s %(message)s"))
logging.getLogger().addHandler(handler)
logging.getLogger().setLevel(logging.DEBUG)
for name in ("tsg", "sqlalchemy", "sqlalchemy.pool", "alembic", "psycopg", "asyncio", "aiosqlite"):
    logging.getLogger(name).setLevel(logging.DEBUG)
logging.getLogger("sqlalchemy.engine").setLevel(logging.INFO)
logging.captureWarnings(True)
warnings.simplefilter("always")

class Marked:
    """An object whose every word is the mark."""
    def __repr__(self):
        return MARK
    __str__ = __format__ = __fspath__ = __repr__
    def __call__(self, *arguments):
        raise RuntimeError(MARK)
    def __float__(self):
        raise ValueError(MARK)

class MarkedText(str):
    def __repr__(self):
        return MARK
    def encode(self, *arguments):
        raise ValueError(MARK)

BAD = [MARK, MARK.encode(), Marked(), MarkedText(MARK), [MARK], {MARK: MARK}, ValueError(MARK), MARK * 500]
BAD.append(MARK + "\\ud800")
calls = refused = 0

def look(error):
    """All that is shown of an error and of those that it is shown with."""
    seen.append("".join(traceback.format_exception(error)))
    shown, queue = set(), [error]
    while queue:
        one = queue.pop()
        if one is None or id(one) in shown:
            continue
        shown.add(id(one))
        seen.extend([str(one), repr(one), repr(one.args), repr(getattr(one, "__notes__", None))])
        seen.extend(f"{name} {value!r}" for name, value in vars(one).items())
        queue.append(one.__cause__)
        if not one.__suppress_context__:
            queue.append(one.__context__)

def attempt(work, *arguments, keep=False, **named):
    global calls, refused
    calls += 1
    try:
        answer = work(*arguments, **named)
        if inspect.isawaitable(answer):
            answer = asyncio.run(answer)
    except tsg.LedgerError as error:
        refused += 1
        look(error)
        return None
    if keep:
        return answer
    seen.append(repr(answer))
    return answer

def marks_in_each(work, right, *, values=BAD):
    """Call `work` with each argument in turn not being right."""
    for name in right:
        for value in values:
            attempt(work, **{**right, name: value})

METHODS = {
    "get_task": dict(task_id=TASK),
    "children_of": dict(task_id=TASK),
    "doctor": dict(progress=None),
    "storage_info": {},
    "create_task": dict(task_id=CHILD, parent_id=TASK, payload_hash=None, timeout_seconds=5, delivery_required=True,
                        expects_heartbeat=True),
    "start_task": dict(task_id=TASK),
    "heartbeat": dict(task_id=TASK),
    "heartbeat_many": dict(task_ids=[TASK]),
    "close_task": dict(task_id=CHILD, status="failed", code="worker_failed"),
    "set_delivery": dict(task_id=CHILD, status="failed", code="transport_failed"),
    "reconcile": dict(active_grace_seconds=1e9, delivery_grace_seconds=1e9, dry_run=False, skip_conflicts=False,
                      parent_id=None, batch_size=None, progress=None),
    "prune": dict(older_than_seconds=1e9, batch_size=10, dry_run=False, progress=None),
}
#: What a caller gave to be called may raise what it likes: that is the caller's own.
CALLED = {"progress"}

def use(ledger):
    attempt(ledger.create_task, task_id=TASK)
    for name, right in METHODS.items():
        method = getattr(ledger, name)
        assert set(inspect.signature(method).parameters) == set(right), name
        attempt(method, **right)
        marks_in_each(method, {key: value for key, value in right.items() if key not in CALLED})
    for name in ("get_task", "children_of", "start_task", "heartbeat"):
        attempt(getattr(ledger, name), MARKED_ID)
    attempt(ledger.close_task, MARKED_ID, "failed")
    attempt(ledger.set_delivery, MARKED_ID, "failed")
    attempt(ledger.create_task, parent_id=MARKED_ID)
    attempt(ledger.create_task, task_id=TASK, timeout_seconds=77)
    attempt(ledger.reconcile, active_grace_seconds=0, delivery_grace_seconds=0, parent_id=MARKED_ID)
    # A payload is only ever a fingerprint, of which the object shows only that it is there.
    fingerprint = tsg.payload_fingerprint(MARK)
    record = ledger.create_task(payload_hash=fingerprint)
    seen.append(json.dumps(record.to_dict()))
    seen.extend([repr(ledger), str(ledger), repr(record)])

# Those that take a function and no value of a task are left out.
of_functions = {"read", "write", "require"}
public = {name for name in dir(tsg.Ledger) if not name.startswith("_")} - {"close", "over", "read_only", *of_functions}
assert public == set(METHODS), public ^ set(METHODS)
assert {name for name in dir(tsg.AsyncLedger) if not name.startswith("_")} - {"close", "run"} <= public

for payload in (MARK, MARK.encode(), MarkedText(MARK)):
    seen.append(tsg.payload_fingerprint(payload))
for payload in (Marked(), [MARK], MARK + "\\ud800", {MARK}, bytearray(MARK.encode())):
    attempt(tsg.payload_fingerprint, payload)
marks_in_each(tsg.ReconcilePolicy, dict(active_grace_seconds=1, delivery_grace_seconds=1))
seen.append(repr(tsg.ReconcilePolicy()))
attempt(tsg.reconcile_restart, Marked(), tsg.ReconcilePolicy())

options = dict(clock=lambda: 1000.0, busy_timeout_ms=100, allow_external_acl=False, read_only=False, migrate=True,
               adopt=False, snapshot_limit_mib=1)
assert set(inspect.signature(tsg.Ledger).parameters) == {"target", *options}
for url in json.loads(os.environ["REFUSED"]):
    for more in ({}, {"read_only": True}, {"migrate": False}):
        attempt(tsg.Ledger, url, **more)
for name in set(options) - {"clock"}:
    for value in BAD:
        attempt(tsg.Ledger, target, **{**options, name: value})
for value in (Marked(), [MARK], {MARK}, ValueError(MARK)):
    attempt(tsg.Ledger, value)

with tsg.Ledger(target) as ledger:
    use(ledger)
    seen.append(repr(ledger._opened.engine))
    seen.append(repr(ledger._opened.engine.url))
with tsg.Ledger(target, read_only=True) as ledger:
    for name, right in METHODS.items():
        marks_in_each(getattr(ledger, name), {key: value for key, value in right.items() if key not in CALLED})

engine = sa.create_engine(target if "://" in target else f"sqlite:///{target}", hide_parameters=True)
for revision in BAD[:4]:
    attempt(tsg.upgrade, engine, revision)
    attempt(tsg.downgrade, engine, revision)
use(tsg.Ledger(engine))
with orm.Session(engine) as session:
    for name in ("timeout_seconds", "payload_hash", "id", "parent_id", "delivery_required"):
        for value in BAD:
            attempt(tsg.Task, **{name: value})
    task = tsg.Task()
    session.add(task)
    session.flush()
    for value in BAD:
        for verb in (task.close, task.deliver):
            attempt(verb, value)
            attempt(verb, "failed", value)
        for verb in (task.start, task.heartbeat):
            attempt(verb, at=value)
        for name in ("status", "delivery_status", "id", "payload_hash", "created_at", "terminal_code", "version"):
            attempt(setattr, task, name, value)
    session.rollback()
    for work in (tsg.reconcile.preview, tsg.reconcile.apply):
        for value in BAD:
            attempt(work, session, value)
            attempt(work, session, tsg.ReconcilePolicy(), now=value)
            attempt(work, session, tsg.ReconcilePolicy(), parent_id=value)
engine.dispose()

logs = words.getvalue()
assert "sqlalchemy" in logs
print(json.dumps({"calls": calls, "refused": refused, "seen": seen, "logs": logs}))
'''


def marking(target: str, refused: Sequence[str], cwd: Path) -> dict[str, Any]:
    """All that the program above saw, and what it printed by itself."""
    ran = subprocess.run(
        [sys.executable, "-c", MARKING],
        env={
            **os.environ,
            **MARKS,
            "TARGET": target,
            "REFUSED": json.dumps(refused),
        },
        capture_output=True,
        check=False,
        # A mark that is taken for a path is one below this.
        cwd=cwd,
        timeout=120,
    )
    assert (ran.returncode, ran.stderr) == (0, b""), ran.stderr.decode()[-2_000:]
    assert ran.stdout.count(b"\n") == 1
    found: dict[str, Any] = json.loads(ran.stdout)
    return found


#: How a line of somebody else's own log begins.
TOLD_BY_OTHERS = ("psycopg DEBUG ", "sqlalchemy.pool.impl.QueuePool DEBUG Error on connect(): ")


def told(found: Mapping[str, Any]) -> list[str]:
    """Every piece of text with a mark in it, shortened.

    Asked to tell all, psycopg and SQLAlchemy's pool say which host and database can't be reached; never a password.
    """
    logs = found["logs"].splitlines()
    pieces = [*found["seen"], *(line for line in logs if not line.startswith(TOLD_BY_OTHERS) and not in_answer(line))]
    leaks = [piece[-400:] for piece in pieces if MARK in piece or MARKED_ID in piece]
    return leaks + [piece[-400:] for piece in [*found["seen"], *logs] if PASSWORD in piece]


def in_answer(line: str) -> bool:
    """Whether it is a further line of what psycopg told, which has no logger's name before it."""
    return re.match(r"[\w.]+ (DEBUG|INFO|WARNING|ERROR|CRITICAL) ", line) is None


def urls_that_are_refused(folder: Path, port: int) -> list[str]:
    return [
        f"sqlite:///{folder}/{MARK}?{MARK}={MARK}",
        f"sqlite://user:{PASSWORD}@host/{MARK}",
        f"mysql://user:{PASSWORD}@localhost/{MARK}",
        f"{MARK}://user:{PASSWORD}@localhost/{MARK}",
        f"sqlite+{MARK}:///{folder}/{MARK}",
        f"postgresql+{MARK}://user:{PASSWORD}@localhost/{MARK}",
        f"postgresql+psycopg://user:{PASSWORD}@127.0.0.1:{MARK}/{MARK}",
        f"postgresql+psycopg://user:{PASSWORD}@127.0.0.1:{port}/{MARK}",
        f"postgresql+psycopg://user:{PASSWORD}@/{MARK}?host={folder}/{MARK}",
        f"postgresql+psycopg://user:{PASSWORD}@127.0.0.1:{port}/x?{MARK}={MARK}",
        f"postgresql+asyncpg://user:{PASSWORD}@127.0.0.1:{port}/{MARK}",
        f"{folder}/{MARK}/\0",
        f"{folder}/" + MARK * 50,
        f"file:{MARK}",
        f"//{MARK}/{MARK}",
        f"://{MARK}",
    ]


def test_no_method_on_a_file_tells_what_it_was_given(folder: Path, tally: Tally) -> None:
    path = folder / MARK / "ledger.sqlite"
    found = marking(str(path), urls_that_are_refused(folder / "missing", 1), folder.parent)
    leaks = told(found)
    tally("a secret given to a method", found["calls"], len(leaks))
    assert found["calls"] > 500
    assert found["refused"] > 300
    assert leaks == []


def test_no_method_on_a_server_tells_what_it_was_given_nor_its_password(
    postgresql_url: sa.URL, folder: Path, tally: Tally
) -> None:
    url = postgresql_url.set(password=PASSWORD).render_as_string(hide_password=False)
    with postgresql_log(postgresql_url) as log:
        found = marking(url, urls_that_are_refused(folder / "missing", postgresql_url.port or 5432), folder.parent)
        logged = [line for line in log() if MARK in line or PASSWORD in line]
    leaks = told(found)
    tally("a secret given to a method", found["calls"], len(leaks) + len(logged))
    assert found["refused"] > 300
    assert leaks == []
    # The name of a database that is not there is the server's own to log.
    assert [line for line in logged if f'database "{MARK}" does not exist' not in line] == []


class postgresql_log:
    """What a server of ours has written to its log since."""

    def __init__(self, url: sa.URL) -> None:
        engine = sa.create_engine(url, poolclass=sa.NullPool)
        with engine.connect() as connection:
            folder = Path(connection.exec_driver_sql("SHOW data_directory").scalar_one())
        self._file = folder.parent / "log"

    def __enter__(self) -> Any:
        try:
            self._file.stat()
        except OSError:
            pytest.skip("the server's log is not where the tests' own server writes it, or may not be read")
        start = self._file.stat().st_size
        return lambda: self._file.read_bytes()[start:].decode(errors="replace").splitlines()

    def __exit__(self, *exception: object) -> None:
        pass


def test_a_log_at_every_level_shows_no_payload_of_which_only_the_fingerprint_is_kept(folder: Path) -> None:
    """Asked for every row, SQLAlchemy shows ids and fingerprints; a payload has never been in it."""
    program = MARKING.replace('"sqlalchemy.engine").setLevel(logging.INFO)', '"sqlalchemy.engine").setLevel(5)')
    assert program != MARKING
    ran = subprocess.run(
        [sys.executable, "-c", program],
        env={
            **os.environ,
            **MARKS,
            "TARGET": str(folder / "ledger.sqlite"),
            "REFUSED": "[]",
        },
        capture_output=True,
        cwd=folder.parent,
        check=True,
        timeout=120,
    )
    assert [line for line in json.loads(ran.stdout)["logs"].splitlines() if MARK in line] == []


# -- in the files ----------------------------------------------------------------------------------------------


def test_the_files_hold_ids_and_fingerprints_and_nothing_else_of_what_was_given(folder: Path, tally: Tally) -> None:
    import tsg

    path = folder / f"{MARK}.sqlite"
    fingerprint = tsg.payload_fingerprint(MARK)
    held = b""
    with Ledger(path) as ledger:
        for _ in range(20):
            task = ledger.create_task(payload_hash=fingerprint, task_id=str(uuid.uuid4()))
            ledger.start_task(task.id)
            for code in (MARK, MARK.encode(), None):
                try:
                    ledger.close_task(task.id, "failed", code=code)
                except tsg.InvalidInput:
                    continue
                break
            for status in (MARK, "failed"):
                try:
                    ledger.set_delivery(task.id, status, code="transport_failed")
                except tsg.InvalidInput:
                    continue
        for name in os.listdir(folder):
            # Nobody else has them open; a descriptor of ours would take SQLite's locks away, so another process reads.
            held += subprocess.run(["cat", folder / name], capture_output=True, check=True).stdout
        assert sorted(os.listdir(folder)) == [f"{path.name}{suffix}" for suffix in ("", "-shm", "-wal")]
    held += path.read_bytes()
    tally("a secret looked for in the files", 1, held.count(MARK.encode()))
    assert task.id.encode() in held
    assert fingerprint.encode() in held
    assert MARK.encode() not in held


# -- on the command line ---------------------------------------------------------------------------------------

#: What each parameter of the command line takes, where it is not marked.
RIGHT = {
    "plan": "none",
    "agent": "somebody",
    "task_id": A_TASK,
    "parent_id": A_TASK,
    "payload_sha256": "ab" * 32,
    "timeout_seconds": "5",
    "status": "failed",
    "code": "worker_failed",
    "active_grace_seconds": "600",
    "delivery_grace_seconds": "600",
    "older_than": "600",
    "batch_size": "5",
    "snapshot_limit_mib": "5",
    "revision": "head",
    "agents": "agents.json",
    "interval": "1",
    "max_parallel": "1",
    "on_undelivered": "stop",
    "stall_seconds": "1",
    "log_dir": "logs",
    "log_format": "text",
    "cockpit": "page.html",
    "theme": "pet",
}


def commands() -> Iterator[tuple[str, list[click.Parameter]]]:
    context = click.Context(app)
    for name in sorted(COMMANDS):
        # Those on plans show what steps say, which is what they are for; tests/plan/test_cli.py has what they refuse.
        if name not in ("agent", "cockpit", "demo", "inbox", "plan", "step"):
            command = app.get_command(context, name)
            assert command is not None
            yield name, [one for one in command.params if one.name != "help"]


def written(parameter: click.Parameter, value: str) -> list[str]:
    return [f"{parameter.opts[0]}={value}"] if isinstance(parameter, click.Option) else [value]


def marked_commands() -> list[list[str]]:
    """Every command with every parameter marked in turn, and what is no command or option at all."""
    asked = []
    for name, parameters in commands():
        needed = [one for one in parameters if one.required]
        for marked in parameters:
            others = [one for one in needed if one is not marked]
            rest = [word for other in others for word in written(other, RIGHT[str(other.name)])]
            if isinstance(marked, click.Option) and marked.is_flag:
                asked.append([name, f"{marked.opts[0]}={MARK}", *rest])
            else:
                assert marked.name in RIGHT, marked.name
                asked += [[name, *written(marked, value), *rest] for value in (MARK, MARK * 300, f"-{MARK}")]
                if str(marked.name).endswith("_id"):
                    asked.append([name, *written(marked, MARKED_ID), *rest])
        asked += [[name, f"--{MARK}"], [name, MARK, MARK, MARK], [name, f"-{MARK}"]]
    return [*asked, [MARK], [f"--{MARK}"], ["--help", MARK]]


def test_no_option_of_the_command_line_is_told_back(folder: Path, warm: Warm, tally: Tally) -> None:
    path = folder / MARK / "ledger.sqlite"
    with Ledger(path) as ledger:
        ledger.create_task(task_id=A_TASK)
    # A task that is accepted is shown with the ids that it was given.
    shown = [asked for asked in marked_commands() if f"--task-id={MARKED_ID}" in asked]
    asked = [one for one in marked_commands() if one not in shown]
    assert len(asked) > 80
    answers = [ran for ran, _ in several(warm, [["--db", path, *one] for one in asked], folder)]
    leaks = [(one, ran) for one, ran in zip(asked, answers, strict=True) if MARK in ran.out + ran.err]
    leaks += [(one, ran) for one, ran in zip(asked, answers, strict=True) if MARKED_ID in ran.out + ran.err]
    tally("a secret given to a command", len(asked), len(leaks))
    assert sum(ran.status == 2 for ran in answers) > 60
    assert {ran.status for ran in answers} <= {0, 1, 2}
    assert leaks == []


def test_no_path_and_no_url_is_told_back_on_the_command_line(folder: Path, warm: Warm, tally: Tally) -> None:
    right = folder / MARK / "ledger.sqlite"
    targets = [right, folder / MARK / MARK, *urls_that_are_refused(folder / "missing", 1)]
    asked = [
        ["--db", target, *words]
        for target in targets
        if "\0" not in str(target)
        for words in (["init"], ["create"], ["doctor"], ["reconcile", "--dry-run"], ["current"], ["start", A_TASK])
    ]
    answers = [ran for ran, _ in several(warm, asked, folder)]
    leaks = [(one, ran) for one, ran in zip(asked, answers, strict=True) if "xq7Z" in ran.out + ran.err]
    tally("a secret in a path or URL", len(asked), len(leaks))
    assert leaks == []
    assert {ran.status for ran in answers} == {0, 2}


# -- over the wire, and beside the ledger ------------------------------------------------------------------------

#: Each command once on the ledger of which `%` is the path.
SESSION = [
    ["init"],
    ["create", "--task-id", A_TASK, "--timeout-seconds", "60"],
    ["start", A_TASK],
    ["heartbeat", A_TASK],
    ["reconcile", "--dry-run"],
    ["reconcile", "--batch-size", "5"],
    ["reconcile"],
    ["close", A_TASK, "--status", "failed", "--code", "worker_failed"],
    ["delivery", A_TASK, "--status", "failed"],
    ["doctor"],
    ["doctor", "--progress"],
    ["prune", "--older-than", "1000", "--dry-run"],
    ["prune", "--older-than", "0"],
    ["current"],
    ["check"],
    ["downgrade", "0001"],
    ["current"],
    ["reconcile", "--dry-run"],
    ["upgrade"],
    ["close", "no id", "--status", "failed"],
    ["nonsense"],
    ["--version"],
    ["--help"],
]


def outside(calls: Sequence[Call], path: Path) -> list[Call]:
    """What was changed, or opened to be changed, that is neither the ledger nor one of its sidecars, nor a directory
    above it that was missing, nor a file of SQLite's that has no name any more, nor output."""
    ours = {str(path), *(f"{path}{suffix}" for suffix in ("-wal", "-shm", "-journal"))}
    missing = {str(parent) for parent in path.parents}
    found = []
    for call in calls:
        if call.name in ("open", "openat", "openat2", "creat"):
            if not re.search(r"O_(WRONLY|RDWR|CREAT|TRUNC)", call.arguments):
                continue
        elif call.name not in CHANGES:
            continue
        if re.match(r"\d+<(pipe:|/dev/null|socket:)", call.arguments) or '"/dev/null"' in call.arguments:
            continue
        named = set(re.findall(r'"([^"]*)"', call.arguments)) if not call.name.endswith("write") else set()
        described = re.match(r"\d+<([^>]*)>", call.arguments)
        if described and not call.name.startswith(("open", "mk", "unlink", "rename", "link", "symlink")):
            named = {described[1].removesuffix(" (deleted)")}
        if call.name.startswith("mkdir") or call.name in ("chmod", "fchmodat"):
            if named <= ours | missing:
                continue
        elif named and all(name in ours or os.path.basename(name).startswith("etilqs_") for name in named):
            continue
        found.append(call)
    return found


def test_no_command_opens_a_socket_or_writes_beside_the_ledger(folder: Path, tmp_path: Path, tally: Tally) -> None:
    path = folder / "new" / "ledger.sqlite"
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    asked = [["--db", str(path), *words] for words in SESSION]
    program = f"import os, sys; os.chdir({str(elsewhere)!r})\n{SEVERAL}"
    traced = trace(
        [sys.executable, "-c", program, json.dumps(asked)],
        calls=["%network", "%process", *CHANGES, "open", "openat", "openat2"],
        env={
            "HOME": str(elsewhere),
            "TMPDIR": str(elsewhere),
            "PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path)),
        },
    )
    assert (traced.status, traced.stderr) == (0, b"")
    answers = [Ran(*ran) for ran, _ in json.loads(traced.stdout)]
    assert [ran.status for ran in answers] == [0] * 19 + [2, 2, 0, 0]
    network = [
        call
        for call in traced.calls
        if call.name in ("socket", "socketpair", "connect", "bind", "listen", "accept", "sendto", "sendmsg", "recvfrom")
    ]
    processes = [call for call in traced.calls if call.name in ("fork", "vfork", "clone", "clone3", "execve")]
    beside = outside(traced.calls, path)
    tally("a command watched", len(asked), len(network) + len(beside))
    # The ledger's own file is among what was seen.
    assert any(str(path) in call.arguments for call in traced.calls if call.name == "pwrite64")
    assert network == []
    assert [call for call in processes if call.name == "execve"][1:] == []
    assert beside == []
    assert (os.listdir(elsewhere), os.listdir(path.parent)) == ([], [path.name])


AUDITED = """
import json, os, sys
import sqlalchemy as sa, sqlalchemy.orm as orm
import tsg, tsg.cli, tsg.checkup, tsg.schema
import alembic.command, alembic.autogenerate
path = sys.argv[1]
events = []
WATCHED = ("socket.", "subprocess.", "os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.fork", "os.startfile",
           "urllib.", "http.", "ftplib.", "smtplib.", "webbrowser.", "pty.", "sqlite3.connect", "shutil.", "os.remove",
           "os.rename", "os.link", "os.symlink", "os.mkdir", "os.chmod", "os.truncate", "tempfile.", "open")
def note(event, arguments):
    if event.startswith(WATCHED):
        if event == "open" and not (arguments[2] or 0) & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            return
        events.append([event, [str(os.fsdecode(one) if isinstance(one, bytes) else one) for one in arguments]])
sys.addaudithook(note)
now = 1000.0
with tsg.Ledger(path, clock=lambda: now) as ledger:
    task = ledger.create_task(timeout_seconds=5)
    child = ledger.create_task(parent_id=task.id, delivery_required=False)
    ledger.start_task(task.id)
    ledger.heartbeat(task.id)
    ledger.heartbeat_many([task.id])
    ledger.get_task(task.id), ledger.children_of(task.id), ledger.storage_info()
    now = 5000.0
    ledger.reconcile(active_grace_seconds=0, delivery_grace_seconds=0, dry_run=True)
    ledger.reconcile(active_grace_seconds=0, delivery_grace_seconds=9999, batch_size=1)
    tsg.reconcile_restart(ledger, tsg.ReconcilePolicy())
    ledger.close_task(child.id, "cancelled", code="caller_cancelled")
    ledger.set_delivery(child.id, "not_applicable")
    ledger.doctor()
    now = 9000.0
    ledger.prune(0)
with tsg.Ledger(path, read_only=True) as ledger:
    ledger.doctor()
tsg.checkup.examine_file(path)
engine = sa.create_engine(sa.URL.create("sqlite", database=path), poolclass=sa.NullPool)
tsg.downgrade(engine, "0001")
with tsg.Ledger(path, read_only=True) as ledger:
    ledger.doctor()
tsg.upgrade(engine)
with orm.Session(engine) as session, session.begin():
    task = tsg.Task(timeout_seconds=5)
    session.add(task)
    session.flush()
    task.start(); task.heartbeat(); task.close("failed"); task.deliver("failed")
    tsg.reconcile.preview(session, tsg.ReconcilePolicy())
    tsg.reconcile.apply(session, tsg.ReconcilePolicy())
    tsg.doctor.examine(session)
tsg.payload_fingerprint("text")
print(json.dumps(events))
"""


def test_no_method_makes_a_socket_or_a_process_or_a_file_but_the_ledger(folder: Path, tally: Tally) -> None:
    path = folder / "new" / "ledger.sqlite"
    ran = subprocess.run(
        [sys.executable, "-c", AUDITED, path],
        capture_output=True,
        check=False,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
        timeout=60,
    )
    assert (ran.returncode, ran.stderr) == (0, b"")
    events = json.loads(ran.stdout)
    assert len(events) > 10
    named = {str(path), *(f"{path}{suffix}" for suffix in ("-wal", "-shm", "-journal"))}
    found = []
    for event, arguments in events:
        target = re.sub(r"\Afile:|\?mode=r[wo]\Z", "", arguments[0])
        if event == "os.mkdir" and target == str(path.parent):
            continue
        if event in ("open", "os.chmod", "sqlite3.connect") and target in named | {":memory:", str(path.parent)}:
            continue
        # The file that was just made, by its descriptor; and what tells that SQLite has opened one.
        if event == "sqlite3.connect/handle" or (event == "os.chmod" and target.isdecimal()):
            continue
        found.append((event, arguments))
    tally("an event of the interpreter watched", len(events), len(found))
    assert found == []
    assert {event for event, _ in events} >= {"sqlite3.connect", "os.mkdir", "open"}
    assert os.listdir(path.parent) == [path.name]
