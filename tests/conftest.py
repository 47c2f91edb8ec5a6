"""What every test runs under."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest
import torch

from tc.signals import STOPPING


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    """One thread: on small tensors a second one only waits."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def signals_heard() -> Iterator[None]:
    """Whoever started the tests in the background of a shell had them ignore some signals."""
    before = {number: signal.signal(number, signal.SIG_DFL) for number in STOPPING}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)
