"""The picture of what waits for what: where each step's box stands, and which way each line goes.

Layers from left to right: a step stands right of all that it waits for. Inside a layer steps are ordered by the middle
of their neighbours, back and forth, so that few lines cross (Sugiyama's method); a line that spans several layers goes
through a place of its own in each of them, and around the boxes. The same scene gives the same picture.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Sequence
from itertools import pairwise
from typing import Final, NamedTuple

from tsg.cockpit.scene import Scene, Step

__all__ = ["MOST_STEPS", "Box", "Line", "Picture", "draw"]

#: The most steps that a picture shows, and the most places that their lines go through.
MOST_STEPS: Final = 200
_MOST_PLACES: Final = 1500

# In CSS pixels.
WIDTH: Final = 190
HEIGHT: Final = 56
_ACROSS: Final = 48
_BETWEEN: Final = 18
#: What a line needs that passes between boxes.
_LANE: Final = 14
_MARGIN: Final = 12

_SWEEPS: Final = 12


class Box(NamedTuple):
    """A step, with its upper left corner."""

    step: Step
    x: int
    y: int


class Line(NamedTuple):
    """From a step to one that waits for it, as the data of an SVG path; and whether the first is completed."""

    path: str
    is_open: bool


class Picture(NamedTuple):
    """What is drawn, and how large it is.

    Attributes:
        alone: how many steps are not drawn, since nothing waits for them and they wait for nothing.
    """

    boxes: tuple[Box, ...]
    lines: tuple[Line, ...]
    width: int
    height: int
    alone: int


def draw(scene: Scene) -> Picture | None:
    """The picture of a plan's dependencies; ``None`` where it would be too large to read."""
    linked = sorted({place for edge in scene.edges for place in edge})
    if len(linked) > MOST_STEPS:
        return None
    layer_of = _layers(linked, scene.edges)
    spans = sum(abs(layer_of[step] - layer_of[blocker]) for blocker, step in scene.edges)
    if spans > _MOST_PLACES:
        return None
    layout = _Layout(linked, layer_of, scene.edges)
    layout.order()
    tops = layout.heights()
    boxes = {place: Box(scene.steps[place], _left(layer_of[place]), tops[place]) for place in linked}
    lines = tuple(
        Line(_path(layout, tops, way), scene.steps[way[0]].stand == "done")
        for way in sorted(layout.ways, key=lambda way: (way[0], way[-1]))
    )
    return Picture(
        boxes=tuple(boxes[place] for place in linked),
        lines=lines,
        width=_left(max(layer_of.values(), default=0)) + WIDTH + _MARGIN,
        height=max((box.y for box in boxes.values()), default=0) + HEIGHT + _MARGIN,
        alone=scene.total - len(linked),
    )


def _left(layer: int) -> int:
    return _MARGIN + layer * (WIDTH + _ACROSS)


def _layers(linked: Sequence[int], edges: Sequence[tuple[int, int]]) -> dict[int, int]:
    """Of each step the layer, which is right of all that it waits for."""
    waiting = dict.fromkeys(linked, 0)
    dependents: dict[int, list[int]] = {place: [] for place in linked}
    for blocker, step in edges:
        waiting[step] += 1
        dependents[blocker].append(step)
    layer_of = dict.fromkeys(linked, 0)
    free = [place for place in linked if not waiting[place]]
    for place in free:
        for step in dependents[place]:
            layer_of[step] = max(layer_of[step], layer_of[place] + 1)
            waiting[step] -= 1
            if not waiting[step]:
                free.append(step)
    # Steps that wait for each other are doctor's to tell of; here they only must not be missing.
    return layer_of


