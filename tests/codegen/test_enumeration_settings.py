"""Modules that keep a member of an enumeration: captured, and another member runs the original code."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

from mtmc_lsp.process.module_files import load_file
from mtmc_lsp.verify.worker.interpreter.source import on_cpu
from tests.codegen.checker import Checker
from tests.codegen.harness import fused

TEXT = """
from dataclasses import dataclass
from enum import Enum, Flag

import torch
from torch import nn


class Order(str, Enum):
    FIRST = "first"
    LAST = "last"


class Scale(Enum):
    NONE = 1
    HALF = 2


class Parts(Flag):
    SIGN = 1
    SQUARE = 2


@dataclass(frozen=True)
class Config:
    scale: Scale = Scale.HALF


# mtmc: x=f32[B,16] B=4
class Block(nn.Module):
    def __init__(self, order=Order.FIRST, config=Config(), parts=Parts.SIGN | Parts.SQUARE):
        super().__init__()
        self.order, self.config, self.parts = order, config, parts

    def forward(self, x):
        y = x + 1 if self.order == Order.FIRST else x - 1
        if self.config.scale is Scale.HALF:
            y = y * 0.5
        if self.parts & Parts.SQUARE:
            y = y * y
        return y
"""


@pytest.fixture(scope="module")
def optimised(checker: Checker, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModuleType]:
    """The optimised file, with a guard that accepts CPU tensors."""
    candidate = fused(checker.capture(TEXT, "Block"), TEXT)
    path: Path = tmp_path_factory.mktemp("enumerations") / "enumeration_block.py"
    path.write_text(on_cpu(candidate.source, TEXT))
    yield load_file(path)
    del sys.modules[path.stem]


def fits(module: ModuleType, **settings: object) -> bool:
    return bool(module.block_fits(module.Block(**settings).eval(), torch.ones(3, 16)))


def test_the_members_of_the_capture_fit(optimised: ModuleType) -> None:
    assert fits(optimised)


@pytest.mark.parametrize("name", ["order", "config", "parts"])
def test_another_member_runs_the_original_code(optimised: ModuleType, name: str) -> None:
    others = {
        "order": optimised.Order.LAST,
        "config": optimised.Config(optimised.Scale.NONE),
        "parts": optimised.Parts.SIGN,
    }
    assert not fits(optimised, **{name: others[name]})
