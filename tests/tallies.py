"""How often each fault was tried, and what was lost: told by the tests, gathered from all workers as a table."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import pytest

_NAME = "fault"

#: Called with a fault in words, how often it was tried, and how often something was lost or wrong.
Tally = Callable[[str, int, int], None]


def teller(request: pytest.FixtureRequest) -> Tally:
    """What a test tells of its faults with."""

    def tell(fault: str, tried: int, lost: int) -> None:
        request.node.user_properties.append((_NAME, (fault, tried, lost)))

    return tell


def table(reports: Iterable[object]) -> Iterator[str]:
    """The lines of a table in Markdown; none where no fault was told of."""
    rows: dict[tuple[str, str], list[int]] = {}
    for report in reports:
        for name, value in getattr(report, "user_properties", ()):
            if name == _NAME and isinstance(report, pytest.TestReport) and report.when == "call":
                row = rows.setdefault((value[0], report.nodeid.partition("::")[0]), [0, 0])
                row[0] += value[1]
                row[1] += value[2]
    if rows:
        yield "| fault | tried | lost | repeat |"
        yield "|---|--:|--:|---|"
    for (fault, file), (tried, lost) in sorted(rows.items()):
        yield f"| {fault} | {tried:,} | {lost:,} | `make test TESTS={file}` |"
