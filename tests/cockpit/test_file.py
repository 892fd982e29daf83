"""A plan's page in a file: whole at every moment, and in the end the last state, whoever else writes it."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.cockpit.conftest import on_sqlite
from tsg import InvalidInput, PlanNotFound, Plans, StateConflict
from tsg.cockpit import file, render
from tsg.cockpit.scene import look


def as_it_is(plans: Plans, theme: str = "pet") -> bytes:
    return render.page(look(plans, "feature"), theme=theme).encode()


@pytest.mark.parametrize("theme", ["pet", "plain"])
@on_sqlite
def test_a_page_is_written_as_the_plan_stands(feature: Plans, tmp_path: Path, theme: str) -> None:
    page = tmp_path / "page.html"
    file.write(feature, "feature", page, theme=theme)
    assert page.read_bytes() == as_it_is(feature, theme)
    assert [entry.name for entry in tmp_path.iterdir() if entry.is_file()] == ["page.html"]


@on_sqlite
def test_a_page_that_is_right_already_is_not_touched(feature: Plans, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    file.write(feature, "feature", page)
    before = page.stat()
    file.write(feature, "feature", page)
    after = page.stat()
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


@pytest.mark.parametrize(
    ("name", "output", "theme", "error"),
    [
        ("nothing", "page.html", "pet", PlanNotFound),
        ("feature", "nowhere/page.html", "pet", InvalidInput),
        ("feature", ".", "pet", (InvalidInput, StateConflict)),
        ("feature", "", "pet", InvalidInput),
        ("feature", "page.html", "neon", InvalidInput),
    ],
)
@on_sqlite
def test_what_can_not_be_written_is_refused(
    feature: Plans, tmp_path: Path, name: str, output: str, theme: str, error: type[Exception]
) -> None:
    before = [entry.name for entry in tmp_path.iterdir()]
    with pytest.raises(error):
        file.write(feature, name, tmp_path / output if output else "", theme=theme)
    assert [entry.name for entry in tmp_path.iterdir()] == before


@on_sqlite
def test_the_file_that_a_plan_names_is_written_in_its_theme(plans: Plans, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    plans.create("feature", cockpit=page, theme="plain")
    assert file.refresh(plans, "feature")
    assert page.read_bytes() == as_it_is(plans, "plain")
    plans.add_step("feature", subject="first")
    assert file.refresh(plans, "feature")
    assert page.read_bytes() == as_it_is(plans, "plain")


def test_a_plan_without_a_file_or_that_is_gone_has_none_to_write(plans: Plans, tmp_path: Path) -> None:
    plans.create("feature")
    assert not file.refresh(plans, "feature")
    plans.show_in("feature", tmp_path / "page.html")
    plans.remove("feature")
    assert not file.refresh(plans, "feature")
    assert not (tmp_path / "page.html").exists()


def test_of_several_who_change_a_plan_at_once_none_leaves_an_older_page_behind(plans: Plans, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    plans.create("feature", cockpit=page, retries=0)
    workers, each = 5, 3
    for number in range(workers * each):
        plans.add_step("feature", subject=f"step {number}")
    file.refresh(plans, "feature")
    reads: list[bytes] = []
    over = threading.Event()

    def read() -> None:
        while not over.is_set():
            reads.append(page.read_bytes())

    def work(worker: int) -> None:
        for number in range(each):
            key = f"T-{worker * each + number + 1:03d}"
            plans.start("feature", key)
            file.refresh(plans, "feature")
            plans.complete("feature", key)
            file.refresh(plans, "feature")

    with ThreadPoolExecutor(workers + 1) as pool:
        reader = pool.submit(read)
        try:
            list(pool.map(work, range(workers)))
        finally:
            over.set()
        reader.result()
    assert page.read_bytes() == as_it_is(plans)
    assert b"completed" in page.read_bytes()
    assert all(found.endswith(b"</html>") for found in reads)
