"""A run after its last step was undone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from fakes import ENVIRONMENT, action, search

from mtmc_lsp.app.review import undo_last
from mtmc_lsp.core.run import RunStatus
from mtmc_lsp.search.store import Store


@pytest.mark.parametrize(("first", "status"), [("better", RunStatus.IMPROVED), ("same", RunStatus.NO_GAIN)])
def test_a_base_to_tune_is_not_left_in_the_file(first: str, status: RunStatus, tmp_path: Path) -> None:
    result = search([action(0, first), action(1, "better")])
    assert result.status is RunStatus.IMPROVED
    with Store(tmp_path) as store:
        run = store.begin("/project/model.py", "f", "hash", ENVIRONMENT)
        for step in result.steps:
            store.add_step(run, step)
        store.finish(replace(result, id=run))
        left = store.result(undo_last(store, run, 2))
    assert left is not None
    assert left.status is status
    assert bool(left.final.diff) is (status is RunStatus.IMPROVED), "without a gain, the own code is what is left"
