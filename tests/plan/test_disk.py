"""What is written beside a ledger is never written over it, or over anything that was not put there by the same."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tsg import InvalidInput, Ledger, Plans
from tsg.cockpit.file import write
from tsg.plan.disk import PAGE
from tsg.plan.files import export_folder, write_learnings
from tsg.plan.longtask import export_file

WRITERS: dict[str, Callable[[Plans, Path], object]] = {
    "a long task": lambda plans, path: export_file(plans, "plan", path),
    "learnings": lambda plans, path: write_learnings(path, "# Learnings\n"),
    "a page": lambda plans, path: write(plans, "plan", path),
    "the page of a new plan": lambda plans, path: plans.create("another", cockpit=path),
    "the page of a plan": lambda plans, path: plans.show_in("plan", path),
}


@pytest.fixture
def plans(path: Path) -> Iterator[Plans]:
    with Ledger(path) as ledger:
        made = Plans(ledger)
        made.create("plan")
        made.add_step("plan", subject="Do it")
        yield made


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("suffix", ["", "-wal", "-shm", "-journal"])
def test_no_database_and_none_of_its_files_is_written_over(plans: Plans, path: Path, writer: str, suffix: str) -> None:
    place = Path(f"{path}{suffix}")
    before = place.stat().st_ino if place.exists() else None
    with pytest.raises(InvalidInput):
        WRITERS[writer](plans, place)
    # What SQLite shares between processes changes while it is used; another file would have another number.
    assert (place.stat().st_ino if place.exists() else None) == before
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    assert [plan["name"] for plan in plans.plans()] == ["plan"]


@pytest.mark.parametrize("start", [b"\xd9\xd5\x05\xf9\x20\xa1\x63\xd7", b"\x37\x7f\x06\x82", b"\x37\x7f\x06\x83"])
def test_nor_is_a_database_s_log_of_another_name(plans: Plans, tmp_path: Path, start: bytes) -> None:
    place = tmp_path / "copied"
    place.write_bytes(start + b"\0" * 100)
    for act in WRITERS.values():
        with pytest.raises(InvalidInput):
            act(plans, place)
    assert place.read_bytes() == start + b"\0" * 100


def test_nor_is_a_database_that_stands_in_the_place_of_a_step_s_file(plans: Plans, path: Path, tmp_path: Path) -> None:
    there = tmp_path / "exported"
    there.mkdir()
    (there / "T-001.json").write_bytes(path.read_bytes())
    with pytest.raises(InvalidInput):
        export_folder(plans, "plan", there)
    assert (there / "T-001.json").read_bytes() == path.read_bytes()


@pytest.mark.parametrize("writer", [name for name in WRITERS if "page" in name])
def test_a_page_replaces_a_page_or_nothing_and_no_other_file(plans: Plans, tmp_path: Path, writer: str) -> None:
    agents = tmp_path / "agents.json"
    agents.write_text('{"agents": []}')
    with pytest.raises(InvalidInput):
        WRITERS[writer](plans, agents)
    with pytest.raises(InvalidInput):
        WRITERS[writer](plans, tmp_path / "no" / "folder.html")
    assert agents.read_text() == '{"agents": []}'
    empty, old = tmp_path / "empty.html", tmp_path / "old.html"
    empty.touch()
    old.write_bytes(PAGE + b"<title>old</title>")
    for place in (empty, old):
        write(plans, "plan", place)
        assert place.read_bytes().startswith(PAGE + b"\n<html")
