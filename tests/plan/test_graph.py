"""Pictures of plans: whatever a subject is, it shows, and it is nothing else."""

from __future__ import annotations

import html
import re
import subprocess
import time
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import debian
from tests.conftest import FakeClock
from tsg import InvalidInput, Plans
from tsg.plan.graph import render
from tsg.plan.reading import Edge, Graph, Node

FORMS = ("mermaid", "dot", "text")
STATUSES = ("pending", "in_progress", "completed", "partial", "escalated", "failed", "cancelled")

SUBJECTS = (
    'Say "hello"',
    '"',
    '""',
    "first\nsecond\r\nthird\rfourth",
    "a\n\nb\n",
    "<script>alert(1)</script>",
    '<img src=x onerror="alert(1)">',
    "back\\slash, at the end \\",
    '\\"',
    "\\n \\N \\G \\l",
    "semi;colon #35; #quot; &quot; &amp; &#60; &lt",
    "end",
    "subgraph end",
    "direction TB",
    "turn in direction\tLR now",
    "[x](y) {z} |w| (((v)))",
    '"]:::x\n  s0 --> s1\n  %% a comment',
    '%%{init: {"theme": "dark"}}%%',
    "%% a comment",
    "`code` **bold** _thin_ ~~gone~~ $$x^2$$",
    "1. a list\n- another\n# heading\n> said\n    code\n===\n---",
    "style a:#b;",
    "classDef a fill:#fff;",
    'click s0 "javascript:alert(1)"',
    "fa:fa-car www.example.com https://example.com a@example.com",
    "ﬂ°°60¶ß",
    "Straße, 100 °C, x--y a-b -c- d-",
    "   spaced   out   ",
    "日本語 😀 👩\u200d💻 e\u0301",
    "\u2028x\u2029y\u202ez\ufeff\u00a0",
    "C:\\new\\table\\",
    "a\tb",
    "\x00\x1b[31m\x7f\x85\x9f\ud800\uffff",
    "]; s0 -> s1; /* // #",
    "--->",
)


class Picture(NamedTuple):
    """What a drawing says: of each box its lines and its kind, and the arrows."""

    boxes: dict[str, tuple[list[str], str]]
    arrows: list[tuple[str, str]]


def chain(*subjects: str, status: str = "pending") -> Graph:
    """Each waits for the one before it."""
    nodes = tuple(
        Node(f"T-{number:03d}", subject, status, None, number == 1) for number, subject in enumerate(subjects, 1)
    )
    edges = tuple(Edge(first.key, second.key) for first, second in zip(nodes, nodes[1:], strict=False))
    return Graph("a plan", nodes, edges)


def shown(text: str) -> list[str]:
    """The lines of a text as they should show, with a picture for what none can show."""

    def picture(character: str) -> str:
        code = ord(character)
        if character in "\t\r\n" or not (code < 0x20 or 0x7F <= code < 0xA0 or 0xD800 <= code < 0xE000 or code in odd):
            return character
        return "\u2421" if code == 0x7F else chr(0x2400 + code) if code < 0x20 else "\ufffd"

    odd = (0xFFFE, 0xFFFF)
    return "".join(map(picture, text)).replace("\r\n", "\n").replace("\r", "\n").split("\n")


def labels(graph: Graph) -> list[list[str]]:
    return [
        [f"{node.key}, {'ready' if node.ready else node.status.replace('_', ' ')}", *shown(node.subject)]
        for node in graph.nodes
    ]


def read_mermaid(document: str) -> Picture:
    """As Mermaid reads it: it looks for directives, comments and directions anywhere, and marks entities first."""
    assert "%%" not in document
    assert re.search(r"direction\s+(TB|BT|RL|LR|TD)", document) is None
    marked = document
    for word in ("style", "classDef"):
        marked = re.sub(rf"{word}.*:\S*#.*;", lambda match: match[0][:-1], marked)
    marked = re.sub(r"#(\w+);", r"<\1>", marked, flags=re.ASCII)
    first, *lines = marked.removesuffix("\n").split("\n")
    assert first == "flowchart LR"
    picture = Picture({}, [])
    kinds = []
    for line in lines:
        if box := re.fullmatch(r'    (s\d+)\["([^"]*)"\]:::(\w+)', line):
            pieces = [html_of(piece) for piece in box[2].split("<br/>")]
            picture.boxes[box[1]] = (pieces, box[3])
        elif arrow := re.fullmatch(r"    (s\d+) --> (s\d+)", line):
            picture.arrows.append((arrow[1], arrow[2]))
        else:
            kind = re.fullmatch(r"    classDef (\w+) fill:#\w{6},stroke:#\w{6},color:#\w{6}", line)
            assert kind is not None, line
            kinds.append(kind[1])
    assert sorted(kinds) == sorted(STATUSES)
    return picture


