"""The picture of a plan, drawn in a language that others turn into one, or as text for a terminal.

Subjects hold any text. In each form they show as the characters that they are, and nothing in them is read as part of
the drawing; only what no form can show, control characters and halves of pairs, is shown as something that stands for
it. The same graph gives the same text.
"""

from __future__ import annotations

import heapq
import re
import unicodedata
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final

from tsg import values
from tsg.errors import InvalidInput
from tsg.plan.reading import Graph, Node
from tsg.plan.scheduling import StepStatus

__all__ = ["render"]

#: Of each status the colours of a step's box and of its edge.
_COLOURS: Final[Mapping[str, tuple[str, str]]] = MappingProxyType(
    {
        StepStatus.PENDING.value: ("#f4f4f5", "#71717a"),
        StepStatus.IN_PROGRESS.value: ("#dbeafe", "#2563eb"),
        StepStatus.COMPLETED.value: ("#dcfce7", "#16a34a"),
        StepStatus.PARTIAL.value: ("#fef9c3", "#a16207"),
        StepStatus.ESCALATED.value: ("#ffedd5", "#ea580c"),
        StepStatus.FAILED.value: ("#fee2e2", "#dc2626"),
        StepStatus.CANCELLED.value: ("#e4e4e7", "#a1a1aa"),
    }
)
#: Columns of a terminal up to which subjects are filled up, so that what they wait for stands below each other.
_WIDEST_SUBJECT: Final = 60

