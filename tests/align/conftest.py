"""A layer of each random teacher, calibrated once."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from align_helpers import Task, task


@pytest.fixture(scope="session")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Task]:
    made: dict[str, Task] = {}

    def of(name: str) -> Task:
        if name not in made:
            made[name] = task(name, tmp_path_factory.mktemp(name))
        return made[name]

    return of
