"""Without a network the hub's libraries use their cache, or fail at once."""

from __future__ import annotations

import datasets.config
import pytest
from huggingface_hub import constants

import tc.network
from tc.network import is_reachable, offline_if_unreachable


@pytest.fixture(autouse=True)
def _unasked(monkeypatch: pytest.MonkeyPatch) -> None:
    is_reachable.cache_clear()
    for module in (constants, datasets.config):
        monkeypatch.setattr(module, "HF_HUB_OFFLINE", False)


@pytest.mark.parametrize("reachable", [True, False])
def test_both_libraries_are_told_and_asked_back(
    reachable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tc.network, "is_reachable", lambda _: reachable)
    with offline_if_unreachable():
        assert [not reachable] * 2 == [constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE]
    assert not constants.HF_HUB_OFFLINE and not datasets.config.HF_HUB_OFFLINE


def test_who_is_offline_by_choice_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(tc.network, "is_reachable", None)
    with offline_if_unreachable():
        assert datasets.config.HF_HUB_OFFLINE


@pytest.mark.parametrize("proxy", [None, "http://proxy.example:3128"])
def test_the_host_is_asked_or_the_proxy_before_it(
    proxy: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def connection(address, timeout):
        asked.append(address)
        raise TimeoutError

    monkeypatch.setattr("socket.create_connection", connection)
    monkeypatch.setattr(tc.network, "getproxies", lambda: {"https": proxy} if proxy else {})
    assert not is_reachable("https://hub.example")
    assert not is_reachable("https://hub.example")
    assert asked == [("proxy.example", 3128) if proxy else ("hub.example", 443)]
