"""What others may have put where a ledger is looked for, or put there while it is opened."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import sqlalchemy as sa

from tests import debian
from tests.conftest import raw
from tests.tallies import Tally
from tests.test_storage import a_socket, as_root, mode, tree, untouched
from tsg import Ledger, LedgerError, TaskNotFound
from tsg.checkup import examine_file

pytestmark = pytest.mark.skipif(os.name != "posix", reason="links, modes and forks are POSIX")

A_TASK = "10000000-0000-4000-8000-000000000001"
NOBODY = 65_534
SIDECARS = ("-wal", "-shm", "-journal")
#: How long a refusal may take, in seconds, on the slowest machine.
LONGEST = 10.0


# -- many openings, each in a process of its own -----------------------------------------------------------


class Ran(NamedTuple):
    """What a process left; a status of ``None`` is that of one which did not end in time."""

    status: int | None
    out: str
    err: str


class Warm:
    """A process that has imported everything, and forks for each program that it is to run."""

    _PROGRAM = """
import json, os, sys, tempfile, time, traceback
import sqlalchemy.orm, sqlalchemy.dialects.sqlite, alembic.command, alembic.autogenerate
import tsg.aio, tsg.cli.demo, tsg.cli.doctor, tsg.cli.ledger, tsg.cli.schema, tsg.cli.upkeep

def run(asked):
    os.chdir(asked["cwd"])
    os.umask(asked["umask"])
    sys.argv = ["tsg", *asked["arguments"]]
    status = 0
    try:
        exec(asked["program"], {"__name__": "__main__"})
    except SystemExit as left:
        status = left.code
    except BaseException:
        traceback.print_exc()
        status = 70
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status or 0)

answers = os.fdopen(os.dup(1), "w", closefd=True)
for line in sys.stdin:
    asked = json.loads(line)
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        child = os.fork()
        if child == 0:
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            os.dup2(out.fileno(), 1)
            os.dup2(err.fileno(), 2)
            run(asked)
        end = time.monotonic() + asked["seconds"]
        ended = status = 0
        while not ended and time.monotonic() < end:
            ended, status = os.waitpid(child, os.WNOHANG)
            time.sleep(0.001)
        if not ended:
            os.kill(child, 9)
            os.waitpid(child, 0)
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read().decode(errors="surrogateescape"))
    print(json.dumps([os.waitstatus_to_exitcode(status) if ended else None, *texts]), file=answers, flush=True)
"""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", self._PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def run(
        self,
        program: str,
        arguments: Sequence[str | Path] = (),
        *,
        cwd: Path | str = "/",
        umask: int = 0o022,
        seconds: float = LONGEST,
    ) -> Ran:
        """Run a Python program with these arguments in ``sys.argv``."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        asked = {
            "program": program,
            "arguments": [os.fspath(argument) for argument in arguments],
            "cwd": os.fspath(cwd),
            "umask": umask,
            "seconds": seconds,
        }
        self._process.stdin.write(json.dumps(asked) + "\n")
        self._process.stdin.flush()
        return Ran(*json.loads(self._process.stdout.readline()))

    def tsg(self, *arguments: str | Path, cwd: Path | str = "/", umask: int = 0o022) -> Ran:
        """Run the command line."""
        return self.run("from tsg.cli import main; main()", arguments, cwd=cwd, umask=umask)

    def end(self) -> None:
        self._process.communicate(timeout=60)
        assert self._process.returncode == 0


@pytest.fixture(scope="module")
def warm() -> Iterator[Warm]:
    process = Warm()
    yield process
    process.end()


#: Opens, or runs a command, one after the other; says of each what it answered and what is in the folder then.
SEVERAL = """
import contextlib, io, json, os, sys
import tsg
from tsg.cli import main

def opening(target, options):
    try:
        with tsg.Ledger(target, **options) as ledger:
            ledger.doctor()
    except tsg.LedgerError as error:
        print('{"error":"%s","ok":false}' % type(error).__name__)
        sys.exit(2)

told = []
for asked in json.loads(sys.argv[1]):
    out, err = (io.TextIOWrapper(io.BytesIO(), "utf-8", "surrogateescape", write_through=True) for _ in range(2))
    status = 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            opening(*asked) if isinstance(asked[-1], dict) else main(asked)
        except SystemExit as left:
            status = left.code
    texts = [stream.buffer.getvalue().decode(errors="surrogateescape") for stream in (out, err)]
    told.append([[status or 0, *texts], sorted(os.listdir())])
print(json.dumps(told))
"""

