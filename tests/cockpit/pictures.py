"""A plan to show, in as many states as one has, and pictures of it: ``python -m tests.cockpit.pictures [FOLDER]``.

The pictures in ``docs/cockpit`` are made by this. It needs Chromium and the package ``playwright``.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import sqlalchemy as sa

from tests.conftest import FakeClock
from tsg import Ledger, Plans
from tsg.cockpit import file
from tsg.plan.tables import dispatches

if TYPE_CHECKING:
    from playwright.sync_api import Browser

#: Keeps the browser from whatever it would do besides.
ARGUMENTS: Final = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]

NAME: Final = "A small book about harbours"
#: When the plan of the pictures begins, seconds since the epoch.
BEGINNING: Final = 1_790_000_000.0

_SHOTS: Final = (
    ("pet", "light", 1280, 1120),
    ("pet", "dark", 1280, 1120),
    ("plain", "light", 1280, 1120),
    ("plain", "dark", 1280, 1120),
    ("pet", "light", 390, 844),
    ("pet", "dark", 390, 844),
    ("plain", "light", 390, 844),
    ("plain", "dark", 390, 844),
)


def chromium() -> str | None:
    """Where the browser is; ``None`` for nowhere."""
    return shutil.which("chromium") or shutil.which("chromium-browser")


@contextmanager
def browsing() -> Iterator[Browser]:
    """A browser without a window."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium(), args=ARGUMENTS)
        try:
            yield browser
        finally:
            browser.close()


def dispatch(ledger: Ledger, attempt: str | None, agent: str, *, inbox_at: float | None = None) -> None:
    """Let a queued attempt be on its way to an agent, or in the inbox."""
    row = {"id": attempt, "agent": agent, "session": f"agent:{agent}:main", "deliveries": 1, "inbox_at": inbox_at}
    row["lease_until"] = None if inbox_at is not None else BEGINNING
    ledger.write(lambda connection, _: connection.execute(sa.insert(dispatches).values(row)))


def make(ledger: Ledger, clock: FakeClock) -> Plans:
    """The plan, an hour and a half after its beginning."""
    plans = Plans(ledger)
    clock.now = BEGINNING
    plans.create(NAME, description="Everything that a small book needs, from its sources to print.")

    def add(subject: str, owner: str | None, *blocked_by: int, **more: Any) -> None:
        waits = [f"T-{number:03d}" for number in blocked_by]
        plans.add_step(NAME, subject=subject, owner=owner, blocked_by=waits, **more)

    def do(number: int, seconds: float, **report: Any) -> None:
        plans.start(NAME, f"T-{number:03d}")
        clock.advance(seconds)
        plans.complete(NAME, f"T-{number:03d}", **report)

    slow: dict[str, Any] = {"timeout_seconds": 1800.0}
    add("Collect the sources", "Athena", **slow)
    add("Draft the outline", "Hermes", 1, **slow)
    add("Draw a map of the harbour", "Apelles", 1, **slow)
    add("Write chapter one", "Calliope", 2, 3, description="Ships that came, and what they carried.", **slow)
    add("Write chapter two", "Clio", 2, **slow)
    add("Measure the old moles", "Thales", 1, timeout_seconds=600.0, partial_ok=True)
    add("Check all dates", "Urania", 2)
    add("Fetch the harbour archive", "Iris", base_seconds=900.0)
    add("Agree on a title", "Paris", retries=0)
    add("Edit the chapters", "Hermes", 4, 5, 7)
    add("Translate the summary", None, 2)
    add("Print and bind", "Hephaestus", 6, 9, 10)
    add("Carve it in stone", "Phidias")

    do(1, 840.0, output="notes/sources.md")
    moles = plans.start(NAME, "T-006")["attempt"]
    do(2, 310.0)
    assert moles is not None
    plans.heartbeat(moles, output="7 of 12 moles, in data/moles.csv")
    plans.start(NAME, "T-009")
    do(3, 1505.0, output="figures/map.svg")
    plans.cancel(NAME, "T-013")
    plans.advance(NAME)
    plans.start(NAME, "T-004")
    clock.advance(520.0)
    plans.start(NAME, "T-008")
    clock.advance(45.0)
    plans.fail(NAME, "T-008", error="the archive is closed until noon")
    dispatch(ledger, plans.open(NAME, "T-005")["attempt"], "Clio")
    dispatch(ledger, plans.open(NAME, "T-007")["attempt"], "Urania", inbox_at=clock.now)
    clock.advance(12.0)
    return plans


def take(browser: Browser, page: Path, target: Path, *, scheme: str, width: int, height: int, now: float) -> None:
    """A picture of a page as it looks at that time."""
    context = browser.new_context(
        viewport={"width": width, "height": height}, color_scheme="dark" if scheme == "dark" else "light"
    )
    try:
        shown = context.new_page()
        shown.clock.set_fixed_time(now)
        shown.goto(page.as_uri())
        shown.wait_for_timeout(900)
        shown.screenshot(path=target)
    finally:
        context.close()


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    clock = FakeClock()
    with tempfile.TemporaryDirectory() as private, browsing() as browser:
        with Ledger(Path(private) / "ledger.sqlite", clock=clock) as ledger:
            plans = make(ledger, clock)
            for theme, scheme, width, height in _SHOTS:
                page = Path(private) / f"{theme}.html"
                file.write(plans, NAME, page, theme=theme)
                target = folder / f"{theme}-{scheme}-{'wide' if width > 800 else 'phone'}.png"
                take(browser, page, target, scheme=scheme, width=width, height=height, now=clock.now)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parents[2] / "docs" / "cockpit")
