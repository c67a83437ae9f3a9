"""Modules whose containers have keys that are no Python identifiers, and items that are None."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from mtmc_lsp.verify.worker.interpreter.source import on_cpu
from tests.codegen.checker import Checker, planned
from tests.codegen.harness import some_cases
from tests.codegen.test_guard import loaded

HEAD = """\
from collections import OrderedDict

import torch
from torch import nn


"""
LISTS = """\
# mtmc: x=f32[B,4,T] B=2 T=8
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        norm = nn.utils.parametrizations.weight_norm
        self.convs = nn.ModuleList([norm(nn.Conv1d(4, 4, 3, padding=1)) for _ in range(2)])
        self.gamma = nn.ParameterList([None, nn.Parameter(torch.ones(4, 1))])

    def forward(self, x):
        for conv, gamma in zip(self.convs, self.gamma):
            y = torch.tanh(conv(x))
            x = x + (y if gamma is None else gamma * y)
        return x
"""
DICTIONARIES = """\
# mtmc: x=f32[B,D] {grad}B=8 D=16 init: dim=D
class Block(nn.Module):
    def __init__(self, dim, names=("a-b", "class")):
        super().__init__()
        self.layers = nn.ModuleDict({{name: nn.LayerNorm(dim) for name in names}})
        self.scale = nn.ParameterDict({{names[0]: torch.ones(dim), names[1]: None}})

    def forward(self, x):
        for name, layer in self.layers.items():
            x = torch.tanh(layer(x))
            if self.scale[name] is not None:
                x = x * self.scale[name]
        return x