#: Every way to open a ledger: options of :class:`tsg.Ledger`, or a command.
WAYS: Mapping[str, tuple[str, ...] | dict[str, bool]] = {
    "Ledger": {},
    "Ledger, read-only": {"read_only": True},
    "Ledger, migrate=False": {"migrate": False},
    "Ledger, adopt=True": {"adopt": True},
    "tsg check": ("check",),
    "tsg close": ("close", A_TASK, "--status", "failed"),
    "tsg create": ("create",),
    "tsg current": ("current",),
    "tsg delivery": ("delivery", A_TASK, "--status", "failed"),
    "tsg doctor": ("doctor",),
    "tsg downgrade": ("downgrade", "base"),
    "tsg heartbeat": ("heartbeat", A_TASK),
    "tsg init": ("init",),
    "tsg prune": ("prune", "--older-than", "0"),
    "tsg prune --dry-run": ("prune", "--older-than", "0", "--dry-run"),
    "tsg reconcile": ("reconcile",),
    "tsg reconcile --dry-run": ("reconcile", "--dry-run"),
    "tsg start": ("start", A_TASK),
    "tsg upgrade": ("upgrade",),
}
MAKERS = ("Ledger", "Ledger, adopt=True", "tsg create", "tsg init", "tsg upgrade")


def refused_as(ran: Ran) -> str:
    """The error that it was refused with, in time and with no other word; else all that it said."""
    for error in ("InvalidInput", "StateConflict", "SchemaOutdated", "TaskNotFound"):
        if ran == (2, f'{{"error":"{error}","ok":false}}\n', ""):
            return error
    return repr(ran)


def several(warm: Warm, asked: Sequence[Sequence[object]], cwd: Path | str = "/") -> list[tuple[Ran, list[str]]]:
    """What each of several openings or commands answered, in one process, and what was in its folder then."""
    ran = warm.run(SEVERAL, [json.dumps([[*map(as_argument, one)] for one in asked])], cwd=cwd)
    assert (ran.status, ran.err) == (0, ""), ran
    return [(Ran(*told), names) for told, names in json.loads(ran.out)]


def as_argument(given: object) -> object:
    return os.fspath(given) if isinstance(given, Path) else given


def opened(warm: Warm, target: str | Path, ways: Iterable[str] = WAYS, cwd: Path | str = "/") -> dict[str, str]:
    """How opening `target` was refused, each way."""
    asked: list[Sequence[object]] = []
    for way in ways:
        how = WAYS[way]
        asked.append([target, how] if isinstance(how, dict) else ["--db", target, *how])
    return {way: refused_as(ran) for way, (ran, _) in zip(ways, several(warm, asked, cwd), strict=True)}


# -- what is no plain file of one name -----------------------------------------------------------------------


@pytest.fixture
def victims(tmp_path: Path, file_at_head: Path) -> Path:
    """What belongs to others, or to other programs of the same user: a text, another ledger, a folder."""
    folder = tmp_path / "victims"
    folder.mkdir(mode=0o700)
    (folder / "text").write_text("somebody's text\n" * 100)
    (folder / "text").chmod(0o644)
    (folder / "empty").touch(0o644)
    (folder / "folder").mkdir()
    (folder / "folder" / "kept").write_text("kept")
    shutil.copyfile(file_at_head, folder / "other.sqlite")
    (folder / "other.sqlite").chmod(0o600)
    return folder


@pytest.fixture
def at_head(path: Path, file_at_head: Path) -> Path:
    """A ledger with nothing in it, closed."""
    shutil.copyfile(file_at_head, path)
    path.chmod(0o600)
    return path


def symlink_to(name: str) -> Callable[[Path, Path], None]:
    return lambda path, victims: path.symlink_to(victims / name)


def hard_link_to(name: str) -> Callable[[Path, Path], None]:
    return lambda path, victims: os.link(victims / name, path)


def device(kind: int, major: int, minor: int) -> Callable[[Path, Path], None]:
    return lambda path, victims: os.mknod(path, kind | 0o600, os.makedev(major, minor))


def a_full_directory(path: Path, victims: Path) -> None:
    path.mkdir(mode=0o700)
    (path / "ledger.sqlite").write_text("kept")


def symlinks_in_a_circle(path: Path, victims: Path) -> None:
    path.symlink_to(victims / "circle")
    (victims / "circle").symlink_to(path)


STAND_INS: Mapping[str, Callable[[Path, Path], object]] = {
    "a symlink to a text": symlink_to("text"),
    "a symlink to an empty file": symlink_to("empty"),
    "a symlink to another ledger": symlink_to("other.sqlite"),
    "a symlink to nothing": symlink_to("nothing"),
    "a symlink to a directory": symlink_to("folder"),
    "a symlink to a device that never ends": lambda path, victims: path.symlink_to("/dev/zero"),
    "symlinks in a circle": symlinks_in_a_circle,
    "a hard link of a text": hard_link_to("text"),
    "a hard link of an empty file": hard_link_to("empty"),
    "a hard link of another ledger": hard_link_to("other.sqlite"),
    "a fifo": lambda path, victims: os.mkfifo(path, 0o600),
    "a socket": lambda path, victims: a_socket(path),
    "an empty directory": lambda path, victims: path.mkdir(mode=0o700),
    "a directory": a_full_directory,
}
DEVICES: Mapping[str, Callable[[Path, Path], object]] = {
    "the null device": device(stat.S_IFCHR, 1, 3),
    "the zero device": device(stat.S_IFCHR, 1, 5),
    "a block device": device(stat.S_IFBLK, 7, 250),
}

stand_in = pytest.mark.parametrize(
    "stand_in",
    [
        *(pytest.param(make, id=name) for name, make in STAND_INS.items()),
        *(pytest.param(make, id=name, marks=as_root) for name, make in DEVICES.items()),
    ],
)


