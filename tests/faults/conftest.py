"""What the tests of faults share: how many rounds they make, and whom they tell what came of it."""

from __future__ import annotations

import os

import pytest

from tests import tallies
from tests.tallies import Tally

#: How many rounds the tests with a number of them make; more by TSG_FAULT_ROUNDS.
ROUNDS = int(os.environ.get("TSG_FAULT_ROUNDS", "300"))


@pytest.fixture(scope="session")
def rounds() -> int:
    return ROUNDS


@pytest.fixture
def tally(request: pytest.FixtureRequest) -> Tally:
    return tallies.teller(request)
