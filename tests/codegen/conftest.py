"""A checker that all codegen tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.codegen.checker import Checker


@pytest.fixture(scope="session")
def checker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Checker]:
    """Checks many small targets in long-lived workers."""
    shared_checker = Checker(tmp_path_factory.mktemp("checker"))
    yield shared_checker
    shared_checker.close()
