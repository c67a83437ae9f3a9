"""Why a guard refuses a call, in the user's words."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from mtmc_lsp.guard.worker.observed_calls import Decision, explain

TEXT = """
import torch
from torch import nn

SLOPE = 0.5


def scaled(x):
    return x * SLOPE


# mtmc: x=f32[B,16] pair=(f32[B,16],f32[16]) B=4
class Block(nn.Module):
    def __init__(self, mode="tanh"):
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.steps = nn.ModuleList([nn.SiLU(), nn.GELU()])
        self.drop = nn.Dropout(0.5)
        self.mode = mode

    def forward(self, x, pair, *, sizes=(1, 2), bias=None):
        shift, gain = pair
        x = self.norm(x) + shift
        for step in self.steps:
            x = step(x)
        x = scaled(self.drop(x)) * gain + sizes[0]
        return torch.tanh(x) if self.mode == "tanh" else x


# mtmc: x=f32[N,M]{1,N} mask=f32[N,M]{0,1} out=f32[N,M] N=6 M=8
def strided(x, mask, out):
    out.mul_(2.0).add_(x * mask)
    return out
"""


def block(module: ModuleType) -> tuple[Any, list[Any], dict[str, Any]]:
    item = module.Block().eval()
    return item, [torch.ones(3, 16), (torch.ones(3, 16), torch.ones(16))], {"sizes": (1, 2), "bias": None}


def with_x(make: Callable[[], Any]) -> Callable[[Any, list[Any], dict[str, Any]], None]:
    def change(item: Any, arguments: list[Any], named: dict[str, Any]) -> None:
        arguments[0] = make()

    return change


def with_pair(*tensors: Any) -> Callable[[Any, list[Any], dict[str, Any]], None]:
    def change(item: Any, arguments: list[Any], named: dict[str, Any]) -> None:
        arguments[1] = tensors

    return change


def named(name: str, value: object) -> Callable[[Any, list[Any], dict[str, Any]], None]:
    return lambda item, arguments, values: values.update({name: value})


def to_item(change: Callable[[Any], object]) -> Callable[[Any, list[Any], dict[str, Any]], None]:
    return lambda item, arguments, values: change(item)


REASONS: list[tuple[Callable[[Any, list[Any], dict[str, Any]], Any], str]] = [
    (with_x(lambda: torch.ones(3, 16).half()), "x is float16; the kernels were made for float32"),
    (with_x(lambda: [1.0]), "x is a list, not a tensor"),
    (with_x(lambda: torch.ones(2, 3, 16)), "x has 3 dimensions; the kernels were made for 2"),
    (with_x(lambda: torch.ones(3, 8)), "x.shape[1] is 8; the kernels were made for 16"),
    (with_x(lambda: torch.ones(0, 16)), "x has no elements"),
    (
        with_x(lambda: torch.ones(16, 3).t()),
        "x is not contiguous (shape (3, 16), strides (1, 3)); the kernels were made for a contiguous one",
    ),
    (with_x(lambda: torch.ones(3, 16, device="meta")), "x is on meta; the kernels run on a GPU"),
    (with_x(lambda: torch.ones(3, 16).to_sparse()), "x is sparse; the kernels were made for dense tensors"),
    (
        with_pair(torch.ones(5, 16), torch.ones(16)),
        "pair[0] has the shape (5, 16) and x (3, 16); the kernels were made for equal shapes",
    ),
    (with_pair(torch.ones(3, 16), torch.ones(9)), "pair[1] has the shape (9,); the kernels were made for (16,)"),
    (with_pair(torch.ones(3, 16)), "len(pair) is 1; the kernels were made for 2"),
    (
        lambda item, arguments, values: arguments.__setitem__(1, list(arguments[1])),
        "pair is a list; the kernels were made for a tuple",
    ),
    (named("sizes", (1, 3)), "sizes is (1, 3); the kernels were made for [1, 2]"),
    (named("bias", 2.0), "bias is 2.0; the kernels were made for None"),
    (
        to_item(lambda m: m.drop.train()),
        "self.drop is in training mode; the kernels were made for evaluation mode: call .eval() before",
    ),
    (to_item(lambda m: setattr(m, "mode", "none")), "self.mode is 'none'; the kernels were made for 'tanh'"),
    (to_item(lambda m: setattr(m.norm, "eps", 1e-3)), "self.norm.eps is 0.001; the kernels were made for 1e-05"),
    (to_item(lambda m: m.steps.append(nn.Tanh())), "self.steps has 3 modules; the kernels were made for 2"),
    (
        to_item(lambda m: m.steps.__setitem__(1, nn.Tanh())),
        "self.steps[1] is a Tanh; the kernels were made for torch.nn.GELU",
    ),
    (
        to_item(lambda m: m.norm.register_forward_hook(lambda *_: None)),
        "self.norm has hooks, which the kernels would not call",
    ),
    (to_item(lambda m: setattr(m.norm, "forward", torch.sin)), "forward of self.norm is replaced"),
    (
        to_item(lambda m: setattr(m, "__class__", type("Wrapped", (type(m),), {}))),
        "self is a Wrapped; the kernels were made for a Block",
    ),
    (
        to_item(lambda m: setattr(m.norm, "weight", nn.Parameter(torch.ones(16).double()))),
        "self.norm.weight is float64; the kernels were made for float32",
    ),
]


@pytest.mark.parametrize(("change", "reason"), REASONS, ids=[reason for _, reason in REASONS])
def test_the_reason_names_the_argument_and_both_values(
    load: Callable[[str, str], ModuleType], change: Callable[[Any, list[Any], dict[str, Any]], Any], reason: str
) -> None:
    module = load(TEXT, "Block")
    item, arguments, values = block(module)
    with torch.no_grad():
        assert module.block_fits(item, *arguments, **values), (
            "the captured call, from which each case differs in one thing"
        )
        change(item, arguments, values)
        assert not module.block_fits(item, *arguments, **values)
        assert explain(module.block_fits, (item, *arguments), values).reason == reason


def decided(module: ModuleType) -> Decision:
    item, arguments, values = block(module)
    return explain(module.block_fits, (item, *arguments), values)


def test_a_call_that_records_gradients_is_told_how_to_avoid_it(load: Callable[[str, str], ModuleType]) -> None:
    decision = decided(load(TEXT, "Block"))
    assert decision.reason == (
        "gradients are recorded for self.norm.weight, self.norm.bias: "
        "call it under torch.no_grad() or torch.inference_mode()"
    )


@torch.no_grad()
def test_autocast_and_tracing_are_named(
    load: Callable[[str, str], ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    module = load(TEXT, "Block")
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda: True)
    assert decided(module).reason == "autocast is on; the kernels were made for calls without it"
    monkeypatch.undo()
    item, arguments, values = block(module)
    seen: list[str] = []

    def traced(x: torch.Tensor) -> torch.Tensor:
        seen.append(explain(module.block_fits, (item, x, arguments[1]), values).reason)
        return x * 2

    torch.vmap(traced)(torch.ones(2, 3, 16))
    assert "vmap" in seen[0]


@torch.no_grad()
def test_a_changed_global_and_changed_code_are_named(
    load: Callable[[str, str], ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    module = load(TEXT, "Block")
    monkeypatch.setattr(module, "SLOPE", 0.25)
    assert decided(module).reason == "SLOPE is 0.25; the kernels were made for 0.5"
    monkeypatch.undo()
    monkeypatch.setattr(module, "scaled", lambda x: x)
    assert decided(module).reason == ("the code of scaled changed since the kernels were made: run mtmc optimize again")
    monkeypatch.undo()
    monkeypatch.delattr(module, "scaled")
    assert decided(module).reason.startswith("`_has_source(scaled")


@torch.no_grad()
def test_strides_and_shared_memory_are_named(load: Callable[[str, str], ModuleType]) -> None:
    module = load(TEXT, "strided")
    x, mask, out = torch.ones(8, 6).t(), torch.ones(1, 8).expand(6, 8), torch.ones(6, 8)

    def reason(*arguments: torch.Tensor) -> str:
        return explain(module.strided_fits, arguments, {}).reason

    assert module.strided_fits(x, mask, out)
    assert reason(torch.ones(6, 8), mask, out) == (
        "x has the strides (8, 1); the kernels were made for stride 1 in dimension 0"
    )
    assert reason(x, torch.ones(6, 8), out) == (
        "mask has the strides (8, 1); the kernels were made for stride 0 in dimension 0"
    )
    memory = torch.ones(48)
    assert reason(memory.view(8, 6).t(), mask, memory.view(6, 8)) == (
        "out is written and shares memory with another of out, x, mask"
    )


@torch.no_grad()
def test_a_batch_of_one_may_have_any_stride(load: Callable[[str, str], ModuleType]) -> None:
    """``expand`` leaves the stride of a dimension that already has its size."""
    module = load(TEXT, "strided")
    x, out = torch.ones(8, 1).t(), torch.ones(1, 8)
    for mask in (torch.ones(1, 8), torch.ones(1, 8).expand(1, 8), torch.ones(3, 24)[:1, :8]):
        assert module.strided_fits(x, mask, out)
    assert not module.strided_fits(x, torch.ones(1, 16)[:, ::2], out), "the stride of a longer dimension counts"


GROUPED = """
import torch
from torch import nn


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.gain = 2.0
        self.norm = nn.LayerNorm(12)

    def forward(self, x):
        return torch.relu(self.norm(x)) * self.gain + x


