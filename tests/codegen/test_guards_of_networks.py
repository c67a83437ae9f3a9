"""Guards of networks: one call checks all modules of a class, and each change of a single module is noticed."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from mtmc_lsp.process.module_files import load_file
from mtmc_lsp.verify.worker.interpreter.source import on_cpu
from tests.codegen.checker import Checker
from tests.codegen.harness import fused, verified

BLOCKS = 4
TEXT = f"""import torch
from torch import nn


class Block(nn.Module):
    def __init__(self, c, scale=1.0):
        super().__init__()
        self.conv = nn.Conv2d(c, c, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(c)
        self.scale = scale

    def forward(self, x):
        return torch.relu(self.norm(self.conv(x))) * self.scale


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(*[Block(4) for _ in range({BLOCKS})])
        self.eval()

    def forward(self, x):
        return self.blocks(x)


def get_inputs():
    return [torch.randn(2, 4, 5, 5)]


def get_init_inputs():
    return []
"""
ACCEPTED: dict[str, Callable[[Any], object]] = {
    "nothing": lambda block: None,
    "an equal tuple": lambda block: setattr(block.conv, "stride", (1, int("1"))),
    "a list for a tuple": lambda block: setattr(block.conv, "stride", [1, 1]),
    "equal weights": lambda block: setattr(
        block.conv, "weight", torch.nn.Parameter(block.conv.weight.detach().clone())
    ),
}
REFUSED: dict[str, Callable[[Any], object]] = {
    "another stride": lambda block: setattr(block.conv, "stride", (1, 2)),
    "a number for a tuple": lambda block: setattr(block.conv, "padding", 1),
    "a bias": lambda block: setattr(block.conv, "bias", torch.nn.Parameter(torch.ones(4))),
    "no entry for the bias": lambda block: block.conv._parameters.pop("bias"),
    "training": lambda block: block.norm.train(),
    "an equal number of another type": lambda block: setattr(block, "scale", 1),
    "an equal bool": lambda block: setattr(block, "scale", True),
    "a tensor": lambda block: setattr(block, "scale", torch.ones(())),
    "no attribute": lambda block: delattr(block, "scale"),
    "a subclass": lambda block: setattr(block, "norm", Marked(4).eval()),
    "a hook": lambda block: block.conv.register_forward_hook(lambda *_: None),
    "a hook before": lambda block: block.norm.register_forward_pre_hook(lambda *_: None),
    "another forward": lambda block: setattr(block.norm, "forward", torch.relu),
    "no norm": lambda block: setattr(block, "norm", None),
}


class Marked(torch.nn.BatchNorm2d):
    pass


@pytest.fixture(scope="module")
def source(checker: Checker) -> str:
    capture = checker.capture(TEXT, "Net")
    candidate = fused(capture, TEXT, nodes=[node.name for node in capture.graph.nodes][1:3])
    verdict = verified(capture, candidate)
    assert verdict.is_correct, verdict.reason
    return candidate.source


@pytest.fixture(scope="module")
def generated(source: str, tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    path: Path = tmp_path_factory.mktemp("networks") / "guarded_network.py"
    path.write_text(on_cpu(source, TEXT))
    return load_file(path)


def test_one_call_checks_all_modules_of_a_class_at_a_depth(source: str) -> None:
    guard = source.split("def net_fits(self, x)")[1].split("\n\n\n")[0]
    assert guard.count("_are_unchanged_modules(") == 4, "the list, blocks, convolutions and norms"
    assert "_is_unchanged_module(" not in guard
    assert '(blocks_3 := blocks._modules.get("3"))' in guard, "not by the list, whose indexing runs in Python"
    assert guard.index("blocks_0 :=") < guard.index("blocks_0_conv :="), (
        "a module is accepted before its submodules are read"
    )


@torch.no_grad()
@pytest.mark.parametrize("number", range(BLOCKS))
def test_each_change_of_one_module_runs_the_original_code(generated: ModuleType, number: int) -> None:
    net, x = generated.Net(), torch.randn(2, 4, 5, 5)
    assert generated.net_fits(net, x) is not None
    for name, change in ACCEPTED.items():
        other = copy.deepcopy(net)
        change(other.blocks[number])
        assert generated.net_fits(other, x) is not None, name
    for name, change in REFUSED.items():
        other = copy.deepcopy(net)
        change(other.blocks[number])
        assert generated.net_fits(other, x) is None, name
        assert generated.net_fits(net, x) is not None, "the network itself is unchanged"


@torch.no_grad()
@pytest.mark.parametrize(
    "change",
    [
        lambda net: net.blocks.append(copy.deepcopy(net.blocks[0])),
        lambda net: net.blocks.__delitem__(1),
        lambda net: net.blocks._modules.__setitem__("0", net.blocks._modules.pop("0")),
        lambda net: net.blocks._modules.__setitem__("last", net.blocks._modules.pop("3")),
        lambda net: setattr(net, "blocks", torch.nn.ModuleList(net.blocks)),
        lambda net: setattr(net, "blocks", None),
    ],
    ids=["longer", "shorter", "another order", "another name", "another class", "none"],
)
def test_another_list_of_modules_runs_the_original_code(generated: ModuleType, change: Callable[[Any], object]) -> None:
    net, x = generated.Net(), torch.randn(2, 4, 5, 5)
    assert generated.net_fits(net, x) is not None
    change(net)
    assert generated.net_fits(net, x) is None


@torch.no_grad()
def test_attributes_that_a_class_computes_count(generated: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """A property of the class comes before a value of the instance, as in the user's code."""
    net, x = generated.Net(), torch.randn(2, 4, 5, 5)
    monkeypatch.setattr(generated.Block, "scale", property(lambda self: 3.0), raising=False)
    assert net.blocks[0].__dict__["scale"] == 1.0 and net.blocks[0].scale == 3.0
    assert generated.net_fits(net, x) is None
    monkeypatch.undo()
    assert generated.net_fits(net, x) is not None
    monkeypatch.setattr(
        generated.Block,
        "__getattribute__",
        lambda self, name: 2.0 if name == "scale" else object.__getattribute__(self, name),
    )
    assert generated.net_fits(net, x) is None


@torch.no_grad()
def test_attributes_of_all_modules_are_read_without_a_step_for_each(
    generated: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``torch.nn.Module.__getattr__``, which runs in Python, is never called: neither for submodules nor for a bias of None."""
    net, x = generated.Net(), torch.randn(2, 4, 5, 5)
    asked: list[str] = []
    original = torch.nn.Module.__getattr__
    monkeypatch.setattr(
        torch.nn.Module, "__getattr__", lambda self, name: (asked.append(name), original(self, name))[1]
    )
    assert generated.net_fits(net, x) is not None
    assert not asked
