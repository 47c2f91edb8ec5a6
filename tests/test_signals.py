"""What ends a run early, told from what does not."""

from __future__ import annotations

import os
import signal

import pytest

from tc.signals import STOPPING, Interrupted, interrupt, interrupt_once, listen, listening

pytestmark = pytest.mark.usefixtures("signals_heard")


@pytest.mark.parametrize("number", STOPPING)
def test_a_signal_is_an_exception_that_names_it(number: signal.Signals) -> None:
    with pytest.raises(Interrupted, match=f"stopped by {number.name}; the same command"):
        with listening(interrupt):
            os.kill(os.getpid(), number)
    assert signal.getsignal(number) is signal.SIG_DFL


def test_while_it_tidies_up_only_ctrl_c_stops_it() -> None:
    listen(interrupt_once)
    with pytest.raises(Interrupted):
        os.kill(os.getpid(), signal.SIGTERM)
    for number in STOPPING:
        if number is not signal.SIGINT:
            os.kill(os.getpid(), number)
    with pytest.raises(Interrupted, match="SIGINT"):
        os.kill(os.getpid(), signal.SIGINT)


def test_what_is_ignored_stays_so() -> None:
    """As under nohup."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with listening(interrupt):
        os.kill(os.getpid(), signal.SIGHUP)
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN


def test_a_signal_that_another_process_got_has_no_name() -> None:
    assert str(Interrupted(0)) == "stopped; the same command continues where it was"