def html_of(piece: str) -> str:
    """What a browser shows of a line in a label, in which nothing means anything to Markdown."""
    plain = re.sub(r"<\w+>", "", piece)
    assert re.search(r"[\x00-\x1f!\"#$%&()*+.:;<=>@\[\\\]^_`{|}~\u2028\u2029ﬂ¶]", plain) is None, plain
    assert re.search(r"(?<!\w)-|-(?!\w)", plain) is None, plain
    return re.sub(r"<(\w+)>", lambda match: html.unescape(f"&{'#' * match[1].isdigit()}{match[1]};"), piece)


def read_dot(document: str) -> Picture:
    """As Graphviz reads it."""
    string = r'"((?:[^"\\]|\\.)*)"'
    # What stands in strings may look like anything.
    assert re.fullmatch(r"[\w\s\[\]{},;=>-]*", re.sub(string, "", document))
    picture = Picture({}, [])
    for box in re.finditer(rf"^    (s\d+) \[label={string}, fillcolor={string}, color={string}\];$", document, re.M):
        lines = re.sub(r"\\(.)", lambda match: "\n" if match[1] == "n" else match[1], box[2]).split("\n")
        assert set(re.findall(r"\\(.)", box[2])) <= {"n", "\\", '"'}
        picture.boxes[box[1]] = ([html.unescape(line) for line in lines], box[3])
    for arrow in re.finditer(r"^    (s\d+) -> (s\d+);$", document, re.M):
        picture.arrows.append((arrow[1], arrow[2]))
    return picture


READERS: dict[str, Callable[[str], Picture]] = {"mermaid": read_mermaid, "dot": read_dot}


@pytest.mark.parametrize("form", READERS)
def test_every_subject_shows_as_the_characters_that_it_is(form: str) -> None:
    graph = chain(*SUBJECTS)
    picture = READERS[form](render(graph, form))
    assert list(picture.boxes) == [f"s{place}" for place in range(len(SUBJECTS))]
    assert [lines for lines, _ in picture.boxes.values()] == labels(graph)
    assert picture.arrows == [(f"s{place}", f"s{place + 1}") for place in range(len(SUBJECTS) - 1)]


@pytest.mark.parametrize("form", READERS)
@settings(deadline=None)
@given(subject=st.text(min_size=1))
def test_any_text_at_all_shows_as_the_characters_that_it_is(form: str, subject: str) -> None:
    graph = chain(subject, "the next")
    picture = READERS[form](render(graph, form))
    assert [lines for lines, _ in picture.boxes.values()] == labels(graph)
    assert picture.arrows == [("s0", "s1")]


def test_graphviz_itself_shows_every_subject() -> None:
    graph = chain(*SUBJECTS)._replace(plan='its "name"; & \\')
    program = debian.program("dot")
    drawn = subprocess.run(
        [program, "-Tsvg"], input=render(graph, "dot").encode(), capture_output=True, check=True, timeout=60
    )
    assert drawn.stderr == b""
    svg = "{http://www.w3.org/2000/svg}"
    root = ET.fromstring(drawn.stdout)

    def lines(group: ET.Element) -> list[str]:
        return [(text.text or "").replace("\u00a0", " ") for text in group.findall(f"{svg}text")]

    groups = list(root.iter(f"{svg}g"))
    boxes = [lines(group) for group in groups if group.get("class") == "node"]
    # A line with nothing in it takes its place, and has no text.
    expected = [[line.replace("\u00a0", " ") for line in label] for label in labels(graph)]
    assert [[line for line in box if line] for box in boxes] == [[line for line in label if line] for label in expected]
    assert [lines(group) for group in groups if group.get("class") == "graph"] == [['its "name"; & \\']]
    assert sum(group.get("class") == "edge" for group in groups) == len(SUBJECTS) - 1


@pytest.mark.parametrize("form", READERS)
@pytest.mark.parametrize("status", STATUSES)
def test_each_status_has_a_look_of_its_own_and_is_said_in_words(form: str, status: str) -> None:
    pictures = {other: READERS[form](render(chain("x", "y", status=other), form)).boxes["s1"] for other in STATUSES}
    assert pictures[status][0] == [f"T-002, {status.replace('_', ' ')}", "y"]
    assert Counter(look for _, look in pictures.values())[pictures[status][1]] == 1


def test_text_has_each_step_after_all_that_it_waits_for() -> None:
    nodes = tuple(Node(f"T-00{number}", f"step {number}", "pending", None, False) for number in range(1, 6))
    edges = (Edge("T-005", "T-001"), Edge("T-004", "T-005"), Edge("T-002", "T-003"), Edge("T-004", "T-001"))
    assert render(Graph("p", nodes, edges), "text").splitlines() == [
        "T-002  [pending]  step 2  blockedBy: []",
        "T-003  [pending]  step 3  blockedBy: [T-002]",
        "T-004  [pending]  step 4  blockedBy: []",
        "T-005  [pending]  step 5  blockedBy: [T-004]",
        "T-001  [pending]  step 1  blockedBy: [T-005, T-004]",
    ]


