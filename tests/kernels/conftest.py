"""One observing worker for all tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.kernels.observing import Observing


@pytest.fixture(scope="session")
def observe(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Observing]:
    one = Observing(tmp_path_factory.mktemp("kernels"))
    yield one
    one.close()
