"""A run after one of its steps was removed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from fakes import ENVIRONMENT, action, search
from landscapes import Landscape, explore

from mtmc_lsp.app.revisions.recompose import UNDONE, without_step
from mtmc_lsp.core.errors import RequestError
from mtmc_lsp.core.run import RunStatus, StepStatus
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
        removed = without_step(store, run, 2, UNDONE)
        assert removed is not None
        assert removed.is_verified
        left = store.result(removed.run)
    assert left is not None
    assert left.status is status
    assert bool(left.final.diff) is (status is RunStatus.IMPROVED), "without a gain, the own code is what is left"


def test_a_run_without_its_graph_is_not_written_again(tmp_path: Path) -> None:
    result = search([action(0, "better"), action(1, "better")])
    with Store(tmp_path) as store:
        run = store.begin("/project/model.py", "f", "hash", ENVIRONMENT)
        store.finish(replace(result, id=run))
        assert without_step(store, run, 1, UNDONE) is None
        with pytest.raises(RequestError, match="has no step 7 that was accepted"):
            without_step(store, run, 7, UNDONE)
        unfinished = store.begin("/project/model.py", "f", "hash", ENVIRONMENT)
        with pytest.raises(RequestError, match="is not finished"):
            without_step(store, unfinished, 1, UNDONE)


@pytest.mark.parametrize("kind", ["beam", "mcts"])
def test_the_last_step_of_a_path_is_removed_and_no_other_branch_takes_its_place(kind: str, tmp_path: Path) -> None:
    landscape = Landscape({"0": 80.0, "1": 90.0, "1+2": 60.0}, savings={0: 20.0})
    result = explore(kind, landscape)
    *_, first, last = [step for step in result.steps if step.status is StepStatus.ACCEPTED]
    assert first.action.region == ("n1",) and last.action.region == ("n2",)
    with Store(tmp_path) as store:
        run = store.begin("/project/model.py", "f", "hash", ENVIRONMENT)
        for step in result.steps:
            store.add_step(run, step)
        store.finish(replace(result, id=run))
        removed = without_step(store, run, last.index, UNDONE)
        assert removed is not None and removed.is_verified
        left = store.result(removed.run)
    assert left is not None and first.candidate is not None
    assert left.final.source == first.candidate.source
    statuses = {step.index: (step.status, step.is_alternative) for step in left.steps}
    assert statuses[last.index] == (StepStatus.REJECTED, False)
    assert [index for index, (status, _) in statuses.items() if status is StepStatus.ACCEPTED] == [first.index]