def test_text_stands_in_columns_whatever_the_width_of_its_characters() -> None:
    nodes = (
        Node("T-001", "Build", "in_progress", None, False),
        Node("T-1000", "日本", "pending", None, False),
        Node("T-1001", "e\u0301t\u00e9", "failed", None, False),
        Node("T-1002", "x" * 200, "failed", None, False),
    )
    assert render(Graph("p", nodes, ()), "text").splitlines() == [
        "T-001   [in_progress]  Build  blockedBy: []",
        "T-1000  [pending]      日本   blockedBy: []",
        "T-1001  [failed]       e\u0301t\u00e9    blockedBy: []",
        f"T-1002  [failed]       {'x' * 200}  blockedBy: []",
    ]


def test_text_does_nothing_to_a_terminal() -> None:
    lines = render(chain(*SUBJECTS), "text").split("\n")
    assert lines.pop() == ""
    assert len(lines) == len(SUBJECTS)
    assert not re.search(r"[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]", "".join(lines))
    assert r"\x00\x1b[31m\x7f\x85\x9f\ud800" in lines[SUBJECTS.index("\x00\x1b[31m\x7f\x85\x9f\ud800\uffff")]
    assert r"first\nsecond\r\nthird\rfourth" in lines[SUBJECTS.index("first\nsecond\r\nthird\rfourth")]
    # What does no harm stays as it is.
    assert "日本語 😀 👩\u200d💻 e\u0301" in lines[SUBJECTS.index("日本語 😀 👩\u200d💻 e\u0301")]


@settings(deadline=None)
@given(subject=st.text(min_size=1))
def test_text_has_one_line_a_step_whatever_the_subject(subject: str) -> None:
    text = render(chain(subject, "the next"), "text")
    assert len(text.splitlines()) == 2
    assert re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]", text) is None


@pytest.mark.parametrize("form", [None, "", "MERMAID", "svg", 3, b"dot"])
def test_another_form_is_refused(form: object) -> None:
    with pytest.raises(InvalidInput, match="mermaid, dot, text"):
        render(chain("x"), form)  # type: ignore[arg-type]


@pytest.mark.parametrize("form", FORMS)
def test_a_plan_without_steps_can_be_drawn(form: str) -> None:
    empty = render(Graph("p", (), ()), form)
    assert form == "text" or READERS[form](empty) == Picture({}, [])
    assert form != "text" or empty == ""


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("number", "deep"), [(5_000, True), (10_000, False)], ids=["deep", "wide"])
def test_a_large_plan_is_drawn_in_less_than_a_second(form: str, number: int, deep: bool) -> None:
    graph = chain(*['Do it; "now" & <here>'] * number)
    if not deep:
        first = graph.nodes[0].key
        graph = graph._replace(edges=tuple(Edge(first, node.key) for node in graph.nodes[1:]))
    started = time.process_time()
    drawn = render(graph, form)
    assert time.process_time() - started < 1
    assert drawn.count("T-") >= number
    if form == "text":
        assert [line.split()[0] for line in drawn.splitlines()] == [node.key for node in graph.nodes]


@pytest.mark.parametrize("form", FORMS)
def test_a_deep_plan_that_stands_the_other_way_round_is_drawn_too(form: str) -> None:
    graph = chain(*["x"] * 5_000)
    backwards = graph._replace(edges=tuple(Edge(edge.step, edge.blocker) for edge in graph.edges))
    drawn = render(backwards, form)
    if form == "text":
        assert [line.split()[0] for line in drawn.splitlines()] == [node.key for node in reversed(graph.nodes)]
    else:
        assert READERS[form](drawn).arrows == [(f"s{place + 1}", f"s{place}") for place in range(4_999)]


def test_steps_that_wait_for_each_other_are_not_missing_from_the_text() -> None:
    graph = chain("a", "b", "c")
    damaged = graph._replace(edges=(Edge("T-001", "T-002"), Edge("T-002", "T-001")))
    assert [line.split()[0] for line in render(damaged, "text").splitlines()] == ["T-003", "T-001", "T-002"]


@pytest.mark.parametrize("form", FORMS)
def test_the_picture_of_a_plan_is_that_of_its_steps(plans: Plans, clock: FakeClock, form: str) -> None:
    plans.create("a plan")
    for subject in ("Build", "Test", "Gone", "Deploy"):
        plans.add_step("a plan", subject=subject)
    plans.update("a plan", "T-002", blocked_by=["T-001", "T-003"])
    plans.update("a plan", "T-004", blocked_by=["T-002"])
    plans.delete("a plan", "T-003")
    plans.start("a plan", "T-001", agent="ada")
    drawn = render(plans.graph("a plan"), form)
    assert drawn == render(plans.graph("a plan"), form)
    if form == "text":
        assert drawn == (
            "T-001  [in_progress]  Build   blockedBy: []\n"
            "T-002  [pending]      Test    blockedBy: [T-001]\n"
            "T-004  [pending]      Deploy  blockedBy: [T-002]\n"
        )
        return
    picture = READERS[form](drawn)
    assert [lines for lines, _ in picture.boxes.values()] == [
        ["T-001, in progress", "Build"],
        ["T-002, pending", "Test"],
        ["T-004, pending", "Deploy"],
    ]
    assert picture.arrows == [("s0", "s1"), ("s1", "s2")]