"""
MEMBERS = """\
# mtmc: x=f32[B,D] {grad}B=8 D=16 init: dim=D
class Block(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.add_module("block-1", nn.Linear(dim, dim))
        self.add_module("0", nn.LayerNorm(dim))
        self.register_buffer("a-b", torch.ones(dim))
        self.register_buffer("none-b", None)
        self.register_parameter("in", nn.Parameter(torch.ones(dim)))
        setattr(self, "t-t", torch.ones(dim))
        setattr(self, "k-k", 2.0)
        self.body = nn.Sequential(OrderedDict([("conv-1", nn.Linear(dim, dim)), ("act", nn.GELU())]))
        self.table = {{"it's": torch.ones(dim), "a b": torch.ones(dim)}}
        self.layers = nn.ModuleDict({{"it's": nn.LayerNorm(dim), "a b": nn.LayerNorm(dim), "0": nn.LayerNorm(dim)}})

    def forward(self, x):
        x = getattr(self, "0")(getattr(self, "block-1")(x)) * getattr(self, "a-b") + getattr(self, "in")
        if getattr(self, "none-b") is not None:
            x = x + 1
        x = self.body(x * getattr(self, "t-t") * getattr(self, "k-k"))
        for layer in self.layers.values():
            x = torch.tanh(layer(x))
        return x * self.table["it's"] + self.table["a b"]
"""
STATE = """\
# mtmc: x=f32[B,D] B=8 D=16 init: dim=D
class Block(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.register_buffer("h-1", torch.zeros(8, dim))
        self.register_buffer("h_1", torch.ones(8, dim))

    def forward(self, x):
        setattr(self, "h-1", torch.tanh(x + getattr(self, "h-1")))
        self.h_1 = torch.tanh(x - self.h_1)
        return 2 * getattr(self, "h-1") + self.h_1
"""
FORMS = {
    "lists": LISTS,
    "dictionaries": DICTIONARIES.format(grad=""),
    "members": MEMBERS.format(grad=""),
    "state": STATE,
}
TRAINED = {"dictionaries": DICTIONARIES.format(grad="grad=x "), "members": MEMBERS.format(grad="grad=x ")}


def written(checker: Checker, folder: Path, text: str) -> tuple[str, Any]:
    """The generated file of a target, and its module."""
    candidate = planned(checker.capture(HEAD + text, "Block"))
    return candidate.source, loaded(folder / "block.py", on_cpu(candidate.source, HEAD + text))


@pytest.mark.parametrize(
    "text", [*FORMS.values(), *TRAINED.values()], ids=[*FORMS, *(f"{name}-grad" for name in TRAINED)]
)
def test_kernels_are_right_and_the_guard_accepts_the_call(checker: Checker, text: str) -> None:
    capture = checker.capture(HEAD + text, "Block")
    assert checker.first_failure(capture, planned(capture), some_cases(capture)) == ""


def test_a_guard_reads_items_and_the_stores_of_modules(checker: Checker, tmp_path: Path) -> None:
    source, _ = written(checker, tmp_path, DICTIONARIES.format(grad=""))
    assert "scale['class'] is None" in source
    assert "(layers_a_b := layers['a-b'])" in source
    source, _ = written(checker, tmp_path, LISTS)
    assert "gamma[0] is None" in source
    source, _ = written(checker, tmp_path, STATE)
    assert "self._buffers['h-1'] = block_results[1]" in source


@pytest.mark.parametrize(
    ("names", "is_accepted"), [(("a-b", "class"), True), (("class", "a-b"), False), (("c-d", "in"), False)]
)
def test_the_guard_compares_the_keys_of_dictionaries_in_order(
    checker: Checker, tmp_path: Path, names: tuple[str, str], is_accepted: bool
) -> None:
    text = DICTIONARIES.format(grad="")
    _, module = written(checker, tmp_path, text)
    instance = module.Block(16, names).requires_grad_(False)
    assert bool(module.block_fits(instance, torch.ones(8, 16))) is is_accepted


ITEMS = """\
# mtmc: x=f32[B,D] B=8 D=16 init: dim=D
class Block(nn.Module):
    def __init__(self, dim, first="a", second="b", count=2):
        super().__init__()
        self.layers = nn.Sequential(OrderedDict([(first, nn.LayerNorm(dim)), (second, nn.LayerNorm(dim))]))
        self.scale = nn.ParameterList([torch.ones(dim) for _ in range(count)])

    def forward(self, x):
        x = self.layers(x)
        for scale in self.scale:
            x = torch.tanh(x * scale)
        return x
"""


@pytest.mark.parametrize(
    ("arguments", "is_accepted"),
    [(("a", "b"), True), (("b", "a"), False), (("c", "d"), False), (("a", "b", 3), False), (("a", "b", 1), False)],
)
def test_the_guard_compares_names_and_numbers_of_usual_items(
    checker: Checker, tmp_path: Path, arguments: tuple[str | int, ...], is_accepted: bool
) -> None:
    _, module = written(checker, tmp_path, ITEMS)
    instance = module.Block(16, *arguments).requires_grad_(False)
    assert bool(module.block_fits(instance, torch.ones(8, 16))) is is_accepted


ROOT = """\
# mtmc: x=f32[B,D] B=8 D=16
class Block(nn.{kind}):
    def __init__(self, items={items}):
        super().__init__({made})

    def forward(self, x):
        for layer in self{values}:
            x = torch.tanh(layer(x))
        return x
"""
SEQUENCE = ROOT.format(kind="Sequential", items="2", made="*[nn.LayerNorm(16) for _ in range(items)]", values="")
DICTIONARY = ROOT.format(
    kind="ModuleDict", items='("a-b", "c")', made="{item: nn.LayerNorm(16) for item in items}", values=".values()"
)


@pytest.mark.parametrize(
    ("text", "same", "others"),
    [(SEQUENCE, 2, [1, 3]), (DICTIONARY, ("a-b", "c"), [("c", "a-b"), ("a-b",), ("d", "e")])],
    ids=["Sequential", "ModuleDict"],
)
def test_the_guard_compares_the_items_of_a_target_that_is_a_container(
    checker: Checker, tmp_path: Path, text: str, same: object, others: list[object]
) -> None:
    _, module = written(checker, tmp_path, text)
    accepted = [
        bool(module.block_fits(module.Block(items).requires_grad_(False), torch.ones(8, 16)))
        for items in (same, *others)
    ]
    assert accepted == [True, *[False] * len(others)]
