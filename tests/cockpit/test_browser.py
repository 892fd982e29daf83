"""The pages in a real browser: what is seen, moves and is asked for, and what becomes of it as a plan goes on."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.cockpit import pictures
from tests.cockpit.conftest import HOSTILE, scene, step
from tests.cockpit.serving import Server, serving
from tests.conftest import FakeClock
from tsg import Ledger, Plans
from tsg.cockpit import file, render
from tsg.cockpit.scene import Stand, look
from tsg.plan.disk import THEMES
from tsg.plan.scheduling import PlanStatus

if TYPE_CHECKING:
    from playwright.sync_api import Page

Visit = Callable[..., Any]

every_theme = pytest.mark.parametrize("theme", THEMES)
every_scheme = pytest.mark.parametrize("scheme", ["light", "dark"])

#: What a change may take until it is seen, in milliseconds.
SOON = 3_000


@pytest.fixture
def sample(path: Path, clock: FakeClock) -> Any:
    """The plan of the pictures, in a ledger of its own."""
    with Ledger(path, clock=clock) as ledger:
        yield pictures.make(ledger, clock)


def written(tmp_path: Path, html: str) -> str:
    page = tmp_path / "page.html"
    page.write_text(html, encoding="utf-8")
    return page.as_uri()


def hostile(theme: str = "pet") -> str:
    steps = [
        step(
            f"T-{place}",
            list(Stand)[place % len(Stand)],
            subject=text,
            description=text,
            agent=text,
            output=text,
            error=text,
            attempts=1,
            started_at=1_000.0,
            ended_at=1_100.0,
            due_at=1_100.0,
        )
        for place, text in enumerate(HOSTILE * 2)
    ]
    edges = tuple((0, place) for place in range(1, len(steps)))
    return render.page(scene(*steps, edges=edges, name=HOSTILE[1], description=HOSTILE[8], halted=True), theme=theme)


def test_the_sample_has_a_step_of_nearly_every_kind(sample: Plans) -> None:
    found = look(sample, pictures.NAME)
    assert set(Stand) - set(found.counts) == {Stand.OPENED, Stand.ENDED, Stand.FAILED}
    assert not found.is_chain


@every_theme
def test_a_page_in_a_file_tells_all_by_itself(visit: Visit, sample: Plans, tmp_path: Path, theme: str) -> None:
    file.write(sample, pictures.NAME, tmp_path / "page.html", theme=theme)
    page: Page = visit((tmp_path / "page.html").as_uri())
    found = look(sample, pictures.NAME)
    assert page.get_by_role("heading", level=1).inner_text() == pictures.NAME
    assert page.locator("progress").get_attribute("value") == str(found.percent)
    assert page.get_by_role("progressbar").count() == 1
    assert page.title() == f"{found.percent} % · {pictures.NAME}"
    cards = page.locator("ol > li")
    assert cards.count() == found.total
    for card, shown in zip(cards.all(), found.steps, strict=True):
        # Also of those that are out of sight.
        text = " ".join((card.text_content() or "").split())
        words = render._WORDS[shown.stand]
        assert shown.subject in text
        assert (f"{words.one} {shown.agent}" if words.of_agent else words.one) in text
    # A picture is never all that tells of a step.
    assert (
        page.locator("svg:not([aria-hidden=true] *)").evaluate_all(
            "found => found.filter(svg => !svg.closest('[aria-hidden=true]') && !svg.querySelector('text')).length"
        )
        == 0
    )
    assert page.locator(".node").count() == 11


def test_text_that_is_markup_shows_as_text(visit: Visit, tmp_path: Path) -> None:
    page: Page = visit(written(tmp_path, hostile()))
    assert page.evaluate("window.hurt") is None
    assert page.get_by_role("heading", level=1).inner_text() == HOSTILE[1]
    assert page.locator("#step-T-0 h3").inner_text() == "<script>window.hurt = 1</script>"
    assert page.locator("#step-T-1 .error bdi").inner_text() == HOSTILE[1]
    assert page.locator("#step-T-4 h3").inner_text() == HOSTILE[4]


def test_text_that_is_markup_shows_as_text_on_the_server_too(visit: Visit, served: tuple[Plans, Server]) -> None:
    plans, server = served
    named = "</script><script>window.hurt = 1</script>"
    plans.create(named, retries=0)
    plans.add_step(named, subject="<script>window.hurt = 1</script>")
    plans.start(named, "T-001")
    page: Page = visit(server.url)
    page.get_by_role("link", name=named).click()
    page.locator("#step-T-001[data-stand=working]").wait_for()
    plans.fail(named, "T-001", error="</script><img src=x onerror='window.hurt = 1'>")
    page.locator("#step-T-001 .error").wait_for(timeout=SOON)
    assert page.locator("#step-T-001 .error bdi").inner_text() == "</script><img src=x onerror='window.hurt = 1'>"
    assert page.locator("#step-T-001 h3").inner_text() == "<script>window.hurt = 1</script>"
    assert page.evaluate("window.hurt") is None


def test_text_that_turns_around_turns_nothing_but_itself(visit: Visit, tmp_path: Path) -> None:
    """What follows a name that ends in a right-to-left override stays where it is without one."""

    def place_of(agent: str) -> list[float]:
        made = scene(
            step(stand=Stand.SENT, agent="x", subject=agent, attempts=1), step("T-002", agent=agent, attempts=12)
        )
        page: Page = visit(written(tmp_path, render.page(made)), viewport={"width": 900, "height": 700})
        box = page.locator("#step-T-002 .facts span:not(.agent)").bounding_box()
        agent_box = page.locator("#step-T-002 .agent").bounding_box()
        assert box is not None
        assert agent_box is not None
        return [box["x"] - agent_box["x"] - agent_box["width"], agent_box["x"]]

    assert place_of("\u202eabc\u2067") == pytest.approx(place_of("abc"), abs=2)


def test_the_policy_holds_against_a_script_that_got_in_all_the_same(visit: Visit, tmp_path: Path) -> None:
    html = render.page(scene(step()))
    broken = html.replace("<main", "<script>window.hurt = 1</script><style>h1 { color: rgb(1, 2, 3) }</style><main", 1)
    broken = broken.replace("<h1", '<h1 onclick="window.hurt = 1" style="color: rgb(1, 2, 3)"', 1)
    page: Page = visit(written(tmp_path, broken), may_fail=True)
    page.locator("h1").click()
    assert page.evaluate("window.hurt") is None
    assert page.locator("h1").evaluate("h1 => getComputedStyle(h1).color") != "rgb(1, 2, 3)"


def test_what_changes_is_seen_in_time_and_what_does_not_stays_the_element_that_it_is(
    visit: Visit, served: tuple[Plans, Server]
) -> None:
    feature, server = served
    feature.create("feature")
    for blocked_by in ([], ["T-001"], ["T-002"], *[["T-003"]] * 30):
        feature.add_step("feature", subject="one of many", blocked_by=blocked_by)
    page: Page = visit(f"{server.url}plans/feature", viewport={"width": 700, "height": 600})
    page.locator("#step-T-033").wait_for()
    page.evaluate(
        """() => {
            for (const element of document.querySelectorAll('li, h1, .figure')) element.marked = true;
            document.querySelector('.scroll').focus({preventScroll: true});
            document.querySelector('#step-T-020').scrollIntoView({block: 'center', behavior: 'instant'});
        }"""
    )
    page.wait_for_timeout(200)
    where = "document.querySelector('#step-T-020').getBoundingClientRect().top"
    seen_at = page.evaluate(where)
    feature.start("feature", "T-001")
    page.locator("#step-T-001[data-stand=working]").wait_for(timeout=SOON)
    assert page.locator("#summary").inner_text().split("\n")[-1] == "1 agent at work"
    feature.complete("feature", "T-001")
    page.locator("#step-T-001[data-stand=done]").wait_for(timeout=SOON)
    page.locator("#step-T-002[data-stand=ready]").wait_for(timeout=SOON)
    feature.delete("feature", "T-002")
    page.locator("#step-T-002").wait_for(state="detached", timeout=SOON)
    feature.add_step("feature", subject="the newest")
    page.locator("#step-T-034").wait_for(timeout=SOON)
    assert page.evaluate(where) == pytest.approx(seen_at, abs=2)
    assert page.evaluate("document.activeElement.className") == "scroll"
    unmarked = page.evaluate(
        "[...document.querySelectorAll('ol > li, h1, ol .figure')].filter(element => !element.marked)"
        ".map(element => element.closest('li').id)"
    )
    assert set(unmarked) == {"step-T-034"}
    assert page.title() == f"{look(feature, 'feature').percent} % · feature"


def test_an_animation_of_what_stays_goes_on(visit: Visit, served: tuple[Plans, Server]) -> None:
    plans, server = served
    plans.create("moving")
    plans.add_step("moving", subject="first")
    page: Page = visit(f"{server.url}plans/moving", reduced_motion="no-preference")
    page.locator("#step-T-001").wait_for()
    flow = "document.querySelector('.head .jam .jam-fast').getAnimations()[0]"
    page.evaluate(f"window.running = {flow}")
    plans.add_step("moving", subject="second")
    page.locator("#step-T-002").wait_for(timeout=SOON)
    began = page.evaluate("window.running.currentTime")
    assert page.evaluate(f"window.running === {flow}")
    page.wait_for_timeout(200)
    assert page.evaluate("window.running.currentTime") > began


def test_the_list_and_a_plan_that_is_yet_to_come_are_live(visit: Visit, served: tuple[Plans, Server]) -> None:
    plans, server = served
    listed: Page = visit(server.url)
    missing: Page = visit(f"{server.url}plans/yet%20to%20come", may_fail=True)
    assert missing.get_by_role("heading", level=1).inner_text() == "No such plan"
    plans.create("yet to come")
    listed.get_by_role("link", name="yet to come").wait_for(timeout=SOON)
    missing.get_by_text("There are no steps yet.").wait_for(timeout=SOON)
    plans.remove("yet to come")
    missing.get_by_text("No such plan").wait_for(timeout=SOON)
    listed.get_by_role("link", name="yet to come").wait_for(state="detached", timeout=SOON)


def test_a_link_of_the_list_leads_to_its_plan_whatever_a_browser_makes_of_its_name(
    visit: Visit, served: tuple[Plans, Server]
) -> None:
    plans, server = served
    names = ("..", ".", "a/../b?c#计划")
    for name in names:
        plans.create(name)
    page: Page = visit(server.url)
    for name in names:
        page.locator(".plans a").filter(has=page.get_by_text(name, exact=True)).click()
        page.get_by_text("There are no steps yet.").wait_for()
        assert page.get_by_role("heading", level=1).inner_text() == name
        # What it asks by itself is the same plan.
        with page.expect_response(lambda response: response.request.resource_type == "fetch") as asked:
            pass
        assert asked.value.status == 200
        assert f"<h1><bdi>{name}</bdi></h1>" in asked.value.text()
        page.get_by_role("link", name="All plans").click()
        page.locator(".plans").wait_for()


def test_a_page_says_that_its_server_is_gone_and_goes_on_when_it_is_back(visit: Visit, path: Path) -> None:
    with Ledger(path) as ledger:
        plans = Plans(ledger)
        plans.create("feature")
        with serving(path) as server:
            page: Page = visit(f"{server.url}plans/feature", may_fail=True)
            page.get_by_text("There are no steps yet.").wait_for()
            assert page.get_by_role("alert").count() == 0
        page.get_by_role("alert").wait_for(timeout=SOON)
        assert page.get_by_text("There are no steps yet.").is_visible()
        plans.add_step("feature", subject="meanwhile")
        with serving(path, port=server.port):
            page.get_by_text("meanwhile").wait_for(timeout=10_000)
            page.get_by_role("alert").wait_for(state="hidden", timeout=SOON)


def test_a_page_in_a_file_shows_what_was_written_meanwhile_and_rests_at_the_end(
    visit: Visit, path: Path, tmp_path: Path
) -> None:
    target = tmp_path / "page.html"
    with Ledger(path) as ledger:
        plans = Plans(ledger)
        plans.create("feature", cockpit=target)
        plans.add_step("feature", subject="first")
        file.refresh(plans, "feature")
        page: Page = visit(target.as_uri())
        page.locator("#step-T-001[data-stand=ready]").wait_for()
        plans.start("feature", "T-001")
        plans.complete("feature", "T-001")
        file.refresh(plans, "feature")
    page.locator("#step-T-001[data-stand=done]").wait_for(timeout=2 * SOON)
    assert page.locator(".head .percent").inner_text().replace(" ", "") == "100%"
    page.evaluate("window.same = true")
    page.wait_for_timeout(SOON + 300)
    assert page.evaluate("window.same") is True


@pytest.mark.parametrize(("motion", "moves"), [("no-preference", True), ("reduce", False)])
def test_whoever_wants_no_motion_gets_none(
    visit: Visit, sample: Plans, tmp_path: Path, motion: str, moves: bool
) -> None:
    page: Page = visit(
        written(tmp_path, render.page(look(sample, pictures.NAME))),
        reduced_motion=motion,
        viewport={"width": 1280, "height": 2_000},
    )
    page.wait_for_timeout(300)
    assert (page.evaluate("document.getAnimations({subtree: true}).length") > 0) is moves


@every_theme
@pytest.mark.parametrize("width", [360, 1920])
def test_a_page_is_never_wider_than_its_window(visit: Visit, tmp_path: Path, theme: str, width: int) -> None:
    page: Page = visit(written(tmp_path, hostile(theme)), viewport={"width": width, "height": 800})
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    over = page.evaluate(
        """width => [...document.querySelectorAll('main :is(h1, h3, p, li, .pill, bdi)')]
            .filter(element => element.getClientRects().length && element.getBoundingClientRect().right > width + 1)
            .map(element => element.outerHTML.slice(0, 80))""",
        width,
    )
    assert over == []


#: For each text that is seen the contrast with what is behind it, by the formula of WCAG 2, where it is below 4.5.
_CONTRAST = """() => {
    const canvas = document.createElement('canvas').getContext('2d', {willReadFrequently: true});
    const channels = colour => {
        canvas.clearRect(0, 0, 1, 1);
        canvas.fillStyle = colour;
        canvas.fillRect(0, 0, 1, 1);
        return [...canvas.getImageData(0, 0, 1, 1).data];
    };
    const light = ([r, g, b]) => {
        const [x, y, z] = [r, g, b].map(v => v / 255).map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
        return 0.2126 * x + 0.7152 * y + 0.0722 * z;
    };
    const behind = element => {
        const rect = element.closest('.node')?.querySelector('rect');
        if (rect) return channels(getComputedStyle(rect).fill);
        for (let at = element; at; at = at.parentElement) {
            const colour = channels(getComputedStyle(at).backgroundColor);
            if (colour[3] === 255) return colour;
        }
        throw new Error('nothing behind');
    };
    const found = [];
    let seen = 0;
    const walker = document.createTreeWalker(document.querySelector('main'), NodeFilter.SHOW_TEXT);
    while (walker.nextNode()) {
        const element = walker.currentNode.parentElement;
        if (!walker.currentNode.data.trim() || element.closest('title, progress')) continue;
        seen += 1;
        const style = getComputedStyle(element);
        const [one, other] = [channels(element.closest('text') ? style.fill : style.color), behind(element)].map(light);
        const ratio = (Math.max(one, other) + 0.05) / (Math.min(one, other) + 0.05);
        if (ratio < 4.5) found.push([element.outerHTML.slice(0, 90), ratio]);
    }
    return [seen, found];
}"""


@every_theme
@every_scheme
def test_every_text_can_be_read(visit: Visit, tmp_path: Path, theme: str, scheme: str) -> None:
    steps = [
        step(f"T-{place}", stand, description="why", agent="Demeter", output="o", error="e", attempts=1, ended_at=1.0)
        for place, stand in enumerate(Stand)
    ]
    edges = tuple((0, place) for place in range(1, len(steps)))
    made = scene(*steps, edges=edges, description="what", halted=True)
    page: Page = visit(written(tmp_path, render.page(made, theme=theme)), color_scheme=scheme)
    for status in PlanStatus:
        page.locator(".summary .pill").evaluate("(pill, status) => { pill.dataset.plan = status }", status.value)
        seen, unreadable = page.evaluate(_CONTRAST)
        assert seen > 60
        assert unreadable == []


def test_in_the_dark_a_page_is_dark(visit: Visit, tmp_path: Path) -> None:
    uri = written(tmp_path, render.page(scene(step())))
    found = [
        visit(uri, color_scheme=scheme).evaluate("getComputedStyle(document.body).backgroundColor")
        for scheme in ("light", "dark")
    ]
    assert found == ["rgb(251, 244, 233)", "rgb(29, 24, 22)"]


def test_without_scripts_times_stand_there_as_they_are(visit: Visit, tmp_path: Path) -> None:
    made = scene(step(stand=Stand.WORKING, started_at=1_000.0, deadline_at=4_600.0, attempts=1), changed_at=2_000.0)
    html = render.page(made)
    page: Page = visit(written(tmp_path, html), java_script_enabled=False)
    facts = page.locator(".facts").inner_text()
    assert "since 1970-01-01 00:16:40 UTC" in facts
    assert "until 1970-01-01 01:16:40 UTC" in facts
    assert page.locator(".changed").inner_text() == "last changed 1970-01-01 00:33:20 UTC"


def test_with_scripts_times_tell_how_long_ago_they_are_and_go_on(visit: Visit, tmp_path: Path) -> None:
    now = time.time()
    made = scene(
        step(stand=Stand.WORKING, started_at=now - 100, deadline_at=now + 90, attempts=1),
        step("T-002", Stand.RETRY, due_at=now + 3_700, attempts=1),
        changed_at=now - 7_300,
    )
    page: Page = visit(written(tmp_path, render.page(made, live=False)))
    assert page.locator(".changed").inner_text() == "last changed 2 h ago"
    running, left = (page.locator("#step-T-001 time").nth(place) for place in (0, 1))
    assert running.inner_text().startswith("for 1 min 4")
    assert left.inner_text().endswith("s left")
    assert page.locator("#step-T-002 time").inner_text() == "in 1 h"
    before = running.inner_text()
    page.wait_for_function("before => document.querySelector('#step-T-001 time').textContent !== before", arg=before)


def test_the_pictures_of_the_manual_can_be_made_anew(
    browser: Any, sample: Plans, clock: FakeClock, tmp_path: Path
) -> None:
    file.write(sample, pictures.NAME, tmp_path / "page.html", theme="plain")
    target = tmp_path / "picture.png"
    pictures.take(browser, tmp_path / "page.html", target, scheme="light", width=390, height=800, now=clock.now)
    assert target.read_bytes().startswith(b"\x89PNG")
    kept = Path(__file__).parents[2] / "docs" / "cockpit"
    for theme, scheme, width, _ in pictures._SHOTS:
        picture = kept / f"{theme}-{scheme}-{'wide' if width > 800 else 'phone'}.png"
        assert 10_000 < picture.stat().st_size < 250_000
