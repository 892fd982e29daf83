"""The HTML of a page: the same for the same plan, with every text as text, and nothing that asks for anything."""

from __future__ import annotations

import base64
import hashlib
import re
import subprocess
import sys
from html.parser import HTMLParser

import pytest

from tests.cockpit.conftest import HOSTILE, scene, step
from tsg import InvalidInput
from tsg.cockpit import render
from tsg.cockpit.scene import Scene, Stand, Summary
from tsg.plan.disk import THEMES
from tsg.plan.scheduling import PlanStatus


class Parsed(HTMLParser):
    """A page taken apart: its elements with their attributes, and the texts of some of them."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, list[str]] = {}
        self._open: list[str] = []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        while self._open and self._open.pop() != tag:
            pass

    def handle_data(self, data: str) -> None:
        if self._open:
            self.texts.setdefault(self._open[-1], []).append(data)

    def named(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]


def full(text: str) -> Scene:
    """A plan of every kind of step, with this text wherever one can be."""
    steps = [
        step(
            f"T-{place}",
            stand,
            subject=text,
            description=text,
            agent=text,
            output=text,
            error=text,
            attempts=2,
            started_at=1_000.0,
            ended_at=1_100.0,
            deadline_at=1_200.0,
            due_at=1_300.0,
            waiting_for=("T-0",) if stand is Stand.BLOCKED else (),
        )
        for place, stand in enumerate(Stand)
    ]
    edges = ((0, 1), (0, 2), (1, 3), (2, 3))
    return scene(*steps, edges=edges, name=text, description=text, halted=True)


PAGES = {
    "static": lambda text, theme: render.page(full(text), theme=theme),
    "live": lambda text, theme: render.page(full(text), theme=theme, live=True),
    "plans": lambda text, theme: render.plans([Summary(text, "running", 1, 2)], theme=theme),
    "missing": lambda text, theme: render.missing(theme=theme),
}
every_page = pytest.mark.parametrize("kind", PAGES)
every_theme = pytest.mark.parametrize("theme", THEMES)


@every_page
@every_theme
def test_no_text_makes_an_element_or_an_attribute(kind: str, theme: str) -> None:
    shape = [(tag, [*names]) for tag, names in Parsed(PAGES[kind]("harmless", theme)).elements]
    # Of each text by itself, and where one could end what another has begun.
    for text in (*HOSTILE[:6], "".join(HOSTILE)):
        assert [(tag, [*names]) for tag, names in Parsed(PAGES[kind](text, theme)).elements] == shape


@pytest.mark.parametrize("text", [text for text in HOSTILE if text.isprintable()])
def test_each_text_shows_as_the_characters_that_it_is(text: str) -> None:
    found = Parsed(render.page(full(text))).texts["bdi"]
    # The plan's name and description; each step's subject, description and output; its agent, in one place or another.
    assert found.count(text) >= 2 + 4 * len(Stand)


@every_page
@every_theme
def test_a_page_has_no_style_of_an_element_no_handler_and_no_address_of_anybody(kind: str, theme: str) -> None:
    parsed = Parsed(PAGES[kind]("x", theme))
    for _, attributes in parsed.elements:
        for name, value in attributes.items():
            assert name != "style"
            assert not name.startswith("on")
            if name in ("href", "src", "xlink:href"):
                assert value is not None
                assert value.startswith(("#", "data:image/svg+xml,", "/"))
                assert not value.startswith("//")
    assert "url(" not in "".join(parsed.texts["style"]).replace("url(#", "")
    assert "@import" not in "".join(parsed.texts["style"])


@every_page
def test_the_policy_names_just_the_style_and_the_scripts_that_are_there(kind: str) -> None:
    parsed = Parsed(PAGES[kind]("x", "pet"))
    live = kind != "static"
    said = re.findall(r"'(sha256-[^']+)'", render.policy(live=live))
    there = [
        f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
        for text in [*parsed.texts["style"], *parsed.texts["script"]]
    ]
    assert said == there
    assert ("connect-src" in render.policy(live=live)) is live
    stated = [meta["content"] for meta in parsed.named("meta") if meta.get("http-equiv") == "Content-Security-Policy"]
    assert stated == ([] if live else [render.policy()])
    assert render.policy().startswith("default-src 'none'; ")
    assert "unsafe" not in render.policy(live=True)


@every_theme
def test_the_same_plan_gives_the_same_page_and_each_theme_another(theme: str) -> None:
    assert render.page(full("x"), theme=theme) == render.page(full("x"), theme=theme)
    assert render.page(full("x"), theme=theme) != render.page(
        full("x"), theme=next(other for other in THEMES if other != theme)
    )


@pytest.mark.parametrize("status", PlanStatus)
def test_a_page_in_a_file_loads_itself_again_as_long_as_the_plan_is_open(status: PlanStatus) -> None:
    parsed = Parsed(render.page(scene(status=status.value)))
    again = [meta["content"] for meta in parsed.named("meta") if meta.get("http-equiv") == "refresh"]
    assert again == ([] if status in ("completed", "cancelled") else ["3"])


@pytest.mark.parametrize("stand", Stand)
@every_theme
def test_how_a_step_stands_is_told_in_words_and_its_picture_is_there_and_hidden(theme: str, stand: Stand) -> None:
    html = render.page(scene(step("T-001", stand, agent="Demeter")), theme=theme)
    parsed = Parsed(html)
    words = render._WORDS[stand]
    assert any(text.strip() == words.one for text in parsed.texts["strong"])
    assert ("Demeter" in re.sub(r"<[^>]+>", "", html.split('id="step-T-001"')[1])) is True
    assert f'<symbol id="is-{stand}"' in html
    shown = [svg for svg in parsed.named("svg") if "figure" in (svg.get("class") or "")]
    assert [svg["aria-hidden"] for svg in shown] == ["true"]


@pytest.mark.parametrize("status", PlanStatus)
@every_theme
def test_how_a_plan_stands_has_a_picture(theme: str, status: PlanStatus) -> None:
    html = render.page(scene(status=status.value), theme=theme)
    assert f'<symbol id="is-plan-{status}"' in html
    assert f'href="#is-plan-{status}"' in html


def test_what_has_no_place_in_html_is_shown_as_what_stands_for_it() -> None:
    html = render.page(scene(step(subject="a\x00b\x1bc\x7fd\x85e\ud800f")))
    assert "a\u2400b\u241bc\u2421d\ufffde\ufffdf" in html
    html.encode()


def test_nothing_turns_a_title_or_a_label_around() -> None:
    text = "\u202eabc\u2066"
    for title in Parsed(render.page(full(text))).texts["title"]:
        assert not set(title) & set("\u202e\u2066")


def test_too_many_steps_are_left_out_where_they_are_of_least_interest() -> None:
    stands = [Stand.DONE] * 900 + [Stand.FAILED, Stand.WORKING, Stand.READY] + [Stand.BLOCKED] * 2_000
    stands[3] = Stand.ESCALATED
    made = scene(*(step(f"T-{place}", stand) for place, stand in enumerate(stands)))
    html = render.page(made)
    shown = re.findall(r'<li id="step-(T-\d+)"', html)
    assert len(shown) == render.MOST_STEPS
    assert shown == sorted(shown, key=lambda key: int(key[2:]))
    assert {"T-3", "T-900", "T-901", "T-902", "T-903"} <= set(shown)
    left_out = [int(number.replace(",", "")) for number in re.findall(r"([\d,]+) steps? not shown here", html)]
    assert sum(left_out) == len(stands) - render.MOST_STEPS
    assert "900 steps" not in html


def test_of_what_is_done_the_latest_is_shown() -> None:
    made = scene(*(step(f"T-{place}", Stand.DONE) for place in range(render.MOST_STEPS + 1)))
    html = render.page(made)
    assert 'id="step-T-0"' not in html
    assert "1 step not shown here: 1 done" in html


def test_only_a_plan_that_is_more_than_a_chain_has_a_picture() -> None:
    three = [step("a"), step("b"), step("c")]
    assert 'class="picture"' not in render.page(scene(*three, edges=((0, 1), (1, 2))))
    assert 'class="picture"' in render.page(scene(*three, edges=((0, 1), (0, 2))))


def test_a_picture_that_is_too_large_is_said_to_be() -> None:
    made = scene(*(step(f"T-{place}") for place in range(300)), edges=tuple((0, place) for place in range(1, 300)))
    html = render.page(made)
    assert 'class="picture"' not in html
    assert "too much for one picture" in html


@pytest.mark.parametrize("seconds", [1e308, -1e308, 1e15])
def test_a_time_that_no_calendar_reaches_is_said_to_be_one(seconds: float) -> None:
    assert "beyond all calendars" in render.page(scene(step(stand=Stand.RETRY, due_at=seconds)))


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(-1, "0.0 s"), (2.34, "2.3 s"), (59.9, "59 s"), (61, "1 min 1 s"), (3_600, "1 h 0 min"), (200_000, "2 d 7 h")],
)
def test_lengths_of_time_are_told_in_two_units(seconds: float, text: str) -> None:
    assert render._duration(seconds) == text


@pytest.mark.parametrize("theme", ["", "Pet", "dark", None, 1])
def test_another_theme_is_refused(theme: object) -> None:
    with pytest.raises(InvalidInput, match="pet, plain"):
        render.page(scene(), theme=theme)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("missing", "call"),
    [
        ("jinja2", "render.page(scene())"),
        ("starlette", "server.app(plans)"),
        ("uvicorn", "server.serve(plans, port=0)"),
    ],
)
def test_without_the_extra_it_is_named(tmp_path: object, missing: str, call: str) -> None:
    program = f"""
import os, sys, tempfile
for name in ("{missing}",):
    sys.modules[name] = None
from tests.cockpit.conftest import scene
from tsg import InvalidInput, Ledger, Plans
from tsg.cockpit import file, render, scene as _, server
os.chmod({str(tmp_path)!r}, 0o700)
with Ledger({str(tmp_path)!r} + "/ledger.sqlite") as ledger:
    plans = Plans(ledger)
    try:
        {call}
    except InvalidInput as error:
        print(error)
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (ran.stderr, "pip install 'tsg-ledger[cockpit]'" in ran.stdout) == ("", True)
