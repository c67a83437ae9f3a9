"""A candidate whose results vary between calls is rejected only if the reference is deterministic."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mtmc_lsp.verify.cases import Case
from mtmc_lsp.verify.worker.observation.determinism import NUMBER, differing, not_explained

OWN = """import torch


# mtmc: x=f32[N,D] N=8 D=16
def both(x):
    return x.sum(0), x * 2
"""


def test_which_results_differ() -> None:
    first = [torch.ones(3), torch.tensor([float("nan")]), 7]
    assert differing(first, [torch.ones(3), torch.tensor([float("nan")]), 7]) == set()
    assert differing(first, [torch.zeros(3), torch.tensor([float("nan")]), 8]) == {0, 2}
    assert differing(first, first[:2]) == {NUMBER}


@pytest.mark.parametrize(("found", "left"), [([0], []), ([1], [1]), ([0, 1], [1]), ([NUMBER], [NUMBER]), ([], [])])
def test_what_the_users_own_code_gives_in_no_fixed_order_either_is_explained(
    judge: Any, found: list[int], left: list[int]
) -> None:
    capture = judge.capture(OWN, "both")
    turns = iter(range(100))

    def both(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        # As additions by atomics: now and then in another order.
        order = torch.arange(x.shape[0] - 1, -1, -1) if next(turns) == 2 else torch.arange(x.shape[0])
        total = torch.zeros(x.shape[1])
        for row in x[order]:
            total = total + row
        return total, x * 2

    inputs = {capture.graph.inputs[0].name: torch.randn(64, 16, generator=torch.Generator().manual_seed(1))}
    x = next(iter(inputs.values()))
    want = {"results": [sum(x[1:], x[0].clone()), x * 2], "after": {}}
    case = Case({"N": 64}, "normal", 3)
    module = SimpleNamespace(both=both)
    assert not_explained(found, module, capture, inputs, want, case) == left
