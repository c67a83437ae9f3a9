"""Modules in other dtypes and modes: from the directive, from the file, and from the dtype of the arguments."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from mtmc_lsp.core.errors import TargetRaises
from mtmc_lsp.core.workload import Capture
from mtmc_lsp.verify.worker.interpreter.source import on_cpu
from tests.codegen.checker import Checker, planned
from tests.codegen.harness import some_cases
from tests.codegen.test_guard import loaded

BLOCK = """\
import torch
from torch import nn


# mtmc: {words}x={dtype}[B,16] B=4
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(16))
        self.register_buffer("shift", torch.zeros(16))
        self.drop = nn.Dropout(0.5)

    def forward(self, x):
        return self.drop(torch.tanh(x * self.weight + self.shift))
"""
LINEAR = """\
import torch
from torch import nn


# mtmc: {words}x=bf16[B,16] {more}B=4
class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(16, 32)

    def forward(self, {parameters}):
        return torch.tanh(self.up(x)){tail}
"""


def linear(words: str = "", more: str = "", parameters: str = "x", tail: str = "") -> str:
    return LINEAR.format(words=words, more=more, parameters=parameters, tail=tail)


def parameter_dtypes(capture: Capture) -> set[str]:
    return {item.type.dtype for item in capture.graph.inputs if item.access.startswith("self.")}


def accepts(
    checker: Checker, folder: Path, text: str, prepare: Callable[[torch.nn.Module], torch.nn.Module], dtype: str
) -> bool:
    """Whether the generated guard accepts a call of a prepared instance."""
    candidate = planned(checker.capture(text, "Block"))
    module = loaded(folder / "block.py", on_cpu(candidate.source, text))
    instance = prepare(module.Block()).requires_grad_(False)
    return bool(module.block_fits(instance, torch.ones(4, 16, dtype=getattr(torch, dtype))))


def test_the_word_gives_parameters_and_buffers_their_dtype_and_the_kernels_are_right(checker: Checker) -> None:
    capture = checker.capture(BLOCK.format(words="module=bf16,eval ", dtype="bf16"), "Block")
    assert parameter_dtypes(capture) == {"bfloat16"}
    assert capture.graph.constants["self.drop.training"] is False
    assert checker.first_failure(capture, planned(capture), some_cases(capture)) == ""


@pytest.mark.parametrize(("words", "is_training"), [("module=f16,train ", True), ("module=f16,eval ", False)])
def test_the_guard_accepts_the_module_in_its_dtype_and_mode_only(
    checker: Checker, tmp_path: Path, words: str, is_training: bool
) -> None:
    text = BLOCK.format(words=words, dtype="f16")
    assert accepts(checker, tmp_path, text, lambda block: block.half().train(is_training), "float16")
    assert not accepts(checker, tmp_path, text, lambda block: block.half().train(not is_training), "float16")
    assert not accepts(checker, tmp_path, text, lambda block: block.train(is_training), "float16")


def test_without_a_word_the_dtype_is_as_in_the_file(checker: Checker) -> None:
    text = BLOCK.format(words="", dtype="bf16") + "\n\ndef main():\n    return Block().cuda().bfloat16().eval()\n"
    capture = checker.capture(text, "Block")
    assert parameter_dtypes(capture) == {"bfloat16"}
    assert "the parameters of Block are bfloat16, as in line 18 of the file" in capture.workload.assumed


def test_a_module_that_fails_on_half_arguments_is_captured_in_their_dtype(checker: Checker) -> None:
    capture = checker.capture(linear(), "Mlp")
    assert parameter_dtypes(capture) == {"bfloat16"}
    note = "the parameters of Mlp are bfloat16 (module=bf16), because it fails on bfloat16 arguments as constructed"
    assert note in capture.workload.assumed


def test_float32_parameters_with_half_arguments_are_noted(checker: Checker) -> None:
    capture = checker.capture(BLOCK.format(words="", dtype="bf16"), "Block")
    assert parameter_dtypes(capture) == {"float32"}
    note = (
        "Block has float32 parameters and bfloat16 arguments; write module=bf16 in the directive if it runs in bfloat16"
    )
    assert note in capture.workload.assumed


def test_a_dtype_mismatch_that_remains_names_the_word(checker: Checker) -> None:
    with pytest.raises(TargetRaises) as caught:
        checker.capture(linear(tail=" @ torch.ones(3, 3)"), "Mlp")
    assert "If the parameters of Mlp are bfloat16, write module=bf16 in the directive." in caught.value.remedy
