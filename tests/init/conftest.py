"""The layers of every random teacher, calibrated once."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from init_helpers import PRESETS, Layer, calibrated, preset

from tc.config import InitConfig


@pytest.fixture(scope="session")
def layers(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[Layer]]:
    made: dict[str, list[Layer]] = {}

    def of(name: str) -> list[Layer]:
        if name not in made:
            made[name] = calibrated(name, tmp_path_factory.mktemp(name))
        return made[name]

    return of


@pytest.fixture(scope="session")
def presets() -> dict[str, InitConfig]:
    return {name: preset(name) for name in PRESETS}
