"""Labels and indices of all cases are valid, so that no call of the user's code ends in a device-side assert."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch

from mtmc_lsp.capture.index_bounds import index_bounds
from mtmc_lsp.capture.worker.calls import build_call
from mtmc_lsp.capture.worker.user_module import load_user_module
from mtmc_lsp.core.errors import RequestError
from mtmc_lsp.core.workload import Capture
from mtmc_lsp.verify.cases import VALUES, verification_cases
from mtmc_lsp.verify.worker.inputs import make_inputs

USES: dict[str, tuple[str, str, tuple[int, ...]]] = {
    "labels": ("x=f32[B,C] i=i64[B] B=40 C=10", "F.cross_entropy(x, i)", (-100,)),
    "a class that is ignored": ("x=f32[B,C] i=i64[B] B=40 C=10", "F.cross_entropy(x, i, ignore_index=-1)", (-1,)),
    "shifted labels": (
        "x=f32[B,9,C] i=i64[B,9] B=8 C=10",
        "F.cross_entropy(x[:, :-1].flatten(0, 1), i[:, 1:].flatten(), ignore_index=-7)",
        (-7,),
    ),
    "labels with a mask": (
        "x=f32[B,C] i=i64[B]@-100..9 B=40 C=10",
        "x.gather(1, i.clamp(min=0)[:, None])[:, 0] * (i != -100)",
        (-100,),
    ),
    "an embedding": ("x=f32[V,10] i=i32[B,T]@0..19 V=20 B=4 T=10", "F.embedding(i, x)", ()),
    "an embedding in two steps": ("x=f32[V,10] i=i64[B,T] V=20 B=4 T=10", "x[i.view(-1)].view(*i.shape, 10)", ()),
    "pairs": ("x=f32[B,C] i=i64[B] B=16 C=10", "x[torch.arange(len(i)), i] * 2", ()),
    "scatter": ("x=f32[B,C] i=i64[B,1] B=16 C=10", "torch.zeros_like(x).scatter(1, i, 1.0) + x", ()),
    "rows": ("x=f32[B,C] i=i64[N] B=16 C=10 N=20", "torch.index_select(x, 0, i) + 1", ()),
    "one hot": ("x=f32[B,6] i=i64[B] B=16", "F.one_hot(i, 6) * x", ()),
}


def inputs_of(capture: Capture, case: Any) -> dict[str, torch.Tensor]:
    module = load_user_module(capture.workload.target.path, None, capture.module_name, in_place=True)
    call = build_call(module, capture.workload, "cpu", {**capture.workload.sizes}, values=False)
    return make_inputs(capture, call, case.sizes, case.distribution, case.seed, "cpu")


@pytest.mark.parametrize("name", USES)
def test_every_case_has_valid_indices_and_some_of_the_values_that_are_ignored(name: str, captured) -> None:
    """The user's code itself is the judge: on a CPU it raises an error for an index outside its dimension."""
    workload, expression, others = USES[name]
    text = f"import torch\nimport torch.nn.functional as F\n# mtmc: {workload}\ndef f(x, i):\n    return {expression}\n"
    if "-100..9" in workload:
        text = text.replace("@-100..9", "@0..9")
    capture = captured(text, "f")
    assert index_bounds(capture.graph)["i"].others == others
    module = load_user_module(capture.workload.target.path, None, capture.module_name, in_place=True)
    largest = []
    for case in verification_cases(capture, interpreted=True, seed=3):
        if case.kind != VALUES:
            continue
        if not all(case.sizes.values()):
            # Either valid, or the case is left out.
            with contextlib.suppress(RequestError):
                tensors = inputs_of(capture, case)
                module.f(tensors["x"], tensors["i"])
            continue
        tensors = inputs_of(capture, case)
        module.f(tensors["x"], tensors["i"])
        if tensors["i"].numel() >= 16:
            largest.append(int(tensors["i"].max()))
            assert set(tensors["i"][tensors["i"] < 0].tolist()) <= set(others)
    assert max(largest) > 1, "all indices occur, not just 0 and 1"


def test_a_range_down_to_an_ignored_value_stands_for_that_value_and_the_classes(captured) -> None:
    """Recorded calls and ``get_inputs`` give the least and the greatest label, such as -100 and 9."""
    text = """import torch
import torch.nn.functional as F
def get_inputs():
    labels = torch.arange(40) % 10
    labels[::4] = -100
    return [torch.randn(40, 10), labels]
def get_init_inputs():
    return []
class Model(torch.nn.Module):
    def forward(self, x, labels):
        return F.cross_entropy(x, labels)
"""
    capture = captured(text, "Model")
    values = set[int]()
    for case in verification_cases(capture, interpreted=True, seed=3):
        values |= set(inputs_of(capture, case)["labels"].tolist())
    assert values == {-100, *range(10)}


def test_an_index_that_is_computed_has_no_known_bounds(captured) -> None:
    text = "import torch\n# mtmc: x=f32[B,C] i=i64[B] B=16 C=10\ndef f(x, i):\n    return x.gather(1, (2 * i + 1)[:, None])\n"
    assert index_bounds(captured(text, "f").graph) == {}
