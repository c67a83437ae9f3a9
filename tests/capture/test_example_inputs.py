"""Example inputs of a target: with values, or with shapes only."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

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


def call_of(get_inputs, *, values: bool) -> Call:
    module = SimpleNamespace(Model=Model, get_inputs=get_inputs)
    return build_call(module, WORKLOAD, "cpu", {}, values=values)


def test_inputs_without_values_take_no_memory() -> None:
    """With values, they would take 400 GB."""
    call = call_of(lambda: [torch.rand(100_000, 1_000_000), torch.randint(0, 9, (3,)), 0.5], values=False)
    x, index, factor = call.values
    assert (x.shape, x.dtype) == ((100_000, 1_000_000), torch.float32)
    assert x.untyped_storage().nbytes() == 4
    assert (index.shape, index.dtype, factor) == ((3,), torch.int64, 0.5)


def test_the_module_is_the_same_with_and_without_values() -> None:
    with_and_without = [
        call_of(lambda: [torch.rand(8), torch.zeros(2), 2.0], values=values) for values in (True, False)
    ]
    assert torch.equal(with_and_without[0].instance.weight, with_and_without[1].instance.weight)
    assert float(with_and_without[0].values[0].sum()) > 0


def test_directive_inputs_without_values_take_no_memory() -> None:
    """Generating the values on a CPU took two thirds of the verification time of an 8192 x 8192 matmul."""
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


@pytest.mark.parametrize("case", ["a value", "a tensor from outside"])
def test_inputs_that_need_values_have_values(case: str) -> None:
    outside = torch.ones(3)
    get_inputs = {
        "a value": lambda: [torch.ones(3) * torch.ones(1).item(), outside, 1.0],
        "a tensor from outside": lambda: [outside + 0, outside, 1.0],
    }
    assert torch.equal(call_of(get_inputs[case], values=False).values[0], torch.ones(3))


def test_large_inputs_are_generated_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "MANY_ELEMENTS", 100)

    def devices(make: Callable[[], list[Any]]) -> list[str]:
        return [value.device.type for value in calls._generated(make, "meta")]

    assert devices(lambda: [torch.full((20, 10), 7.0).t(), torch.arange(9)]) == ["meta", "meta"]
    assert devices(lambda: [torch.rand(9)]) == ["cpu"], "small inputs are quick to create"
    assert devices(lambda: [torch.tensor(torch.rand(200).tolist())]) == ["cpu"], "values cannot be read on this device"