# What neither HTML nor XML can hold.
_UNSHOWABLE: Final = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")
_LINE_END: Final = re.compile(r"\r\n?")
# All but what means nothing to Mermaid (which looks for directions in labels too), to the Markdown in its labels, and
# to the marks by which it keeps entities.
_NOT_PLAIN: Final = re.compile(
    r"""[\x00-\x1f!-&(-+.:->@\[-`{-~\x7f-\xa0\u00b6\u200b-\u206f\ufb02\ufeff]"""
    r"""|(?<![^\W_])-|-(?![^\W_])|(?<=direction)\s"""
)
# What moves a terminal's cursor, ends its line or turns the order of what it shows.
_UNSAFE: Final = re.compile(r"[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def render(graph: Graph, form: str) -> str:
    """A plan's picture.

    Args:
        graph: what :meth:`tsg.Plans.graph` answers.
        form: ``mermaid``, ``dot`` (Graphviz), or ``text``: a step a line, each after all that it waits for.

    Raises:
        InvalidInput: there is no such form.
    """
    if not values.is_a(graph, Graph):
        raise InvalidInput("a plan's picture is drawn of its Graph")
    draw = _FORMS.get(values.text(form) or "")
    if draw is None:
        raise InvalidInput(f"a plan is drawn as one of: {', '.join(_FORMS)}")
    return "".join(f"{line}\n" for line in draw(graph))


def _mermaid(graph: Graph) -> list[str]:
    places = _places(graph)
    boxes = [
        f'    s{place}["{"<br/>".join(map(_mermaid_text, _label(node)))}"]:::{node.status}'
        for place, node in enumerate(graph.nodes)
    ]
    arrows = [f"    s{places[edge.blocker]} --> s{places[edge.step]}" for edge in graph.edges]
    classes = [
        f"    classDef {status} fill:{fill},stroke:{stroke},color:#18181b"
        for status, (fill, stroke) in _COLOURS.items()
    ]
    return ["flowchart LR", *boxes, *arrows, *classes]


def _dot(graph: Graph) -> list[str]:
    places = _places(graph)
    boxes = []
    for place, node in enumerate(graph.nodes):
        fill, stroke = _COLOURS[node.status]
        label = r"\n".join(map(_dot_text, _label(node)))
        boxes.append(f'    s{place} [label="{label}", fillcolor="{fill}", color="{stroke}"];')
    arrows = [f"    s{places[edge.blocker]} -> s{places[edge.step]};" for edge in graph.edges]
    # Not as the graph's name: there a backslash is kept as it is, and can't stand at the end.
    name = r"\n".join(map(_dot_text, _lines(graph.plan)))
    return [
        "digraph plan {",
        f'    graph [rankdir="LR", label="{name}", labelloc="t"];',
        '    node [shape="box", style="rounded,filled", fontcolor="#18181b"];',
        *boxes,
        *arrows,
        "}",
    ]


def _text(graph: Graph) -> list[str]:
    places = _places(graph)
    blockers: list[list[str]] = [[] for _ in graph.nodes]
    for edge in graph.edges:
        blockers[places[edge.step]].append(edge.blocker)
    rows = []
    for place in _in_order(graph, places):
        node = graph.nodes[place]
        subject = _UNSAFE.sub(_escaped, node.subject)
        rows.append((node.key, f"[{node.status}]", subject, _width(subject), ", ".join(blockers[place])))
    keys = max((len(row[0]) for row in rows), default=0)
    statuses = max((len(row[1]) for row in rows), default=0)
    subjects = max((row[3] for row in rows if row[3] <= _WIDEST_SUBJECT), default=0)
    return [
        f"{key:{keys}}  {status:{statuses}}  {subject}{' ' * (subjects - width)}  blockedBy: [{waits}]"
        for key, status, subject, width, waits in rows
    ]


_FORMS: Final[Mapping[str, Callable[[Graph], list[str]]]] = MappingProxyType(
    {"mermaid": _mermaid, "dot": _dot, "text": _text}
)


def _places(graph: Graph) -> dict[str, int]:
    return {node.key: place for place, node in enumerate(graph.nodes)}


def _in_order(graph: Graph, places: Mapping[str, int]) -> list[int]:
    """Each step after all that it waits for, and otherwise in order of creation."""
    waiting = [0] * len(graph.nodes)
    dependents: list[list[int]] = [[] for _ in graph.nodes]
    for edge in graph.edges:
        waiting[places[edge.step]] += 1
        dependents[places[edge.blocker]].append(places[edge.step])
    free = [place for place, number in enumerate(waiting) if not number]
    found: list[int] = []
    while free:
        place = heapq.heappop(free)
        found.append(place)
        for dependent in dependents[place]:
            waiting[dependent] -= 1
            if not waiting[dependent]:
                heapq.heappush(free, dependent)
    # Steps that wait for each other are doctor's to tell of; here they only must not be missing.
    return [*found, *(place for place, number in enumerate(waiting) if number)]


def _label(node: Node) -> list[str]:
    """The lines of a step's box."""
    status = "ready" if node.ready else node.status.replace("_", " ")
    return [f"{node.key}, {status}", *_lines(node.subject)]


def _lines(text: str) -> list[str]:
    return _LINE_END.sub("\n", _UNSHOWABLE.sub(_pictured, text)).split("\n")


def _pictured(match: re.Match[str]) -> str:
    """The picture that Unicode has of a control character, or else the character for what can't be shown."""
    code = ord(match[0])
    if code == 0x7F:
        return "\u2421"
    return chr(0x2400 + code) if code < 0x20 else "\ufffd"


def _mermaid_text(line: str) -> str:
    # Mermaid's entities are HTML's, with another character before them.
    return _NOT_PLAIN.sub(lambda match: "#quot;" if match[0] == '"' else f"#{ord(match[0])};", line)


def _dot_text(line: str) -> str:
    # Graphviz reads HTML's entities in labels.
    return line.replace("&", "&amp;").replace("\\", r"\\").replace('"', r"\"")


def _escaped(match: re.Match[str]) -> str:
    return match[0].encode("unicode_escape", "backslashreplace").decode("ascii")


def _width(text: str) -> int:
    """How many columns of a terminal a text takes."""
    if text.isascii():
        return len(text)
    return sum(
        0 if unicodedata.combining(character) else 2 if unicodedata.east_asian_width(character) in "WF" else 1
        for character in text
    )