@stand_in
@pytest.mark.parametrize("place", ["", *SIDECARS])
def test_whatever_is_no_plain_file_is_refused_at_once_in_every_place_by_every_way_of_opening(
    tmp_path: Path, at_head: Path, victims: Path, warm: Warm, tally: Tally, stand_in: Any, place: str
) -> None:
    stands = Path(f"{at_head}{place}")
    stands.unlink(missing_ok=True)
    stand_in(stands, victims)
    with untouched(tmp_path):
        answers = opened(warm, at_head)
    tally("something else in a file's place", len(answers), 0)
    assert answers == dict.fromkeys(WAYS, "StateConflict" if place else "InvalidInput")
    # It was only what stood there that was in the way.
    if stands.is_dir() and not stands.is_symlink():
        shutil.rmtree(stands)
    else:
        stands.unlink()
    assert warm.tsg("--db", at_head, "init").status == 0
    assert examine_file(at_head)["healthy"] is True


@stand_in
def test_no_database_is_made_beside_a_sidecar_that_is_no_plain_file(
    tmp_path: Path, path: Path, victims: Path, warm: Warm, stand_in: Any
) -> None:
    for place in SIDECARS:
        stands = Path(f"{path}{place}")
        stand_in(stands, victims)
        with untouched(tmp_path):
            assert opened(warm, path, MAKERS) == dict.fromkeys(MAKERS, "StateConflict"), place
        # So that each is alone.
        stands.rename(tmp_path / f"was{place}")
        if (victims / "circle").is_symlink():
            (victims / "circle").unlink()


@pytest.mark.skipif(not os.path.exists("/proc/self/fd"), reason="these are names that Linux gives")
@pytest.mark.parametrize(
    "name",
    ["/dev/null", "/dev/zero", "/dev/full", "/dev/stdin", "/dev/fd/0", "/proc/self/fd/0", "/proc/self/exe", "/dev"],
)
def test_a_device_that_the_system_itself_has_is_refused_and_stays_as_it_is(warm: Warm, name: str) -> None:
    before = os.lstat("/dev/null"), os.lstat("/dev/zero"), os.lstat("/dev/full"), sorted(os.listdir("/dev"))
    answers = opened(warm, name)
    after = os.lstat("/dev/null"), os.lstat("/dev/zero"), os.lstat("/dev/full"), sorted(os.listdir("/dev"))
    assert answers == dict.fromkeys(WAYS, "InvalidInput")
    assert [found[:6] for found in after[:3]] == [found[:6] for found in before[:3]]
    assert after[3] == before[3]


@as_root
def test_a_ledger_given_to_somebody_else_while_it_is_open_is_refused_to_whoever_opens_it_next(
    at_head: Path, folder: Path, warm: Warm
) -> None:
    with Ledger(at_head) as ledger:
        task = ledger.create_task()
        os.chown(at_head, NOBODY, NOBODY)
        with untouched(folder):
            answers = opened(warm, at_head)
        os.chown(at_head, os.geteuid(), os.getegid())
        assert warm.tsg("--db", at_head, "start", task.id).status == 0
    assert answers == dict.fromkeys(WAYS, "InvalidInput")


@pytest.mark.parametrize("umask", [0o000, 0o777])
@pytest.mark.parametrize("command", ["init", "create", "upgrade"])
def test_what_a_command_makes_is_private_under_any_umask(folder: Path, warm: Warm, command: str, umask: int) -> None:
    path = folder / "new" / "newer" / "ledger.sqlite"
    assert warm.tsg("--db", path, command, umask=umask).status == 0
    assert (mode(path), mode(path.parent), mode(path.parent.parent)) == (0o600, 0o700, 0o700)
    assert os.listdir(path.parent) == [path.name]
    assert warm.tsg("--db", path, "doctor", umask=umask).status == 0


# -- names ---------------------------------------------------------------------------------------------------

COMPOSED = "caf\N{LATIN SMALL LETTER E WITH ACUTE}"
DECOMPOSED = "cafe\N{COMBINING ACUTE ACCENT}"

NAMES = [
    "two words",
    " blanks around ",
    "it's",
    'say "when"',
    "%41",
    "%00",
    "%",
    "100%.sqlite",
    "%2e%2e%2fledger",
    COMPOSED,
    DECOMPOSED,
    "\N{FILE CABINET}\N{VARIATION SELECTOR-16}\N{ZERO WIDTH JOINER}\N{FIRE}",
    "\N{RIGHT-TO-LEFT OVERRIDE}etilqs",
    "?",
    "a?mode=memory",
    "a?immutable=1&nolock=1",
    "a?vfs=unix-none",
    "#",
    "a#fragment",
    "-",
    "--",
    "-x",
    "--db",
    "--help",
    "--version",
    "\n",
    "a\nb",
    "a\tb",
    "\x01",
    "\x7f",
    "\\",
    "a\\b",
    ";",
    "a;DROP TABLE tsg_tasks;--",
    "a' OR '1'='1",
    "$(touch made)",
    "`touch made`",
    "${HOME}",
    "*",
    "~",
    "~root",
    "@file",
    "sqlite:x",
    "postgresql:x",
    "FILE:x?mode=memory",
    ":memory",
    "memory:",
    ".hidden",
    "...",
    "ledger-wal",
    "ledger-journal",
    "x" * 247,
    "\N{LATIN SMALL LETTER E WITH ACUTE}" * 123,
    "\udcff\udcfe",
]


