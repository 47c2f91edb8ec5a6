"""Wall time and peak memory of a stretch of work, and the median time of calls."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any

import psutil

INTERVAL_S = 0.05


class Meter:
    """Measures what happens inside `with Meter() as meter:`.

    Attributes:
        peak_rss_bytes: the largest resident memory of this process that was seen, by looking every
            50 ms (the operating system's own peak covers the whole life of a process, not a stage).
    """

    def __init__(self) -> None:
        self._start = self._seconds = 0.0
        self.peak_rss_bytes = 0
        self._process = psutil.Process()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Meter:
        self._start = time.perf_counter()
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stop.set()
        self._thread.join()
        self._look()
        self._seconds = time.perf_counter() - self._start

    @property
    def seconds(self) -> float:
        """Wall time, so far or in all."""
        return self._seconds or time.perf_counter() - self._start

    def facts(self) -> dict[str, float | int]:
        """Both figures under the names that metrics have."""
        return {"seconds": round(self.seconds, 3), "peak_rss_bytes": self.peak_rss_bytes}

    def _watch(self) -> None:
        while not self._stop.wait(INTERVAL_S):
            self._look()

    def _look(self) -> None:
        self.peak_rss_bytes = max(self.peak_rss_bytes, self._process.memory_info().rss)


def median_seconds(
    calls: Mapping[str, Callable[[], Any]], repeats: int, warm_up: int = 1
) -> dict[str, float]:
    """The median wall time of each call, taken in turns: a busy moment of the machine meets all."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(warm_up + repeats):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            times[name].append(time.perf_counter() - start)
    return {name: statistics.median(seen[warm_up:]) for name, seen in times.items()}
