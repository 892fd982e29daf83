"""How many rounds the tests of faults make."""

from __future__ import annotations

import os

import pytest

#: More of them by TSG_FAULT_ROUNDS.
ROUNDS = int(os.environ.get("TSG_FAULT_ROUNDS", "300"))


@pytest.fixture(scope="session")
def rounds() -> int:
    return ROUNDS
