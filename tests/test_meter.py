"""A meter sees the time and the memory of its own stretch."""

from __future__ import annotations

import threading
import time

import numpy as np
import psutil
import pytest

from tc.meter import INTERVAL_S, Meter

SIZE = 200 * 10**6


def resident() -> int:
    return psutil.Process().memory_info().rss


def spin(seconds: float) -> None:
    """Works for a while."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        sum(range(1000))


def test_sees_an_allocation_that_is_gone_at_the_end() -> None:
    before = resident()
    with Meter() as meter:
        block = np.ones(SIZE, dtype=np.uint8)
        spin(6 * INTERVAL_S)
        del block
    assert before + 0.9 * SIZE < meter.peak_rss_bytes < before + 1.5 * SIZE
    # A later stretch is not charged with it, as the operating system's own peak would be.
    with Meter() as later:
        pass
    assert 0 < later.peak_rss_bytes < before + 0.5 * SIZE


def test_sees_what_is_held_at_the_end_of_a_short_stretch() -> None:
    before = resident()
    with Meter() as meter:
        block = np.ones(SIZE, dtype=np.uint8)
    assert meter.peak_rss_bytes > before + 0.9 * SIZE and block[0] == 1


def test_seconds() -> None:
    start = time.perf_counter()
    with Meter() as meter:
        spin(0.1)
    assert 0.1 <= meter.seconds <= time.perf_counter() - start
    assert meter.facts() == {
        "seconds": round(meter.seconds, 3),
        "peak_rss_bytes": meter.peak_rss_bytes,
    }


def test_an_error_passes_and_the_watch_ends() -> None:
    threads = threading.active_count()
    with pytest.raises(ValueError, match="mine"):
        with Meter() as meter:
            raise ValueError("mine")
    assert meter.seconds > 0 and meter.peak_rss_bytes > 0
    assert threading.active_count() == threads
