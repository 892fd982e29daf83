"""Plans on either database as the plan layer's own tests have them, servers, and a real browser."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import sqlalchemy as sa

from tests.cockpit import pictures
from tests.cockpit.serving import Server, serving
from tests.plan.conftest import ledger, place, plans, plans_file, plans_server, plans_template, plans_url
from tsg import Ledger, Plans
from tsg.cockpit.scene import Scene, Stand, Step

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

__all__ = ["ledger", "place", "plans", "plans_file", "plans_server", "plans_template", "plans_url"]

#: For what is the same on any database.
on_sqlite = pytest.mark.parametrize("place", ["sqlite"], indirect=True)

#: What ends an element, an attribute, a script or a comment, turns text around, or is not to be seen.
HOSTILE = (
    "<script>window.hurt = 1</script>",
    "</script><script>window.hurt = 1</script>",
    "\"><img src=x onerror='window.hurt = 1'>",
    "--><svg onload=window.hurt=1>",
    "{{ 7 * 7 }}{% raw %}",
    "&lt;b&gt; &amp;",
    "\u202etxt.exe\u2066\u202d abc",
    "a\u200b\u200d\ufeffb",
    "M" * 390,
    "\x01\x1b[31m\x7f",
)


def step(key: str = "T-001", stand: Stand = Stand.READY, **fields: Any) -> Step:
    """A step as it is shown, with nothing more to it than is said."""
    nothing: dict[str, Any] = dict.fromkeys(Step.__slots__)
    nothing |= {"subject": "a step", "status": "pending", "attempts": 0, "waiting_for": ()}
    return Step(**(nothing | {"key": key, "stand": stand} | fields))


def scene(*steps: Step, edges: tuple[tuple[int, int], ...] = (), **fields: Any) -> Scene:
    """A plan as it is shown, of these steps."""
    plain: dict[str, Any] = {"name": "feature", "description": None, "status": "running", "halted": False}
    plain |= {"agents_at_work": 0, "created_at": 1_000.0, "changed_at": 1_000.0}
    return Scene(**(plain | fields), steps=steps, edges=edges)


@pytest.fixture
def feature(plans: Plans) -> Plans:
    """A plan of three steps, each but the first waiting for the one before."""
    plans.create("feature", retries=0)
    plans.add_step("feature", subject="first", owner="Demeter")
    plans.add_step("feature", subject="second", owner="Hermes", blocked_by=["T-001"])
    plans.add_step("feature", subject="third", blocked_by=["T-002"])
    return plans


@pytest.fixture
def server(place: Path | sa.URL, ledger: Ledger) -> Iterator[Server]:
    """A server beside the ledger that the test has open."""
    with serving(place) as running:
        yield running


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Plans, Server]]:
    """Plans and a server for all tests of a module, each of which has plans of its own."""
    folder = tmp_path_factory.mktemp("served")
    folder.chmod(0o700)
    with Ledger(folder / "ledger.sqlite") as ledger, serving(folder / "ledger.sqlite") as running:
        yield Plans(ledger), running


@pytest.fixture(scope="module")
def one_server(served: tuple[Plans, Server]) -> Server:
    """A server of a plan that nobody changes, ``feature``."""
    made, running = served
    made.create("feature")
    made.add_step("feature", subject="first")
    return running


# Not for the session: as long as it is open, nothing else in the process can run an event loop.
@pytest.fixture(scope="package")
def browser() -> Iterator[Browser]:
    pytest.importorskip("playwright.sync_api", reason="needs the package playwright")
    if pictures.chromium() is None:
        pytest.skip("needs chromium: install Debian's package chromium")
    with pictures.browsing() as opened:
        yield opened


@pytest.fixture
def visit(browser: Browser) -> Iterator[Callable[..., Page]]:
    """Opens pages, each of which must ask nobody but where it came from, and must not complain."""
    with ExitStack() as contexts:
        wrong: list[str] = []

        def open_page(url: str, *, may_fail: bool = False, **options: Any) -> Page:
            # Movement takes a browser without a graphics card most of its time.
            context = browser.new_context(**({"reduced_motion": "reduce"} | options))
            contexts.callback(context.close)
            page = context.new_page()
            origin = "file://" if url.startswith("file:") else url[: url.index("/", 8) + 1]
            page.on("request", lambda asked: _judge(asked.url, origin, wrong))
            page.on("pageerror", lambda error: wrong.append(str(error)))
            page.on("dialog", lambda dialog: (wrong.append(dialog.message), dialog.dismiss()))
            if not may_fail:
                page.on("console", lambda said: wrong.append(said.text))
            page.goto(url)
            return page

        yield open_page
        assert wrong == []


def _judge(asked: str, origin: str, wrong: list[str]) -> None:
    if not asked.startswith((origin, "data:")):
        wrong.append(asked)