def names_in(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux takes every name as it is")
@pytest.mark.parametrize("name", NAMES, ids=ascii)
def test_any_name_on_the_command_line_is_that_of_one_ledger_and_of_nothing_else(
    folder: Path, warm: Warm, name: str
) -> None:
    told = several(
        warm,
        [
            ["--db", folder / name, "init"],
            [f"--db={name}", "create"],
            ["--db", name, "create"],
            ["--db", f"./{name}", "create"],
            ["--db", f"../private//./{name}", "create"],
            [f"--db={folder}/{name}", "upgrade"],
            ["--db", name, "doctor"],
        ],
        cwd=folder,
    )
    for ran, names in told:
        assert (ran.status, ran.err, names) == (0, "", [name])
    assert json.loads(told[-1][0].out)["task_count"] == 4
    assert mode(folder / name) == 0o600


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux takes every name as it is")
@pytest.mark.parametrize("name", [":memory:", "file:x", "file::memory:", "file:x?mode=memory", "file:/x"])
def test_a_name_that_sqlite_would_read_otherwise_is_refused_or_with_its_folder_just_a_name(
    folder: Path, warm: Warm, name: str
) -> None:
    assert opened(warm, name, cwd=folder) == dict.fromkeys(WAYS, "InvalidInput")
    assert names_in(folder) == []
    assert warm.tsg("--db", f"./{name.replace('/', '')}", "init", cwd=folder).status == 0
    assert names_in(folder) == [name.replace("/", "")]


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux takes every name as it is")
def test_names_that_only_look_the_same_are_two_ledgers(folder: Path, warm: Warm) -> None:
    for name, tasks in ((COMPOSED, 1), (DECOMPOSED, 2), ("%41", 3), ("A", 4), ("a", 5)):
        with Ledger(folder / name) as ledger:
            for _ in range(tasks):
                ledger.create_task()
    assert names_in(folder) == sorted([COMPOSED, DECOMPOSED, "%41", "A", "a"])
    found = [examine_file(folder / name)["task_count"] for name in (COMPOSED, DECOMPOSED, "%41", "A", "a")]
    assert found == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    "arguments",
    [
        ["init"],
        ["--db"],
        ["--db=", "init"],
        ["--db", "", "init"],
        ["-x", "init"],
        ["--", "init"],
        ["--db", "--", "-x", "init"],
        ["--db", "-x", "--", "-x", "init"],
        ["--db", "ledger.sqlite"],
        ["--db", "ledger.sqlite", "--", "-x"],
        ["--db", "ledger.sqlite", "init", "extra"],
        ["--db", "ledger.sqlite", "init", "--extra"],
        ["--db", "ledger.sqlite", "initialise"],
        ["--db", "x" * 248, "init"],
        ["--db", "\N{LATIN SMALL LETTER E WITH ACUTE}" * 124, "init"],
        ["--db", "x" * 255, "init"],
        ["--db", "x" * 256, "init"],
        ["--db", "x" * 100_000, "init"],
        ["--db", "new/" + "x" * 248, "init"],
        ["--db", "x" * 256 + "/ledger.sqlite", "init"],
        ["--db", "ledger.sqlite/", "init"],
        ["--db", "new/../", "init"],
        ["--db", "\\\\host\\share", "init"],
        ["--db", "//host/share", "init"],
    ],
    ids=lambda arguments: " ".join(arguments)[:40],
)
def test_what_names_no_ledger_or_no_command_is_invalid_and_makes_nothing(
    folder: Path, warm: Warm, arguments: list[str]
) -> None:
    with untouched(folder):
        answer = refused_as(warm.tsg(*arguments, cwd=folder))
    assert answer == "InvalidInput"


@pytest.mark.parametrize("length", [500, 505, 1_000, 4_000])
@pytest.mark.parametrize("way", ["Ledger", "tsg create", "tsg init", "tsg upgrade"])
def test_a_ledger_below_a_long_path_is_made_whole_or_refused_with_nothing_made(
    folder: Path, warm: Warm, way: str, length: int
) -> None:
    path = str(folder)
    while len(path) < length - 60:
        path += "/" + "d" * min(200, length - 40 - len(path))
    path += "/" + "l" * (length - 1 - len(path))
    assert len(path) == length
    before = tree(folder)
    answer = opened(warm, path, [way])[way]
    if answer in ("InvalidInput", "StateConflict"):
        assert tree(folder) == before
    else:
        assert answer.startswith("Ran(status=0, ")
        assert os.listdir(os.path.dirname(path)) == [os.path.basename(path)]
        assert warm.tsg("--db", path, "doctor").status == 0


# -- URLs ----------------------------------------------------------------------------------------------------


