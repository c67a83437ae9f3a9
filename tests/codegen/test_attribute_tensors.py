"""Tensors in plain attributes of modules: read by kernels, and checked by the guard."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from mtmc_lsp.core.graph import InputKind
from mtmc_lsp.verify.cases import version_cases
from mtmc_lsp.verify.worker.interpreter.source import on_cpu
from tests.codegen.checker import Checker, planned
from tests.codegen.harness import some_cases
from tests.codegen.test_guard import loaded

TEXT = """\
import torch
from torch import nn


class Config:
    def __init__(self):
        self.offset = torch.linspace(0, 1, 4)


class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.eps = torch.tensor(1e-5)

    def forward(self, x):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)


# mtmc: x=f32[B,4] B=8
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = torch.arange(4.0)
        self.anchors = [torch.ones(4), torch.full((4,), 2.0)]
        self.table = {"cos": torch.linspace(-1, 0, 4)}
        self.pair = (torch.ones(4), 3.0)
        self.config = Config()
        self.norm = Scale()

    def forward(self, x):
        for anchor in self.anchors:
            x = x * anchor + self.pair[0]
        return self.norm(x * self.scale.to(x.device)) + self.table["cos"] + self.config.offset
"""

COUNTING = """\
import torch
from torch import nn


# mtmc: x=f32[B,4] B=8
class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.seen = torch.zeros(4)

    def forward(self, x):
        self.seen.add_(x.sum(0))
        return x * self.seen
"""


@pytest.fixture(scope="module")
def optimised(checker: Checker, tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    """The optimised file, with a guard that accepts CPU tensors."""
    candidate = planned(checker.capture(TEXT, "Block"))
    return loaded(tmp_path_factory.mktemp("attributes") / "attributes.py", on_cpu(candidate.source, TEXT))


def test_attribute_tensors_are_inputs_of_the_kernels_and_other_values_give_other_results(checker: Checker) -> None:
    capture = checker.capture(TEXT, "Block")
    accesses = {item.access for item in capture.graph.inputs if item.kind is InputKind.ATTRIBUTE}
    lists = {"self.anchors[0]", "self.anchors[1]", "self.pair[0]", "self.table['cos']"}
    assert accesses == {"self.scale", "self.config.offset", "self.norm.eps", *lists}
    # The cases vary the values of these tensors.
    assert checker.first_failure(capture, planned(capture), some_cases(capture)) == ""


def test_a_tensor_that_the_call_updates_is_updated(checker: Checker) -> None:
    capture = checker.capture(COUNTING, "Counting")
    assert [mutation.input for mutation in capture.graph.mutations] == ["seen"]
    assert checker.first_failure(capture, planned(capture), some_cases(capture)) == ""


def test_the_guard_moves_tensors_to_the_device_of_the_arguments(optimised: ModuleType) -> None:
    tensors = optimised.block_fits(optimised.Block(), torch.ones(3, 4))
    assert tensors is not None
    # `Module.to("cuda")` leaves these tensors on the CPU.
    guard = Path(str(optimised.__file__)).read_text().split("def block_fits")[1].split("\ndef ")[0]
    assert guard.count(".to(x.device)") == 7


def _longer(block: Any) -> None:
    block.anchors.append(torch.ones(4))


def _none(block: Any) -> None:
    block.scale = None


def _missing(block: Any) -> None:
    del block.config.offset


def _other_key(block: Any) -> None:
    block.table = {"sin": torch.ones(4)}


def _other_size(block: Any) -> None:
    block.table["cos"] = torch.ones(1)


def _other_dtype(block: Any) -> None:
    block.norm.eps = block.norm.eps.double()


@pytest.mark.parametrize("change", [_longer, _none, _missing, _other_key, _other_size, _other_dtype])
def test_other_attributes_run_the_original_code(optimised: ModuleType, change: Callable[[Any], None]) -> None:
    block = optimised.Block()
    change(block)
    assert optimised.block_fits(block, torch.ones(3, 4)) is None


@pytest.mark.parametrize("x", [2.0, None, torch.ones(3, 5), torch.ones(3, 4).double()])
def test_the_guard_refuses_other_arguments_without_an_error(optimised: ModuleType, x: object) -> None:
    assert optimised.block_fits(optimised.Block(), x) is None


SELECTED_ROWS = """
import torch
import torch.nn as nn


# mtmc: x=f32[B,12] B=3 init: out_features=24
class SelectedRows(nn.Module):
    def __init__(self, out_features):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(out_features, 12))
        self.update = nn.Parameter(torch.randn(16, 12))
        self.rows = torch.arange(out_features) % 3 > 0

    def forward(self, x):
        added = self.update.new_zeros((len(self.rows), 12))
        added[self.rows] = self.update
        return torch.relu(x @ (self.weight + added).T)
"""


def test_the_size_of_a_mask_that_selects_rows_is_the_same_in_all_cases(checker: Checker) -> None:
    capture = checker.capture(SELECTED_ROWS, "SelectedRows")
    assert set(capture.variable_sizes) == {"B"}
    cases = [case for case in version_cases(capture, interpreted=True, seed=2) if case.kind == "values"]
    assert checker.first_failure(capture, planned(capture), cases) == ""
