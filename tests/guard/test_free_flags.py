"""Flags and modes that do not influence the result are not conditions of the guard; all others are."""

from __future__ import annotations

from collections.abc import Callable
from subprocess import CompletedProcess
from types import ModuleType
from typing import Any

import pytest
import torch

from mtmc_lsp.core.workload import Capture

TEXT = """
import torch
import torch.nn.functional as F
from torch import nn


class Attention(nn.Module):
    def __init__(self, p):
        super().__init__()
        self.p = p
        self.qkv = nn.Linear(16, 48)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        p = self.p if self.training else 0.0
        return F.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None], dropout_p=p)[:, 0]


def drop_path(x, p, training):
    return x if p == 0.0 or not training else F.dropout(x, p)


class DropPath(nn.Module):
    def __init__(self, p):
        super().__init__()
        self.p = p

    def forward(self, x):
        return drop_path(x, self.p, self.training)


# mtmc: x=f32[B,T,16] B=2 T=5
class Block(nn.Module):
    def __init__(self, p=0.0):
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.attention = Attention(p)
        self.drop = nn.Dropout(p)
        self.path = DropPath(p)

    def forward(self, x):
        return torch.tanh(x + self.path(self.drop(self.attention(self.norm(x)))))


# mtmc: x=f32[B,16] B=4
class Eval(nn.Module):
    def __init__(self):
        super().__init__()
        self.drop = nn.Dropout(0.3)
        self.norm = nn.BatchNorm1d(16)

    def forward(self, x):
        return torch.relu(self.norm(self.drop(x)))


class Noisy(nn.Dropout):
    def forward(self, x):
        return super().forward(x) + 1 if self.training else x


# mtmc: x=f32[B,16] B=4
class Subclass(nn.Module):
    def __init__(self):
        super().__init__()
        self.drop = Noisy(0.0)

    def forward(self, x):
        return torch.tanh(self.drop(x))


# mtmc: x=f32[B,16] B=4
class Switches(nn.Module):
    def forward(self, x):
        return torch.tanh(x) * 2 if self.training else torch.relu(x) * 2


# mtmc: x=f32[B,16] B=4
class Counts(nn.Module):
    def __init__(self):
        super().__init__()
        self.calls, self.seen = 0, []

    def forward(self, x):
        if self.training:
            self.calls += 1
        return torch.tanh(x) * 2


SCALE = 2.0


def helper(x):
    return x * SCALE


# mtmc: x=f32[N] p=0.0 training=False inplace=False N=12
def dropped(x, p, training, inplace):
    return F.dropout(torch.tanh(x), p, training) * 2


# mtmc: x=f32[N] first=False second=False N=12
def both(x, first, second):
    flags = (first, second)
    return x * 3 if all(flags) else x * 2


# mtmc: x=f32[N] mask=False N=12
def masked(x, mask):
    if isinstance(mask, torch.Tensor):
        x = x + mask
    return torch.tanh(x) * 2


# mtmc: x=f32[N] twice=False N=12
def helped(x, twice):
    return helper(x) if twice else x * 2.0


# mtmc: x=f32[N] strict=True N=12
def strict(x, strict):
    if not strict:
        raise ValueError("only strict")
    return torch.tanh(x) * 2
"""
Load = Callable[[str, str], ModuleType]


def accepted(module: ModuleType, item: Any, *shape: int) -> bool:
    return bool(getattr(module, f"{type(item).__name__.lower()}_fits")(item, torch.ones(*shape)))


@torch.no_grad()
def test_a_block_without_dropout_runs_its_kernels_in_both_modes(load: Load) -> None:
    module = load(TEXT, "Block")
    block = module.Block()
    assert accepted(module, block.eval(), 2, 3, 16)
    assert accepted(module, block.train(), 2, 3, 16)
    block.attention.eval()
    assert not accepted(module, block, 2, 3, 16), "only changes of all modes together were compared"


@torch.no_grad()
def test_probabilities_that_only_the_other_mode_reads_are_conditions(load: Load) -> None:
    """The captured call, in evaluation mode, does not read them."""
    module = load(TEXT, "Block")
    block = module.Block().eval()
    block.attention.p = 0.5
    assert not accepted(module, block, 2, 3, 16)


RESULTS = """
import torch
import model

torch.manual_seed(0)
block, x = model.Block(), torch.randn(2, 3, 16)
launches = []
launch = model.block_launch
model.block_launch = lambda *arguments: launches.append(1) or launch(*arguments)
with torch.no_grad():
    for mode in (False, True):
        block.train(mode)
        assert model.block_fits(block, x)
        assert torch.allclose(block(x), reference(block, x), atol=1e-5), mode
assert len(launches) == 2
"""


@pytest.mark.slow
def test_the_results_are_those_of_eager_mode_in_both_modes(run_program: Callable[..., CompletedProcess[str]]) -> None:
    reference = """
def reference(block, x):
    fits, model.block_fits = model.block_fits, lambda *arguments: False
    try:
        return block(x)
    finally:
        model.block_fits = fits

"""
    head, _, tail = RESULTS.partition("block, x")
    run_program(TEXT, "Block", f"{head}{reference}block, x{tail}")


@torch.no_grad()
def test_modes_that_matter_stay_conditions(load: Load) -> None:
    for name in ("Eval", "Subclass", "Switches", "Counts"):
        module = load(TEXT, name)
        item = getattr(module, name)()
        assert accepted(module, item.eval(), 3, 16), name
        assert not accepted(module, item.train(), 3, 16), name


@torch.no_grad()
def test_settings_of_training_do_not_matter_in_evaluation_mode(load: Load) -> None:
    module = load(TEXT, "Eval")
    item = module.Eval().eval()
    item.drop.p, item.drop.inplace, item.norm.momentum = 0.9, True, None
    assert accepted(module, item, 3, 16)


ARGUMENTS: list[tuple[str, tuple[object, ...], bool]] = [
    ("dropped", (0.0, False, False), True),
    ("dropped", (0.0, True, True), True),
    ("dropped", (0.5, True, False), False),
    ("dropped", (0.0, None, False), False),
    ("both", (False, False), True),
    ("both", (True, False), True),
    ("both", (False, True), False),
    ("both", (True, True), False),
    ("masked", (True,), True),
    ("masked", (torch.ones(5),), False),
    ("masked", (None,), False),
    ("helped", (False,), True),
    ("helped", (True,), True),
    ("strict", (True,), True),
    ("strict", (False,), False),
]


@pytest.mark.parametrize(("name", "arguments", "runs"), ARGUMENTS)
def test_boolean_arguments_are_free_where_every_combination_gives_the_same_graph(
    load: Load, name: str, arguments: tuple[object, ...], runs: bool
) -> None:
    module = load(TEXT, name)
    assert getattr(module, f"{name}_fits")(torch.ones(5), *arguments) is runs


def test_what_the_other_value_of_a_flag_calls_must_not_change(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    module = load(TEXT, "helped")
    monkeypatch.setattr(module, "SCALE", 3.0)
    assert not module.helped_fits(torch.ones(5), True)


def test_trying_another_mode_leaves_the_module_as_it_was(optimised: Callable[[str, str], tuple[Capture, str]]) -> None:
    """In training mode, this target counts its calls; in evaluation mode it is captured and verified."""
    capture, source = optimised(TEXT, "Counts")
    assert capture.graph.constants == {"self.training": False}
    assert "self.training is False" in source