def meant_by_sqlalchemy(url: str | sa.URL) -> str:
    """The file that SQLAlchemy's own engine opens for a URL."""
    engine = sa.create_engine(url, poolclass=sa.NullPool)
    with engine.connect() as connection:
        return str(connection.exec_driver_sql("PRAGMA database_list").one()[2])


URL_FORMS = [
    "sqlite:///ledger.sqlite",
    "sqlite:///./ledger.sqlite",
    "sqlite:///.//ledger.sqlite",
    "sqlite:///../private/ledger.sqlite",
    "sqlite:///link/ledger.sqlite",
    "sqlite:///" + "./" * 1_500 + "ledger.sqlite",
    "sqlite+pysqlite:///ledger.sqlite",
    "sqlite:///ledger.sqlite?",
    "sqlite:///ledger.sqlite?nothing=",
    "sqlite:///ledger.sqlite%3Fmode=memory",
    "sqlite:///ledger%2Esqlite",
    "sqlite:///%6Cedger.sqlite",
    "sqlite:///led ger.sqlite",
    "sqlite:///ledger.sqlite#fragment",
    "sqlite:///-x",
    "sqlite:///a@b:c",
    "sqlite:///{folder}/ledger.sqlite",
    "sqlite:///{folder}//ledger.sqlite",
    "sqlite:///{folder}/./ledger.sqlite",
    "sqlite:///{folder}/../private/ledger.sqlite",
    "sqlite+pysqlite:///{folder}/ledger.sqlite",
    "sqlite:///{folder}/%41",
    "sqlite:///{folder}/" + DECOMPOSED,
]


@pytest.mark.parametrize("form", URL_FORMS, ids=lambda form: ascii(form)[:50])
@pytest.mark.parametrize("made_object", [False, True])
def test_a_url_names_the_file_that_sqlalchemy_opens_for_it(
    folder: Path, warm: Warm, monkeypatch: pytest.MonkeyPatch, form: str, made_object: bool
) -> None:
    (folder.parent / "target").mkdir(mode=0o700)
    (folder / "link").symlink_to(folder.parent / "target")
    monkeypatch.chdir(folder)
    url = form.format(folder=folder)
    with Ledger(sa.make_url(url) if made_object else url) as ledger:
        task = ledger.create_task()
    entries = [entry for entry in (*folder.iterdir(), *(folder.parent / "target").iterdir()) if not entry.is_symlink()]
    assert [str(entry.resolve()) for entry in entries] == [os.path.realpath(meant_by_sqlalchemy(url))]
    assert warm.tsg("--db", url, "start", task.id, cwd=folder).status == 0
    assert warm.tsg("--db", url, "doctor", cwd=folder).status == 0
    assert len(entries) == len(os.listdir(folder)) - 1 + len(os.listdir(folder.parent / "target"))


@pytest.mark.parametrize(
    "url",
    [
        "sqlite://",
        "sqlite:///",
        "sqlite:///:memory:",
        "sqlite://ledger.sqlite",
        "sqlite://user@/ledger.sqlite",
        "sqlite://:secret@/ledger.sqlite",
        "sqlite://host/ledger.sqlite",
        "sqlite://:5/ledger.sqlite",
        "sqlite:///ledger.sqlite?mode=memory",
        "sqlite:///ledger.sqlite?mode=memory&uri=true",
        "sqlite:///ledger.sqlite?immutable=1",
        "sqlite:///ledger.sqlite?vfs=unix-none",
        "sqlite:///ledger.sqlite?nolock=1",
        "sqlite:///ledger.sqlite?cache=shared",
        "sqlite:///ledger.sqlite?uri=true",
        "sqlite:///ledger.sqlite?check_same_thread=false",
        "sqlite:///file:ledger.sqlite",
        "sqlite:///file:ledger.sqlite?mode=memory",
        "sqlite:///file:ledger.sqlite?mode=memory&uri=true",
        "sqlite:///file:{folder}/ledger.sqlite?uri=true&nolock=1",
        "sqlite://///{folder}/ledger.sqlite",
        "sqlite+aiosqlite:///ledger.sqlite?uri=true",
        "sqlite+pysqlcipher://:secret@/ledger.sqlite",
        "file:ledger.sqlite?mode=memory",
        "file:ledger.sqlite?mode=rwc",
        "file:{folder}/ledger.sqlite",
        "file://{folder}/ledger.sqlite",
        "file:///ledger.sqlite",
        "ledger://x",
        "http://localhost/ledger.sqlite",
        "://",
    ],
)
def test_a_url_with_an_option_or_of_another_kind_is_refused_by_every_way_of_opening(
    folder: Path, warm: Warm, url: str
) -> None:
    target = url.format(folder=folder)
    before = os.listdir("/")
    with untouched(folder):
        answers = opened(warm, target, cwd=folder)
    assert answers == dict.fromkeys(WAYS, "InvalidInput")
    assert os.listdir("/") == before


# -- somebody who changes names while they are used ----------------------------------------------------------

