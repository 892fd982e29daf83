"""The HTML of a page: :mod:`tsg.cockpit.scene` put into the templates, with everything that it needs inside.

Every text is escaped by the template engine. A page asks nothing of anybody: its policy (:func:`policy`) lets in just
the style and the scripts that it was built with, by their digests.
"""

from __future__ import annotations

import base64
import hashlib
import re
import unicodedata
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from urllib.parse import quote

from tsg import values
from tsg.cockpit import picture
from tsg.cockpit.scene import Scene, Stand, Step, Summary
from tsg.errors import InvalidInput
from tsg.plan.disk import THEMES
from tsg.plan.scheduling import PlanStatus

if TYPE_CHECKING:
    import jinja2

__all__ = ["MOST_STEPS", "missing", "page", "plans", "policy", "require_theme"]

#: The most steps that a page shows one by one, and the most plans.
MOST_STEPS: Final = 500
_MOST_PLANS: Final = 500
#: The most of those that a step waits for that are named.
_MOST_NAMED: Final = 6

_PLAN_WORDS: Final = {
    PlanStatus.PENDING.value: "not begun",
    PlanStatus.RUNNING.value: "under way",
    PlanStatus.FAILED.value: "failed",
    PlanStatus.COMPLETED.value: "completed",
    PlanStatus.CANCELLED.value: "given up",
}


class _Words(NamedTuple):
    """How a step stands, in words.

    Attributes:
        one: of a step, before the agent's name where `of_agent` says so.
        many: of several, after their number.
        short: in a small box.
    """

    one: str
    many: str
    short: str
    of_agent: bool = False


_WORDS: Final = {
    Stand.DONE: _Words("done", "done", "done"),
    Stand.WORKING: _Words("at work", "at work", "at work"),
    Stand.SENT: _Words("sent to", "sent to an agent", "sent", of_agent=True),
    Stand.INBOX: _Words("in the inbox of", "in an inbox", "in an inbox", of_agent=True),
    Stand.OPENED: _Words("waits to be taken", "to be taken", "to be taken"),
    Stand.ENDED: _Words("just ended", "just ended", "just ended"),
    Stand.READY: _Words("ready", "ready", "ready"),
    Stand.RETRY: _Words("to be tried again", "to be tried again", "tried again"),
    Stand.BLOCKED: _Words("waiting", "waiting", "waiting"),
    Stand.PARTIAL: _Words("partly done", "partly done", "partly done"),
    Stand.ESCALATED: _Words("needs a decision", "in need of a decision", "to be decided"),
    Stand.FAILED: _Words("failed", "failed", "failed"),
    Stand.CANCELLED: _Words("given up", "given up", "given up"),
}

#: Which are shown first where there are too many: what somebody would look for.
_FIRST: Final = (
    (Stand.WORKING, Stand.SENT, Stand.INBOX, Stand.OPENED, Stand.ENDED),
    (Stand.FAILED, Stand.ESCALATED, Stand.PARTIAL),
    (Stand.RETRY, Stand.READY),
    (Stand.BLOCKED,),
    (Stand.DONE, Stand.CANCELLED),
)
_RANKS: Final = {stand: rank for rank, stands in enumerate(_FIRST) for stand in stands}

# What HTML can't hold, or shows as nothing at all: each has a picture in Unicode, or none.
_UNSHOWABLE: Final = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")
# In a title or a label of SVG nothing keeps these from turning the order of what stands around them.
_TURNING: Final = re.compile(r"[\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")


class Gap(NamedTuple):
    """Steps in a row that are not shown: how many there are, and how many of what."""

    number: int
    parts: str


def page(scene: Scene, *, theme: str = "pet", live: bool = False) -> str:
    """The page of a plan, whole. The same scene gives the same page.

    Args:
        theme: ``pet`` or ``plain``.
        live: for the server: the page asks for what is new by itself. Otherwise it loads itself again every three
            seconds, while the plan is open.

    Raises:
        InvalidInput: there is no such theme, or the extra ``cockpit`` is not installed.
    """
    return _rendered(
        "page.html",
        theme,
        live=live,
        refresh=scene.is_open and not live,
        scene=scene,
        word=_PLAN_WORDS[scene.status],
        counts=[(stand, number, _WORDS[stand].many) for stand, number in scene.counts.items()],
        rows=_rows(scene.steps),
        picture=None if scene.is_chain else picture.draw(scene),
        largest=picture.MOST_STEPS,
    )


def plans(found: Sequence[Summary], *, theme: str = "pet") -> str:
    """The page that lists plans, for the server.

    Raises:
        InvalidInput: as :func:`page`.
    """
    shown = [(summary, address(summary.name), _PLAN_WORDS[summary.status]) for summary in found[:_MOST_PLANS]]
    return _rendered("plans.html", theme, live=True, refresh=False, found=shown, more=len(found) - len(shown))


def missing(*, theme: str = "pet") -> str:
    """The page that says that there is no such plan, for the server.

    Raises:
        InvalidInput: as :func:`page`.
    """
    return _rendered("missing.html", theme, live=True, refresh=False)


def address(name: str) -> str:
    """Where the server shows a plan. Browsers resolve two names by themselves, however they are written in a path."""
    if name in (".", ".."):
        return f"/plans/?name={name}"
    return f"/plans/{quote(name, safe='')}"


