"""Copies of a module that was constructed once: as if each had been constructed anew."""

from __future__ import annotations

import threading

import pytest
import torch

from mtmc_lsp.verify.worker.inputs import convert_to_float64
from mtmc_lsp.verify.worker.instances import instance_of


class Counting(torch.nn.Module):
    made = 0

    def __init__(self, width: int) -> None:
        super().__init__()
        Counting.made += 1
        self.linear = torch.nn.Linear(width, width)
        self.register_buffer("seen", torch.zeros(width))
        self.calls = [0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls[0] += 1
        self.seen += 1
        return self.linear(x)


class Locked(Counting):
    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.lock = threading.Lock()


def test_a_module_is_constructed_once_for_the_same_arguments() -> None:
    Counting.made = 0
    first, second = (instance_of(Counting, [7], {}, "cpu", replaced=["linear.weight"]) for _ in range(2))
    assert Counting.made == 1
    instance_of(Counting, [], {"width": 7}, "cpu", replaced=[])
    instance_of(Counting, [8], {}, "cpu", replaced=[])
    assert Counting.made == 3
    assert torch.equal(first.linear.weight, second.linear.weight)


def test_what_one_copy_does_to_itself_no_other_sees() -> None:
    first, second = (instance_of(Counting, [5], {}, "cpu", replaced=["linear.weight"]) for _ in range(2))
    first(torch.ones(5))
    with torch.no_grad():
        first.linear.bias.zero_()
    # What is replaced, as the caller said it would be.
    first.linear._parameters["weight"] = torch.nn.Parameter(torch.zeros(5, 5))
    assert second.calls == [0]
    assert not second.seen.any()
    assert second.linear.bias.any()
    assert second.linear.weight.any()


def test_another_dtype_of_one_copy_leaves_the_others_alone() -> None:
    first, second = (instance_of(Counting, [6], {}, "cpu", replaced=["linear.weight", "seen"]) for _ in range(2))
    first.double()
    assert {p.dtype for p in (*second.parameters(), *second.buffers())} == {torch.float32}


def test_large_tensors_that_are_replaced_take_no_memory_of_their_own() -> None:
    first, second = (instance_of(Counting, [9], {}, "cpu", replaced=["linear.weight"]) for _ in range(2))
    assert first.linear.weight.data_ptr() == second.linear.weight.data_ptr()
    assert first.linear.bias.data_ptr() != second.linear.bias.data_ptr()


def test_what_cannot_be_copied_is_constructed_each_time() -> None:
    Counting.made = 0
    first, second = (instance_of(Locked, [4], {}, "cpu", replaced=[]) for _ in range(2))
    assert first is not second
    assert Counting.made >= 2


@pytest.mark.parametrize("held", ["closure", "default", "hook"])
def test_what_holds_functions_that_use_itself_is_constructed_each_time(held: str) -> None:
    """A copy of a function is the function: in a copy of the module it would use the original's parameters."""

    class Calling(Counting):
        def __init__(self, width: int) -> None:
            super().__init__(width)
            if held == "closure":
                self.act = lambda x: self.linear(x)
            elif held == "default":
                self.acts = {"first": [lambda x, own=self.linear: own(x)]}
            else:
                self.linear.register_forward_hook(lambda module, given, made: made + self.linear.bias)

    Counting.made = 0
    first, second = (instance_of(Calling, [3], {}, "cpu", replaced=[]) for _ in range(2))
    assert first is not second
    assert Counting.made >= 2


def test_constructor_arguments_that_are_tensors_are_not_compared_but_constructed_with() -> None:
    class Holding(torch.nn.Module):
        def __init__(self, scale: torch.Tensor) -> None:
            super().__init__()
            self.scale = scale

    scales = [torch.full((2,), float(i)) for i in range(2)]
    made = [instance_of(Holding, [scale], {}, "cpu", replaced=[]) for scale in scales]
    assert [float(module.scale[0]) for module in made] == [0.0, 1.0]


class Held(torch.nn.Module):
    """Registers a parameter and a buffer that cases replace, and others that they do not."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(3, 2)
        self.norm = torch.nn.BatchNorm1d(2)
        self.frozen = torch.nn.Parameter(torch.ones(2), requires_grad=False)
        self.tied = self.linear.weight


def test_conversion_to_float64_leaves_out_what_is_replaced() -> None:
    instance, other = Held(), Held()
    replaced = {id(instance.linear.weight), id(instance.norm.running_mean)}
    weight, mean = instance.linear.weight.data_ptr(), instance.norm.running_mean
    convert_to_float64(instance, replaced)
    assert instance.linear.weight.data_ptr() == weight and instance.norm.running_mean is mean
    assert mean is not None and mean.dtype == instance.linear.weight.dtype == torch.float32
    converted = dict(other.double().state_dict())
    for name, value in instance.state_dict().items():
        if name not in ("linear.weight", "tied", "norm.running_mean"):
            assert value.dtype == converted[name].dtype, name
    assert instance.tied is instance.linear.weight and not instance.frozen.requires_grad
    assert instance.norm.num_batches_tracked is not None
    assert instance.norm.num_batches_tracked.dtype == torch.int64


def test_a_module_that_converts_itself_does_so() -> None:
    instance = torch.nn.Sequential(torch.nn.LSTM(3, 2), torch.nn.Linear(2, 2))
    convert_to_float64(instance, {id(instance[1].weight)})
    assert {value.dtype for value in instance.state_dict().values()} == {torch.float64}
    assert {weight.dtype for weight in instance[0]._flat_weights} == {torch.float64}
