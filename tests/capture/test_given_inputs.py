"""A target's arguments: with their values, or with their shapes alone where others replace them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from mtmc_lsp.capture.worker import calls
from mtmc_lsp.capture.worker.calls import Call, build_call
from mtmc_lsp.core.sizes import Size
from mtmc_lsp.core.workload import ArgumentSpec, Target, TargetKind, TensorSpec, Workload, WorkloadSource

WORKLOAD = Workload(Target("/project/model.py", "Model", TargetKind.MODULE, 1, 2), WorkloadSource.GET_INPUTS)


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.rand(4))

    def forward(self, x: torch.Tensor, index: torch.Tensor, factor: float) -> torch.Tensor:
        return x * factor


def built(get_inputs, *, values: bool) -> Call:
    module = SimpleNamespace(Model=Model, get_inputs=get_inputs)
    return build_call(module, WORKLOAD, "cpu", {}, values=values)


def test_without_values_gigabytes_of_arguments_are_shapes_that_take_no_memory() -> None:
    """These would be 400 GB."""
    call = built(lambda: [torch.rand(100_000, 1_000_000), torch.randint(0, 9, (3,)), 0.5], values=False)
    x, index, factor = call.values
    assert (x.shape, x.dtype) == ((100_000, 1_000_000), torch.float32)
    assert x.untyped_storage().nbytes() == 4
    assert (index.shape, index.dtype, factor) == ((3,), torch.int64, 0.5)


def test_the_module_is_the_same_with_and_without_values() -> None:
    made = [built(lambda: [torch.rand(8), torch.zeros(2), 2.0], values=values) for values in (True, False)]
    assert torch.equal(made[0].instance.weight, made[1].instance.weight)
    assert float(made[0].values[0].sum()) > 0


def test_without_values_what_a_directive_describes_is_a_shape_that_takes_no_memory() -> None:
    """Drawn on a CPU for each case, it took two thirds of the time of verifying a product of 8192 x 8192 matrices."""
    x = TensorSpec((Size.symbol("N"), Size.of(1_000_000)), "bfloat16", low=0.0, high=1.0)
    arguments = (ArgumentSpec("x", tensor=x), ArgumentSpec("index", constant=0), ArgumentSpec("factor", constant=0.5))
    workload = Workload(WORKLOAD.target, WorkloadSource.DIRECTIVE, arguments)
    module = SimpleNamespace(Model=Model)
    call = build_call(module, workload, "cpu", {"N": 100_000}, values=False)
    assert (call.values[0].shape, call.values[0].dtype) == ((100_000, 1_000_000), torch.bfloat16)
    assert call.values[0].untyped_storage().nbytes() == 2
    assert call.values[1:] == (0, 0.5)
    read = build_call(module, workload, "cpu", {"N": 2}, values=False, read={"x"}).values[0]
    drawn = build_call(module, workload, "cpu", {"N": 2}).values[0]
    assert torch.equal(read, drawn)
    assert 0.0 <= drawn.min() < drawn.max() <= 1.0


@pytest.mark.parametrize("what", ["a value", "a tensor from outside"])
def test_inputs_that_depend_on_values_are_made_in_full(what: str) -> None:
    outside = torch.ones(3)
    makes = {
        "a value": lambda: [torch.ones(3) * torch.ones(1).item(), outside, 1.0],
        "a tensor from outside": lambda: [outside + 0, outside, 1.0],
    }
    assert torch.equal(built(makes[what], values=False).values[0], torch.ones(3))


def test_gigabytes_of_floats_have_a_stand_in_on_the_device_and_integers_never(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "MANY", 100)
    made = calls._stand_ins(lambda: [torch.full((20, 10), 7.0).t(), 0.5], "cpu")
    assert made == [], "a CPU draws them no faster"
    x, factor = calls._stand_ins(lambda: [torch.full((20, 10), 7.0).t(), 0.5], "meta")
    assert (x.shape, x.stride(), x.device.type, factor) == ((10, 20), (1, 10), "meta", 0.5)
    assert calls._stand_ins(lambda: [torch.rand(20, 10), torch.arange(9)], "meta") == [], "integers may be indices"
    assert calls._stand_ins(lambda: [torch.rand(9)], "meta") == [], "few are made as they are"


SIGNS = {
    "torch.rand(9, 30)": True,
    "torch.rand(30, 9).T": True,
    "torch.rand(9, 30) * torch.rand(())": True,
    "(torch.rand(9, 30) * 2 + 1).half().contiguous()": True,
    "torch.randn(9, 30).softmax(-1)": True,
    "torch.rand(30, 9).transpose(-1, -2)": True,
    "torch.rand(9, 30, 2).mean(-1)": True,
    "torch.rand(9, 30).add(torch.rand(9, 30), alpha=-1)": False,
    "torch.randn(9, 30, 2).mean(-1)": False,
    "torch.randn(9, 30)": False,
    "torch.rand(9, 30) - 0.5": False,
    "-torch.rand(9, 30)": False,
    "torch.rand(9, 30).sub_(1)": False,
    "shown(torch.rand(270))": False,
}


def shown(x: torch.Tensor) -> torch.Tensor:
    """Another view of what is then changed in place."""
    other = x.view(9, 30)
    x.sub_(1)
    return other


@pytest.mark.parametrize("text", SIGNS)
def test_a_stand_in_has_the_signs_of_the_users_own(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The planner sums what is never negative more carefully, and looks for that at the values."""
    monkeypatch.setattr(calls, "MANY", 100)
    (made,) = calls._stand_ins(lambda: [eval(text)], "cpu:0")
    assert bool((made >= 0).all()) is SIGNS[text]