def policy(*, live: bool = False) -> str:
    """The Content-Security-Policy of a page, but for what only a header can say."""
    scripts = " ".join(f"'{_digest(script)}'" for script in _scripts(live))
    rules = [
        "default-src 'none'",
        f"style-src '{_digest(_file('style.css'))}'",
        f"script-src {scripts}",
        "img-src data:",
        *(["connect-src 'self'"] if live else []),
        "base-uri 'none'",
        "form-action 'none'",
    ]
    return "; ".join(rules)


def require_theme(theme: object) -> str:
    """A theme's name.

    Raises:
        InvalidInput: there is no such theme.
    """
    named = values.text(theme)
    if named not in THEMES:
        raise InvalidInput(f"a theme is one of: {', '.join(THEMES)}")
    return named


# -- what the templates ask -------------------------------------------------------------------------------


def _rows(steps: Sequence[Step]) -> list[Step | Gap]:
    """The steps to be shown, in order, with a gap for those in between that are not."""
    if len(steps) <= MOST_STEPS:
        return list(steps)
    # Of what is done the latest is of interest, of the rest what comes first.
    places = sorted(
        range(len(steps)),
        key=lambda place: (rank := _RANKS[steps[place].stand], -place if rank == len(_FIRST) - 1 else place),
    )
    shown = set(places[:MOST_STEPS])
    rows: list[Step | Gap] = []
    left_out: list[Step] = []
    for place, step in enumerate(steps):
        if place not in shown:
            left_out.append(step)
            continue
        if left_out:
            rows.append(_gap(left_out))
            left_out = []
        rows.append(step)
    if left_out:
        rows.append(_gap(left_out))
    return rows


def _gap(left_out: Sequence[Step]) -> Gap:
    numbers = dict.fromkeys(Stand, 0)
    for step in left_out:
        numbers[step.stand] += 1
    return Gap(
        len(left_out),
        ", ".join(f"{number:,} {_WORDS[stand].many}" for stand, number in numbers.items() if number),
    )


class _Instant(NamedTuple):
    """A time, for people and for programs; the latter is empty where no calendar reaches it."""

    text: str
    machine: str


def _instant(seconds: float) -> _Instant:
    try:
        moment = datetime.fromtimestamp(seconds, UTC)
    except (OverflowError, OSError, ValueError):
        return _Instant("a time beyond all calendars", "")
    return _Instant(f"{moment:%Y-%m-%d %H:%M:%S} UTC", f"{moment:%Y-%m-%dT%H:%M:%SZ}")


def _duration(seconds: float) -> str:
    """A length of time, in its two largest units."""
    if seconds < 10:
        return f"{max(0.0, seconds):.1f} s"
    whole = int(min(seconds, 1e12))
    days, hours, minutes = whole // 86400, whole // 3600 % 24, whole // 60 % 60
    if days:
        return f"{days:,} d {hours} h"
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {whole % 60} s" if minutes else f"{whole} s"


def _shown(value: Any) -> Any:
    """A text with what HTML can't hold shown as something that stands for it."""
    return _UNSHOWABLE.sub(_pictured, value) if type(value) is str else value


def _flat(text: str) -> str:
    """A text for where nothing keeps it apart from what stands around it."""
    return _TURNING.sub("\ufffd", _shown(text))


def _short(text: str, columns: int) -> str:
    """The beginning of a text, as much as fits into so many columns."""
    taken = 0
    for place, character in enumerate(text):
        taken += 2 if unicodedata.east_asian_width(character) in "WF" else 1
        if taken > columns:
            return f"{text[:place].rstrip()}…"
    return text


def _pictured(match: re.Match[str]) -> str:
    code = ord(match[0])
    if code == 0x7F:
        return "\u2421"
    return chr(0x2400 + code) if code < 0x20 else "\ufffd"


# -- templates --------------------------------------------------------------------------------------------


def _rendered(template: str, theme: str, *, live: bool, refresh: bool, **told: Any) -> str:
    named = require_theme(theme)
    return (
        _environment()
        .get_template(template)
        .render(
            theme=named,
            live=live,
            refresh=refresh,
            policy=policy(live=live),
            build=_build(named),
            icon=_icon(),
            scripts=_scripts(live),
            **told,
        )
    )


@cache
def _environment() -> jinja2.Environment:
    try:
        import jinja2
        from markupsafe import Markup
    except ImportError:
        raise InvalidInput("pages need an extra: pip install 'tsg-ledger[cockpit]'") from None
    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(_file),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        finalize=_shown,
        trim_blocks=True,
        lstrip_blocks=True,
        auto_reload=False,
    )
    environment.filters.update(flat=_flat, instant=_instant, duration=_duration, short=_short)
    environment.globals.update(
        words=_WORDS,
        most_named=_MOST_NAMED,
        width=picture.WIDTH,
        height=picture.HEIGHT,
        # Of ours, and not to be escaped: that would change what their digests are of.
        part=lambda name: Markup(_file(name)),  # noqa: S704
        code=Markup,
    )
    return environment


@cache
def _file(name: str) -> str:
    return files(__package__).joinpath("template", name).read_text(encoding="utf-8")


def _scripts(live: bool) -> tuple[str, ...]:
    return (_file("script.js"), _file("live.js")) if live else (_file("script.js"),)


@cache
def _digest(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


@cache
def _build(theme: str) -> str:
    """What tells whether an open page was built by another release, whose style and scripts are not these."""
    named: Iterable[str] = ("style.css", "script.js", "live.js", "frame.html", f"{theme}.svg")
    return hashlib.sha256("\0".join((theme, *map(_file, named))).encode()).hexdigest()[:16]


@cache
def _icon() -> str:
    return f"data:image/svg+xml,{quote(_file('icon.svg').strip())}"
