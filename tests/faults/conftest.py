"""What the tests of faults share: how many rounds they make, and processes to be killed."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.faults.writers import Zygote

#: More of them by TSG_FAULT_ROUNDS.
ROUNDS = int(os.environ.get("TSG_FAULT_ROUNDS", "300"))


@pytest.fixture(scope="session")
def rounds() -> int:
    return ROUNDS


@pytest.fixture(scope="module")
def warm_zygote() -> Iterator[Zygote]:
    made = Zygote()
    yield made
    made.close()


@pytest.fixture
def zygote(warm_zygote: Zygote) -> Iterator[Zygote]:
    yield warm_zygote
    warm_zygote.end_all()
