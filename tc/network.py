"""Whether the model hub can be reached, asked once and briefly."""

from __future__ import annotations

import functools
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

PATIENCE_S = 5.0


@contextmanager
def offline_if_unreachable() -> Iterator[None]:
    """Has the hub's libraries take what is in their cache, or fail at once, without a network.

    Of themselves they try five times, over half a minute, and tell of each.
    """
    from huggingface_hub import constants

    # The second one has a copy of its own, where it has been imported.
    modules: list[Any] = [constants]
    if "datasets.config" in sys.modules:
        modules.append(sys.modules["datasets.config"])
    before = [module.HF_HUB_OFFLINE for module in modules]
    unreachable = any(before) or not is_reachable(constants.ENDPOINT)
    try:
        for module in modules:
            module.HF_HUB_OFFLINE = unreachable
        yield
    finally:
        for module, value in zip(modules, before, strict=True):
            module.HF_HUB_OFFLINE = value


@functools.cache
def is_reachable(url: str) -> bool:
    """Whether a connection to the host of an address can be made, or to the proxy before it."""
    scheme = urlsplit(url).scheme
    target = urlsplit(getproxies().get(scheme, url))
    port = target.port or {"http": 80}.get(target.scheme, 443)
    try:
        with socket.create_connection((target.hostname or "", port), PATIENCE_S):
            return True
    except OSError:
        return False
