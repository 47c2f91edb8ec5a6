"""Signals that end a run early: each is one exception, so that what is half written goes away."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)
"""Ctrl-C, what a scheduler sends before it takes a machine away, and a terminal that is closed."""

STATUS = 130
"""The exit status of a run that a signal ended, whichever it was."""

Handler = Callable[[int, FrameType | None], object]


class Interrupted(KeyboardInterrupt):
    """A signal came; whatever was finished is kept.

    Args:
        number: of the signal; 0 where another process of the run got it.
    """

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number

    def __str__(self) -> str:
        by = f" by {name_of(self.number)}" if self.number else ""
        return f"stopped{by}; the same command continues where it was"


def name_of(number: int) -> str:
    """What a signal is called, such as `SIGTERM`; `a signal` for 0."""
    return signal.Signals(number).name if number else "a signal"


def interrupt(number: int, frame: FrameType | None = None) -> None:
    """Ends what runs now; a handler for `listen`.

    Raises:
        Interrupted: always.
    """
    raise Interrupted(number)


def interrupt_once(number: int, frame: FrameType | None = None) -> None:
    """Ends what runs now, and lets it tidy up: only Ctrl-C can end that.

    Schedulers send a signal more than once, to a process and to its parents, which pass it on.

    Raises:
        Interrupted: always.
    """
    for other in STOPPING:
        if other is not signal.SIGINT:
            signal.signal(other, signal.SIG_IGN)
    raise Interrupted(number)


def listen(handler: Handler) -> dict[signal.Signals, object]:
    """Has a handler called for every signal that ends a run.

    Those that whoever started this process had it ignore stay ignored, as `nohup` does to SIGHUP.

    Returns:
        The handlers before, by signal.
    """
    heard = [n for n in STOPPING if signal.getsignal(n) is not signal.SIG_IGN]
    return {number: signal.signal(number, handler) for number in heard}


@contextmanager
def listening(handler: Handler) -> Iterator[None]:
    """Has a handler called for every signal that ends a run, and puts back those before it."""
    before = listen(handler)
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)  # type: ignore[arg-type]
