"""How often each fault was tried, and what was lost: told by the tests, printed as a table at the end of a run."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest

#: How many rounds the tests with a number of them make; more by TSG_FAULT_ROUNDS.
ROUNDS = int(os.environ.get("TSG_FAULT_ROUNDS", "300"))

_TALLY = "fault"

#: Called with a fault in words, how often it was tried, and how often something was lost or wrong.
Tally = Callable[[str, int, int], None]


@pytest.fixture(scope="session")
def rounds() -> int:
    return ROUNDS


@pytest.fixture
def tally(request: pytest.FixtureRequest) -> Tally:
    def tell(fault: str, tried: int, lost: int) -> None:
        request.node.user_properties.append((_TALLY, (fault, tried, lost)))

    return tell


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    rows: dict[tuple[str, str], list[int]] = {}
    for reports in terminalreporter.stats.values():
        for report in reports:
            for name, value in getattr(report, "user_properties", ()):
                if name == _TALLY and report.when == "call":
                    row = rows.setdefault((value[0], report.nodeid.partition("::")[0]), [0, 0])
                    row[0] += value[1]
                    row[1] += value[2]
    if rows:
        terminalreporter.section("faults")
        terminalreporter.line("| fault | tried | lost | repeat |\n|---|--:|--:|---|")
        for (fault, file), (tried, lost) in sorted(rows.items()):
            terminalreporter.line(f"| {fault} | {tried:,} | {lost:,} | `make test TESTS={file}` |")