#: Puts something else into a place and takes it away again, until it is told to end; says how often, and how often
#: something had been made meanwhile where there was to be nothing.
SWAPPER = """
import ctypes, os, random, signal, sys
libc = ctypes.CDLL(None, use_errno=True)
how, place, other, spin = sys.argv[1], *map(os.fsencode, sys.argv[2:4]), int(sys.argv[4])
NOREPLACE, EXCHANGE = 1, 2

def rename(source, target, flag):
    if libc.renameat2(-100, source, -100, target, flag):
        raise OSError(ctypes.get_errno(), "renameat2")

def exchange():
    rename(place, other, EXCHANGE)

def take_away():
    rename(place, other, NOREPLACE)

def put_back():
    try:
        rename(other, place, NOREPLACE)
    except FileExistsError:
        global made
        made += 1
        os.unlink(place)
        rename(other, place, NOREPLACE)

def link():
    os.symlink(other, place)

def unlink():
    try:
        os.unlink(place)
    except FileNotFoundError:
        pass

forth, back = {"exchange": (exchange, exchange), "nothing": (take_away, put_back), "link": (link, unlink)}[how]
going = True
def end(*_):
    global going
    going = False
signal.signal(signal.SIGTERM, end)
swaps = made = 0
if how == "exchange":
    exchange()
    exchange()
print("ready", flush=True)
chance = random.Random(7)
while going:
    forth()
    for _ in range(chance.randrange(spin)):
        pass
    back()
    for _ in range(chance.randrange(spin)):
        pass
    swaps += 1
print(swaps, made, flush=True)
"""


class Swaps(NamedTuple):
    swaps: int
    made: int


