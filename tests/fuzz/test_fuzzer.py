"""The coverage-guided fuzzer finds nothing in its targets, and does find what is planted for it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import find_spec

import pytest

from tests.tallies import Tally

#: Seconds for each target, with another seed in every run; by default one, and always the same seed.
SECONDS = float(os.environ.get("TSG_FUZZ_SECONDS", "0"))

#: The least that each target must have been called in its time, however slow the machine.
LEAST = {"values": 1_000, "places": 1_000, "verbs": 100, "command_line": 20, "damage": 10, "schema": 10}

pytestmark = pytest.mark.skipif(find_spec("atheris") is None, reason="atheris is not made for this Python or system")


@pytest.fixture(scope="module")
def printed() -> dict[str, tuple[int, str]]:
    """The exit status of each target, and what was printed; all are forks of one process."""
    seconds, seed = (str(int(SECONDS)), str(int.from_bytes(os.urandom(3)))) if SECONDS else ("1", "1")
    command = [sys.executable, "-m", "tests.fuzz.fuzzer", "--seconds", seconds, "--seed", seed]
    command += [word for target in (*LEAST, "planted") for word in ("--target", target)]
    ran = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False, timeout=300 + 20 * SECONDS
    )
    text = ran.stdout.decode(errors="replace")
    parts = re.findall(r"^== target (\w+)\n(.*?)^== status (-?\d+)$", text, re.MULTILINE | re.DOTALL)
    assert [target for target, *_ in parts] == [*LEAST, "planted"], text[-4000:]
    # What is planted is a finding.
    assert ran.returncode == 1
    return {target: (int(status), told) for target, told, status in parts}


def executions(told: str) -> int:
    found = re.search(r"number_of_executed_units: (\d+)", told)
    assert found is not None, told[-3000:]
    return int(found[1])


@pytest.mark.parametrize("target", LEAST)
def test_nothing_but_errors_of_ours_comes_out_of_what_a_fuzzer_makes(
    printed: dict[str, tuple[int, str]],
    target: str,
    tally: Tally,
) -> None:
    status, told = printed[target]
    tally(f"fuzzed bytes: {target.replace('_', ' ')}", executions(told), int(status != 0))
    assert status == 0, told[-4000:]
    assert executions(told) >= LEAST[target]


def test_the_fuzzer_finds_a_bug_that_is_planted(printed: dict[str, tuple[int, str]]) -> None:
    status, told = printed["planted"]
    assert status == 77, told[-3000:]
    assert "RuntimeError: planted" in told