# mtmc: x=f32[B,12] B=4
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*[Layer() for _ in range(5)])

    def forward(self, x):
        return self.layers(x)
"""


@torch.no_grad()
def test_one_of_many_modules_is_named(load: Callable[[str, str], ModuleType]) -> None:
    """A guard of many tensors checks groups of them by helpers, and reads the dictionaries of modules."""
    module, x = load(GROUPED, "Net"), torch.ones(3, 12)

    def reason(change: Callable[[Any], object]) -> str:
        net = module.Net()
        change(net)
        assert module.net_fits(net, x) is None
        return explain(module.net_fits, (net, x), {}).reason

    assert reason(lambda net: setattr(net.layers[3], "gain", 3.0)) == (
        "self.layers[3].gain is 3.0; the kernels were made for 2.0"
    )
    wide = nn.Parameter(torch.ones(13))
    assert reason(lambda net: setattr(net.layers[2].norm, "weight", wide)) == (
        "self.layers[2].norm.weight has the shape (13,); the kernels were made for (12,)"
    )
    transposed = nn.Parameter(torch.ones(24)[::2])
    assert reason(lambda net: setattr(net.layers[1].norm, "bias", transposed)) == (
        "self.layers[1].norm.bias is not contiguous (shape (12,), strides (2,)); "
        "the kernels were made for a contiguous one"
    )
    assert "self.layers[4].norm is None" in reason(lambda net: setattr(net.layers[4], "norm", None))
    assert reason(lambda net: setattr(net.layers[4], "norm", nn.Identity())) == (
        "self.layers[4].norm is an Identity; the kernels were made for torch.nn.LayerNorm"
    )
    assert reason(lambda net: net.layers[2].norm.register_forward_hook(lambda *_: None)) == (
        "self.layers[2].norm has hooks, which the kernels would not call"
    )
    assert reason(lambda net: setattr(net.layers[1], "forward", torch.relu)) == (
        "forward of self.layers[1] is replaced"
    )
    assert (
        reason(lambda net: net.layers.append(module.Layer()))
        == "self.layers has 6 modules; the kernels were made for 5"
    )
    reordered = reason(lambda net: net.layers._modules.__setitem__("0", net.layers._modules.pop("0")))
    assert reordered == "the modules of self.layers are in another order"