@contextmanager
def swapping(how: str, place: Path, other: Path, spin: int = 300) -> Iterator[Callable[[], Swaps]]:
    """Let another process swap; what it gives ends that, with everything in its place again."""
    process = subprocess.Popen(
        [sys.executable, "-c", SWAPPER, how, place, other, str(spin)], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    ended: list[Swaps] = []

    def end() -> Swaps:
        if not ended:
            process.send_signal(signal.SIGTERM)
            out, err = process.communicate(timeout=60)
            assert (process.returncode, err) == (0, b"")
            ended.append(Swaps(*map(int, out.split())))
        return ended[0]

    if process.stdout.readline() != b"ready\n":
        _, err = process.communicate(timeout=60)
        if b"Errno 22" in err or b"AttributeError" in err:
            pytest.skip("this system can't exchange two names at once")
        raise AssertionError(err)
    try:
        yield end
    finally:
        end()


@pytest.fixture
def crowd(victims: Path) -> Path:
    """The victims, and a database of another application among them."""
    application = raw(victims / "application.sqlite")
    application.execute("CREATE TABLE tasks (id INTEGER PRIMARY KEY, title TEXT)")
    application.execute("INSERT INTO tasks (title) VALUES ('theirs')")
    application.close()
    (victims / "application.sqlite").chmod(0o644)
    return victims


@pytest.fixture
def away(tmp_path: Path) -> Path:
    folder = tmp_path / "away"
    folder.mkdir(mode=0o700)
    return folder


def known(path: Path) -> set[str]:
    """The tasks of a ledger, asked of SQLite itself."""
    connection = raw(path)
    found = {identifier for (identifier,) in connection.execute("SELECT id FROM tsg_tasks")}
    connection.close()
    return found


#: What :func:`tests.test_storage.tree` gives.
Tree = Mapping[str, tuple[object, ...]]


class Tried(NamedTuple):
    """What came of many openings: how often each thing happened, and the tasks that were acknowledged."""

    counts: Counter[str]
    acknowledged: set[str]


def open_again_and_again(path: Path, times: int, *, may_make: bool = True) -> Tried:
    """Open in every way and use what was opened; anything but an error of ours comes out."""
    counts: Counter[str] = Counter()
    acknowledged: set[str] = set()
    options: list[dict[str, Any]] = [{"read_only": True}, {"migrate": False}, {"read_only": True, "busy_timeout_ms": 1}]
    if may_make:
        options += [{}, {"adopt": True}]

    def attempt(work: Callable[[], object], done: str) -> None:
        try:
            work()
        except TaskNotFound:
            # What is asked for is in the one ledger that was named.
            counts["answered from elsewhere"] += 1
        except LedgerError:
            counts["refused"] += 1
        else:
            counts[done] += 1

    end = time.monotonic() + LONGEST
    wanted = ("read", "examined", "refused")
    while counts["tried"] < times or (not all(counts[name] for name in wanted) and time.monotonic() < end):
        asked = options[counts["tried"] % len(options)]
        counts["tried"] += 1
        try:
            with Ledger(path, **{"busy_timeout_ms": 50, **asked}) as ledger:
                counts["opened"] += 1
                for _ in range(4):
                    attempt(lambda: ledger.get_task(A_TASK), "read")
                    if not asked.get("read_only"):
                        attempt(lambda: acknowledged.add(ledger.create_task().id), "written")
                attempt(ledger.doctor, "examined")
        except LedgerError:
            counts["refused"] += 1
        attempt(lambda: examine_file(path), "examined")
    return Tried(counts, acknowledged)


def differences(before: tuple[object, ...], after: tuple[object, ...] | None) -> dict[str, tuple[object, object]]:
    """What of a file is not as it was."""
    names = ("mode", "owner", "group", "links", "inode", "size", "time", "content")
    pairs = zip(names, before, after or (None,) * len(names), strict=True)
    return {name: (was, now) for name, was, now in pairs if was != now}


def settle(path: Path, tried: Tried, swaps: Swaps, tally: Tally, fault: str, victims: Path, before: Tree) -> None:
    """That it was tried in earnest, that nobody else noticed, and that all that was acknowledged is there."""
    lost = tried.acknowledged - known(path)
    after = tree(victims)
    changed = {name: differences(before[name], after.get(name)) for name in before if before[name] != after.get(name)}
    # A folder's own time also tells of what SQLite made and cleared away beside a database that it looked into.
    changed.pop(".", None)
    tally(fault, tried.counts["tried"], len(lost) + len(changed) + tried.counts["answered from elsewhere"])
    assert swaps.swaps > 100
    assert min(tried.counts[name] for name in ("opened", "refused", "read", "examined")) > 0, tried.counts
    assert changed == {}
    assert set(after) == set(before)
    assert (lost, tried.counts["answered from elsewhere"]) == (set(), 0)
    with Ledger(path) as ledger:
        assert ledger.get_task(A_TASK).id == A_TASK
        assert ledger.doctor()["healthy"] is True
    assert os.listdir(path.parent) == [path.name]


@pytest.fixture
def begun(at_head: Path) -> Path:
    """A ledger with one task, closed."""
    with Ledger(at_head) as ledger:
        ledger.create_task(task_id=A_TASK)
    return at_head


@pytest.mark.parametrize(
    "swapped_in",
    [
        "a symlink to a text",
        "a symlink to an empty file",
        "a symlink to another ledger",
        "a symlink to an application's database",
        "a symlink to nothing",
        "a hard link of a text",
        "a hard link of an empty file",
        "a hard link of another ledger",
        "an empty directory",
    ],
)
def test_a_database_swapped_for_something_else_all_the_while_leads_nobody_astray(
    begun: Path, crowd: Path, away: Path, swapped_in: str, rounds: int, tally: Tally
) -> None:
    make = {**STAND_INS, "a symlink to an application's database": symlink_to("application.sqlite")}[swapped_in]
    make(away / "stand-in", crowd)
    before = tree(crowd)
    with swapping("exchange", begun, away / "stand-in") as end:
        tried = open_again_and_again(begun, rounds // 5)
        swaps = end()
    assert os.listdir(away) == ["stand-in"]
    settle(begun, tried, swaps, tally, f"{swapped_in}, swapped in", crowd, before)


def test_a_database_taken_away_and_put_back_all_the_while_is_not_made_anew_by_those_who_may_not(
    begun: Path, crowd: Path, away: Path, rounds: int, tally: Tally
) -> None:
    before = tree(crowd)
    with swapping("nothing", begun, away / "ledger.sqlite") as end:
        tried = open_again_and_again(begun, rounds // 2, may_make=False)
        swaps = end()
    assert swaps.made == 0
    settle(begun, tried, swaps, tally, "a database taken away and put back", crowd, before)


FIND_OUT = """
import sys, time
from tsg import Ledger, LedgerError
from tsg.checkup import examine_file
path, seconds = sys.argv[1], float(sys.argv[2])
end = time.monotonic() + seconds
opened = refused = 0
while time.monotonic() < end:
    # Not read-only beside sidecars: SQLite itself would wait for the pipe's other end. They are gone for good first.
    for options in ({}, {"migrate": False}):
        try:
            with Ledger(path, **options) as ledger:
                ledger.doctor()
                opened += 1
        except LedgerError:
            refused += 1
    try:
        examine_file(path)
    except LedgerError:
        refused += 1
print(opened, refused)
"""


def test_a_database_swapped_for_a_fifo_all_the_while_keeps_nobody_waiting(
    begun: Path, away: Path, warm: Warm, rounds: int, tally: Tally
) -> None:
    os.mkfifo(away / "fifo", 0o600)
    seconds = rounds / 150
    with swapping("exchange", begun, away / "fifo") as end:
        ran = warm.run(FIND_OUT, [begun, str(seconds)], seconds=seconds + LONGEST)
        assert end().swaps > 100
    assert (ran.status, ran.err) == (0, "")
    opened, refused = map(int, ran.out.split())
    tally("a fifo, swapped in", opened + refused, 0)
    assert opened > 0
    assert refused > 0
    assert stat.S_ISFIFO((away / "fifo").lstat().st_mode)
    assert examine_file(begun)["healthy"] is True


@pytest.mark.parametrize("suffix", SIDECARS)
@pytest.mark.parametrize("victim", ["text", "empty", "nothing"])
def test_a_sidecar_that_is_a_symlink_now_and_then_leads_nobody_astray(
    begun: Path, crowd: Path, away: Path, suffix: str, victim: str, rounds: int, tally: Tally
) -> None:
    before = tree(crowd)
    keeper = raw(begun)
    keeper.execute("SELECT count(*) FROM tsg_tasks").fetchall()
    place = Path(f"{begun}{suffix}")
    stand_in = crowd / victim
    how = "link"
    if suffix != "-journal":
        how, stand_in = "exchange", away / "stand-in"
        stand_in.symlink_to(crowd / victim)
    with swapping(how, place, stand_in) as end:
        tried = open_again_and_again(begun, rounds // 8)
        swaps = end()
    keeper.close()
    settle(begun, tried, swaps, tally, f"a symlink as {suffix}, now and then", crowd, before)


@pytest.mark.parametrize("victim", ["text", "empty", "other.sqlite", "application.sqlite", "nothing"])
def test_a_folder_swapped_for_one_with_a_symlink_in_it_leads_nobody_astray(
    begun: Path, crowd: Path, away: Path, victim: str, rounds: int, tally: Tally
) -> None:
    trap = away / "trap"
    trap.mkdir(mode=0o700)
    (trap / begun.name).symlink_to(crowd / victim)
    before = tree(crowd)
    with swapping("exchange", begun.parent, trap) as end:
        tried = open_again_and_again(begun, rounds // 5)
        swaps = end()
    assert set(os.listdir(trap)) <= {begun.name, *(f"{begun.name}{suffix}" for suffix in SIDECARS)}
    # What was written while the log was in the other folder is there: only who may rename the folder can do that.
    tried.acknowledged.clear()
    settle(begun, tried, swaps, tally, "a folder swapped for another", crowd, before)


# -- a file system over a network ------------------------------------------------------------------------------

SFTP_SERVER = "/usr/lib/openssh/sftp-server"


@pytest.fixture
def over_ssh(tmp_path: Path) -> Iterator[Path]:
    """A folder that is on another machine, as far as the file system can tell: SFTP through a pipe."""
    if not hasattr(os, "geteuid") or os.geteuid() != 0 or not os.path.exists("/dev/fuse"):
        pytest.skip("only root, with /dev/fuse, may mount")
    sshfs, server = debian.program("sshfs"), debian.program(SFTP_SERVER)
    remote, mounted = tmp_path / "remote", tmp_path / "mounted"
    (remote / "private").mkdir(parents=True)
    (remote / "private").chmod(0o700)
    mounted.mkdir()
    ours, theirs = socket.socketpair()
    with ours, theirs:
        serving = subprocess.Popen([server], stdin=theirs, stdout=theirs)
        mounting = subprocess.Popen([sshfs, "-f", "-o", "passive", f":{remote}", mounted], stdin=ours, stdout=ours)
    try:
        end = time.monotonic() + 20
        while not os.path.ismount(mounted):
            assert mounting.poll() is None, "sshfs could not mount"
            assert time.monotonic() < end
            time.sleep(0.01)
        yield mounted / "private"
    finally:
        if os.path.ismount(mounted):
            subprocess.run(["umount", mounted], check=True, timeout=20)
        with suppress(ProcessLookupError):
            mounting.terminate()
        mounting.wait(timeout=20)
        serving.wait(timeout=20)


def test_on_a_network_file_system_no_ledger_is_made_or_opened(
    over_ssh: Path, tmp_path: Path, file_at_head: Path, warm: Warm, tally: Tally
) -> None:
    nothing = opened(warm, over_ssh / "ledger.sqlite")
    deeper = opened(warm, over_ssh / "new" / "newer" / "ledger.sqlite", MAKERS)
    (tmp_path / "link").symlink_to(over_ssh)
    linked = opened(warm, tmp_path / "link" / "ledger.sqlite", MAKERS)
    assert os.listdir(over_ssh) == []
    invalid = dict.fromkeys(WAYS, "InvalidInput")
    assert (nothing, deeper, linked) == (invalid, *[dict.fromkeys(MAKERS, "InvalidInput")] * 2)
    shutil.copyfile(file_at_head, over_ssh / "ledger.sqlite")
    (over_ssh / "ledger.sqlite").chmod(0o600)
    with untouched(over_ssh):
        there = opened(warm, over_ssh / "ledger.sqlite")
    assert there == invalid
    tally("a network file system", len(nothing) + len(deeper) + len(linked) + len(there), 0)


@pytest.mark.skipif(not os.path.ismount("/dev/shm"), reason="a file system in memory is mounted there on Linux")
def test_a_local_file_system_mounted_by_itself_is_fine(warm: Warm) -> None:
    folder = Path("/dev/shm") / f"tsg-{os.getpid()}"
    folder.mkdir(mode=0o700)
    try:
        with Ledger(folder / "ledger.sqlite") as ledger:
            ledger.create_task()
        assert warm.tsg("--db", folder / "ledger.sqlite", "doctor").status == 0
        assert os.listdir(folder) == ["ledger.sqlite"]
    finally:
        shutil.rmtree(folder)


def test_a_process_that_hangs_is_told_from_one_that_answers(warm: Warm) -> None:
    """What the tests above stand on: a way of opening that waits for ever would be seen."""
    assert warm.run("import time; time.sleep(60)", seconds=0.2).status is None
    assert refused_as(warm.run("print(1)")) == "Ran(status=0, out='1\\n', err='')"