class _Layout:
    """The places in each layer, in order. A step's place is its number; one of a line has a negative number.

    Attributes:
        ways: of each line the places that it goes through.
        row: of each place the number that it has in its layer.
    """

    def __init__(self, linked: Sequence[int], layer_of: dict[int, int], edges: Sequence[tuple[int, int]]) -> None:
        self.layer_of = dict(layer_of)
        self.layers: list[list[int]] = [[] for _ in range(max(layer_of.values(), default=0) + 1)]
        for place in linked:
            self.layers[layer_of[place]].append(place)
        self.before: dict[int, list[int]] = {place: [] for place in linked}
        self.after: dict[int, list[int]] = {place: [] for place in linked}
        self.ways: list[list[int]] = []
        for blocker, step in edges:
            self._lead(blocker, step)
        self.row = {place: number for layer in self.layers for number, place in enumerate(layer)}

    def _lead(self, blocker: int, step: int) -> None:
        way = [blocker]
        for layer in range(self.layer_of[blocker] + 1, self.layer_of[step]):
            lane = -len(self.layer_of) - 1
            self.layer_of[lane] = layer
            self.layers[layer].append(lane)
            self.before[lane], self.after[lane] = [], []
            way.append(lane)
        way.append(step)
        for left, right in pairwise(way):
            self.after[left].append(right)
            self.before[right].append(left)
        self.ways.append(way)

    def order(self) -> None:
        """Order each layer by its neighbours, and keep what had the fewest crossings."""
        best, fewest = [list(layer) for layer in self.layers], self._crossings()
        for sweep in range(_SWEEPS):
            forward = sweep % 2 == 0
            near = self.before if forward else self.after
            for layer in self.layers if forward else reversed(self.layers):
                self._order_layer(layer, near)
            crossings = self._crossings()
            if crossings < fewest:
                best, fewest = [list(layer) for layer in self.layers], crossings
        self.layers = best

    def _order_layer(self, layer: list[int], near: dict[int, list[int]]) -> None:
        row = self.row
        middle = {
            place: sum(row[other] for other in near[place]) / len(near[place]) if near[place] else float(row[place])
            for place in layer
        }
        layer.sort(key=middle.__getitem__)
        row.update((place, number) for number, place in enumerate(layer))

    def _crossings(self) -> int:
        """How many pairs of lines cross, layer by layer."""
        found = 0
        for layer, right in pairwise(self.layers):
            row = {place: number for number, place in enumerate(right)}
            ends: list[int] = []
            for place in layer:
                targets = [row[other] for other in self.after[place] if other in row]
                found += sum(len(ends) - bisect_right(ends, target) for target in targets)
                for target in targets:
                    insort(ends, target)
        return found

    def heights(self) -> dict[int, int]:
        """Of each place its upper edge: as near to its neighbours as the order and the room between allow."""
        middle: dict[int, float] = {}
        for layer in self.layers:
            middle.update(zip(layer, self._packed(layer, [0.0] * len(layer)), strict=True))
        for sweep in range(_SWEEPS):
            forward = sweep % 2 == 0
            for layer in self.layers if forward else reversed(self.layers):
                wanted = [self._wanted(place, middle, forward) for place in layer]
                middle.update(zip(layer, self._packed(layer, wanted), strict=True))
        tops = {place: value - _tall(place) / 2 for place, value in middle.items()}
        least = min(tops.values(), default=0.0)
        return {place: round(top - least) + _MARGIN for place, top in tops.items()}

    def _wanted(self, place: int, middle: dict[int, float], forward: bool) -> float:
        neighbours = (self.before if forward else self.after)[place] or [*self.before[place], *self.after[place]]
        return sum(middle[other] for other in neighbours) / len(neighbours)

    def _packed(self, layer: Sequence[int], wanted: Sequence[float]) -> list[float]:
        """The middles nearest to those wanted with room between them: blocks that push each other share the way."""
        offsets: list[float] = []
        for number, place in enumerate(layer):
            room = (_tall(layer[number - 1]) + _tall(place)) / 2 + _BETWEEN if number else 0.0
            offsets.append((offsets[-1] if offsets else 0.0) + room)
        blocks: list[tuple[float, int]] = []
        for value, offset in zip(wanted, offsets, strict=True):
            total, size = value - offset, 1
            while blocks and blocks[-1][0] / blocks[-1][1] > total / size:
                last, members = blocks.pop()
                total, size = total + last, size + members
            blocks.append((total, size))
        starts = [total / size for total, size in blocks for _ in range(size)]
        return [start + offset for start, offset in zip(starts, offsets, strict=True)]


def _tall(place: int) -> int:
    return HEIGHT if place >= 0 else _LANE


def _path(layout: _Layout, tops: dict[int, int], way: Sequence[int]) -> str:
    """A line from the right edge of a box, level through the layers between, to the left edge of another."""
    levels = [tops[place] + _tall(place) // 2 for place in way]
    drawn = f"M{_left(layout.layer_of[way[0]]) + WIDTH} {levels[0]}"
    for number, place in enumerate(way[1:], start=1):
        left, came, level = _left(layout.layer_of[place]), levels[number - 1], levels[number]
        bend = left - _ACROSS // 2
        drawn += f"C{bend} {came} {bend} {level} {left} {level}"
        if place < 0:
            drawn += f"H{left + WIDTH}"
    return drawn
