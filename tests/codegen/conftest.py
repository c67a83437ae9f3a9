"""One checker for all tests of the coder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.codegen.checker import Checker


@pytest.fixture(scope="session")
def checker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Checker]:
    """Checks many small targets in two workers."""
    made = Checker(tmp_path_factory.mktemp("checker"))
    yield made
    made.close()
