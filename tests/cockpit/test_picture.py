"""The picture of what waits for what, as geometry."""

from __future__ import annotations

import random
import re
from itertools import combinations

import pytest

from tests.cockpit.conftest import scene, step
from tsg.cockpit import picture
from tsg.cockpit.picture import HEIGHT, MOST_STEPS, WIDTH, Picture
from tsg.cockpit.scene import Scene, Stand


def of(edges: list[tuple[int, int]], many: int | None = None) -> Scene:
    number = many if many is not None else max(max(edge) for edge in edges) + 1
    return scene(*(step(f"T-{place}") for place in range(number)), edges=tuple(edges))


def drawn(edges: list[tuple[int, int]], many: int | None = None) -> Picture:
    found = picture.draw(of(edges, many))
    assert found is not None
    return found


def some_graph(seed: int) -> list[tuple[int, int]]:
    chance = random.Random(seed)
    number = chance.randrange(4, 30)
    pairs = list(combinations(range(number), 2))
    return sorted(chance.sample(pairs, min(len(pairs), chance.randrange(3, 45))), key=lambda edge: (edge[1], edge[0]))


@pytest.mark.parametrize("seed", range(25))
def test_each_step_stands_right_of_what_it_waits_for_and_no_two_boxes_touch(seed: int) -> None:
    edges = some_graph(seed)
    found = drawn(edges)
    left = {box.step.key: box.x for box in found.boxes}
    for blocker, waiting in edges:
        assert left[f"T-{blocker}"] + WIDTH < left[f"T-{waiting}"]
    for one, other in combinations(found.boxes, 2):
        assert abs(one.x - other.x) >= WIDTH or abs(one.y - other.y) > HEIGHT
    assert all(0 < box.x and box.x + WIDTH < found.width for box in found.boxes)
    assert all(0 < box.y and box.y + HEIGHT < found.height for box in found.boxes)


@pytest.mark.parametrize("seed", range(25))
def test_each_line_goes_from_one_box_to_the_other_and_past_all_others(seed: int) -> None:
    edges = some_graph(seed)
    found = drawn(edges)
    sides = {(box.x, box.y + HEIGHT // 2) for box in found.boxes}
    ends = set()
    for line in found.lines:
        numbers = [int(number) for number in re.findall(r"-?\d+", line.path)]
        start, end = (numbers[0] - WIDTH, numbers[1]), (numbers[-2], numbers[-1])
        assert {start, end} <= sides
        ends.add((start, end))
        # Where it is level inside a layer, no box is.
        for right in re.finditer(r"(\d+) (\d+)H(\d+)", line.path):
            level = int(right[2])
            for box in found.boxes:
                if box.x == int(right[1]):
                    assert not box.y <= level <= box.y + HEIGHT
    assert len(ends) == len(found.lines) == len(edges)


@pytest.mark.parametrize(
    "edges",
    [
        pytest.param([(0, 5), (1, 4), (2, 3)], id="the other way round"),
        pytest.param([(0, 3), (0, 4), (1, 2), (1, 5), (2, 6), (5, 6), (3, 7), (4, 7)], id="two diamonds"),
        pytest.param([(0, 1), (1, 2), (2, 3), (0, 3)], id="around a chain"),
    ],
)
def test_lines_that_need_not_cross_do_not(edges: list[tuple[int, int]]) -> None:
    found = picture._Layout(*_laid(edges))
    found.order()
    assert found._crossings() == 0


def _laid(edges: list[tuple[int, int]]) -> tuple[list[int], dict[int, int], list[tuple[int, int]]]:
    linked = sorted({place for edge in edges for place in edge})
    return linked, picture._layers(linked, edges), edges


def test_the_order_that_is_kept_never_crosses_more_than_the_first() -> None:
    better = 0
    for seed in range(40):
        found = picture._Layout(*_laid(some_graph(seed)))
        before = found._crossings()
        found.order()
        assert found._crossings() <= before
        better += found._crossings() < before
    assert better > 20


def test_the_same_plan_gives_the_same_picture() -> None:
    edges = some_graph(7)
    assert drawn(edges) == drawn(edges)


def test_what_is_done_is_an_open_way() -> None:
    made = scene(step("a", Stand.DONE), step("b"), step("c"), edges=((0, 2), (1, 2)))
    found = picture.draw(made)
    assert found is not None
    assert [line.is_open for line in found.lines] == [True, False]


def test_steps_that_have_nothing_to_do_with_others_are_counted_and_not_drawn() -> None:
    found = drawn([(0, 1), (0, 2)], many=10)
    assert (len(found.boxes), found.alone) == (3, 7)


def test_steps_that_wait_for_each_other_are_drawn_all_the_same() -> None:
    assert len(drawn([(0, 1), (1, 2), (2, 1), (2, 3)]).boxes) == 4


@pytest.mark.parametrize(
    "edges",
    [
        pytest.param([(0, place) for place in range(1, MOST_STEPS + 1)], id="steps"),
        pytest.param([(place, other) for place in range(60) for other in range(60, 120)], id="lines"),
    ],
)
def test_what_nobody_could_read_is_not_drawn(edges: list[tuple[int, int]]) -> None:
    assert picture.draw(of(edges)) is None


def test_as_many_steps_as_are_drawn_are_drawn() -> None:
    assert len(drawn([(0, place) for place in range(1, MOST_STEPS)]).boxes) == MOST_STEPS
