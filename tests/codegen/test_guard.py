"""The guard: calls that differ from the captured one in an unsupported way run the original code."""

from __future__ import annotations

import copy
import gc
import sys
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx

from mtmc_lsp.process.module_files import load_file
from mtmc_lsp.verify.worker.interpreter.source import on_cpu
from tests.codegen.checker import Checker
from tests.codegen.harness import fused, verified

TEXT = """
from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True)
class Config:
    bias: bool = False
    alpha: float = 1.0


class Scale(nn.Module):
    def __init__(self, bias):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(16))
        self.bias = nn.Parameter(torch.zeros(16)) if bias else None

    def forward(self, x):
        y = x * self.weight
        return y if self.bias is None else y + self.bias


# mtmc: x=f32[B,16] B=4
class Block(nn.Module):
    def __init__(self, config=Config()):
        super().__init__()
        self.config = config
        self.scale = Scale(config.bias)
        self.steps = nn.ModuleList([nn.SiLU(), nn.Identity()])
        self.down = nn.Sequential(Scale(False))

    def forward(self, x, *, low=float("-inf"), k=2, dims=(0, -1)):
        x = self.scale(x) * self.config.alpha * k
        for step in self.steps:
            x = step(x)
        if self.down is not None:
            x = x + self.down(x)
        return x.clamp(min=low)
"""


@pytest.fixture(scope="module")
def optimised(checker: Checker, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModuleType]:
    """The optimised file, with a guard that accepts CPU tensors."""
    candidate = fused(checker.capture(TEXT, "Block"), TEXT)
    path: Path = tmp_path_factory.mktemp("guard") / "guarded_block.py"
    path.write_text(on_cpu(candidate.source, TEXT))
    yield load_file(path)
    del sys.modules[path.stem]


def block(module: ModuleType, **settings: Any) -> Any:
    return module.Block(module.Config(**settings)).eval().requires_grad_(False)


def fits(module: ModuleType, item: Any, x: object = None, **changes: Any) -> bool:
    values = {"low": float("-inf"), "k": 2, "dims": (0, -1), **changes}
    return bool(module.block_fits(item, torch.ones(3, 16) if x is None else x, **values))


def test_the_captured_call_fits(optimised: ModuleType) -> None:
    """Without this, the rejections below would prove nothing."""
    assert fits(optimised, block(optimised))
    assert fits(optimised, block(optimised), dims=[0, -1])


def _no_down(item: Any) -> None:
    item.down = None


def _no_scale(item: Any) -> None:
    item.scale = nn.Identity()


def _subclass(item: Any) -> None:
    kind = type(item.scale)
    item.scale.__class__ = type(kind.__name__, (kind,), {"__module__": "elsewhere"})


def _patch(item: Any) -> None:
    item.scale.forward = torch.sin


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(_no_down, id="an optional module is None"),
        pytest.param(_no_scale, id="a module without the tensors"),
        pytest.param(_subclass, id="an adapter of the same name"),
        pytest.param(_patch, id="a patched forward"),
        pytest.param(lambda item: item.steps.append(nn.Tanh()), id="one more module in a list"),
        pytest.param(lambda item: item.scale.register_forward_hook(lambda *_: None), id="a hook"),
        pytest.param(lambda item: item.scale.register_forward_pre_hook(lambda *_: None), id="a hook before"),
    ],
)
def test_a_module_with_another_structure_runs_the_original_code(
    optimised: ModuleType, change: Callable[[Any], object]
) -> None:
    """Adapters, removed heads and hooks are added to models after their definition."""
    item = block(optimised)
    change(item)
    assert not fits(optimised, item)


@pytest.mark.parametrize("settings", [{"bias": True}, {"alpha": 2.0}], ids=str)
def test_a_module_with_other_settings_runs_the_original_code(optimised: ModuleType, settings: dict[str, Any]) -> None:
    """A parameter that was None at capture, and a number in a settings object."""
    assert not fits(optimised, block(optimised, **settings))


@pytest.mark.parametrize(
    "given",
    [{"k": 2.0}, {"k": torch.tensor(2)}, {"k": torch.ones(16)}, {"dims": None}, {"dims": 0}, {"low": 0.0}],
    ids=str,
)
def test_values_of_another_type_run_the_original_code(optimised: ModuleType, given: dict[str, Any]) -> None:
    """Equal numbers of different types promote differently. The guard must not raise for inputs that the target accepts."""
    assert not fits(optimised, block(optimised), **given)


def test_sparse_and_nested_tensors_run_the_original_code(optimised: ModuleType) -> None:
    """Sparse and nested tensors raise when their layout is queried."""
    item = block(optimised)
    assert not fits(optimised, item, torch.ones(3, 16).to_sparse())
    assert not fits(optimised, item, torch.nested.nested_tensor([torch.ones(2, 16), torch.ones(1, 16)]))


def test_traced_and_transformed_calls_run_the_original_code(optimised: ModuleType) -> None:
    """None of these sees a launch; its result would become a constant."""
    item, x, accepted = block(optimised), torch.ones(3, 16), []

    def guarded(value: torch.Tensor) -> torch.Tensor:
        accepted.append(fits(optimised, item, value))
        return value * 2

    torch.jit.trace(guarded, x, check_trace=False)
    make_fx(guarded)(x)
    torch.vmap(guarded)(torch.ones(2, 3, 16))
    torch.func.jvp(guarded, (x,), (x,))
    with forward_ad.dual_level():
        guarded(forward_ad.make_dual(x, torch.ones_like(x)))
    assert accepted == [False] * 5


class Marked(torch.nn.Parameter):
    """A parameter class of some library."""


def _column_major(x: torch.Tensor) -> torch.Tensor:
    return x.t().contiguous().t()


OTHER_TENSORS: dict[str, Callable[[torch.Tensor], object]] = {
    "another dtype": lambda x: x.double(),
    "another size": lambda x: torch.ones(3, 17),
    "another layout": _column_major,
    "no rows": lambda x: x[:0],
    "one more dimension": lambda x: x[None],
    "sparse": lambda x: x.to_sparse(),
    "nested": lambda x: torch.nested.nested_tensor([x, x]),
    "a negated view": torch._neg_view,
    "another device": lambda x: x.to("meta"),
    "a subclass": lambda x: Marked(x, requires_grad=False),
    "no tensor": lambda x: None,
}


@pytest.mark.parametrize("change", OTHER_TENSORS)
def test_other_tensors_are_refused_after_an_accepted_call(optimised: ModuleType, change: str) -> None:
    item, x = block(optimised), torch.ones(3, 16)
    other = OTHER_TENSORS[change](x)
    for _ in range(2):
        assert fits(optimised, item, x)
        if other is None:
            assert not optimised.block_fits(item, None, low=float("-inf"), k=2, dims=(0, -1))
        else:
            assert not fits(optimised, item, other)


def test_tensors_like_those_of_an_accepted_call_are_compared_in_one_step(
    optimised: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked: list[int] = []
    in_full = optimised._is_plain_gpu_call
    monkeypatch.setattr(optimised, "_is_plain_gpu_call", lambda tensors: checked.append(1) or in_full(tensors))
    item = block(optimised)
    for rows in (21, 22, 21, 22):
        assert fits(optimised, item, torch.ones(rows, 16))
    assert len(checked) == 2
    item.scale.weight = nn.Parameter(torch.ones(8), requires_grad=False)
    assert not fits(optimised, item, torch.ones(21, 16)), "another parameter of the module"
    with torch.autocast("cpu", torch.bfloat16):
        assert not optimised._are_like_accepted("block_fits", (torch.ones(21, 16),) * 3)


def test_an_accepted_call_keeps_no_tensor_alive(optimised: ModuleType) -> None:
    x = torch.ones(33, 16)
    assert fits(optimised, block(optimised), x)
    reference = weakref.ref(x)
    del x
    gc.collect()
    assert reference() is None
    for rows in range(40, 60):
        assert fits(optimised, block(optimised), torch.ones(rows, 16))
    assert len(optimised._ACCEPTED["block_fits"]) == 8


def test_a_second_target_of_a_file_is_verified_too(checker: Checker) -> None:
    """Its guard shares lines with the first target's guard, which must stay unchanged."""
    both = f"{TEXT}\n\n# mtmc: x=f32[B,16] B=4\ndef other(x):\n    return x.exp() + 1\n"
    first = fused(checker.capture(both, "other"), both).source
    second = on_cpu(fused(checker.capture(first, "Block"), first).source, first)
    block, _, rest = second.partition("# mtmc: begin Block")[2].partition("# mtmc: end Block")
    assert "is_cpu" in block and "is_cuda" not in block and "current_device" not in block
    assert "is_cuda" in second.replace(block, "") and "is_cpu" not in rest


DEEP = """import torch
class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = torch.nn.LayerNorm(12)
    def forward(self, x):
        return torch.relu(self.norm(x)) + x
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.Sequential(*[Block() for _ in range(5)])
    def forward(self, x):
        return self.blocks(x)
def get_inputs():
    return [torch.randn(4, 12)]
def get_init_inputs():
    return []
"""


def loaded(path: Path, text: str) -> ModuleType:
    path.write_text(text)
    return load_file(path)


def test_a_network_guard_looks_up_each_module_once_and_returns_the_tensors(checker: Checker, tmp_path: Path) -> None:
    capture = checker.capture(DEEP, "Model")
    candidate = fused(capture, DEEP, nodes=[node.name for node in capture.graph.nodes][:2])
    guard = candidate.source.split("def model_fits(self, x)")[1].split("\n\n\n")[0]
    assert guard.count("self.") == 1, "the rest is found from what was found before"
    assert '(blocks_0_norm := blocks_0._modules.get("norm"))' in guard
    assert "if (model_tensors := model_fits(self, x)) is not None:" in candidate.source
    verdict = verified(capture, candidate)
    assert verdict.is_correct, verdict.reason
    module = loaded(tmp_path / "deep_network.py", on_cpu(candidate.source, DEEP))
    model, x = module.Model(), torch.randn(4, 12)
    with torch.no_grad():
        assert [id(t) for t in module.model_fits(model, x)] == [id(t) for t in (x, *model.parameters())]
        for other in (x.double(), x.half(), x.int(), x.t().contiguous().t(), 3.0, None):
            assert module.model_fits(model, other) is None
        for change in DEEP_CHANGES.values():
            other = copy.deepcopy(model)
            change(other)
            assert module.model_fits(other, x) is None, change
            assert other(x).shape == x.shape, "its own code runs"


def _plain_weight(model: Any) -> None:
    """A plain attribute replaces the parameter: attribute lookup works, the parameter dictionary lacks it."""
    norm = model.blocks[2].norm
    weight = norm.weight.detach()
    del norm.weight
    norm.weight = weight


DEEP_CHANGES: dict[str, Callable[[Any], object]] = {
    "another part": lambda model: setattr(model.blocks[3], "norm", torch.nn.Identity()),
    "another constant of one of many": lambda model: setattr(model.blocks[2].norm, "eps", 1e-3),
    "a plain weight": _plain_weight,
    "a weight of a subclass": lambda model: setattr(model.blocks[1].norm, "weight", Marked(torch.ones(12))),
    "no weight": lambda model: setattr(model.blocks[1].norm, "weight", None),
    "a hook": lambda model: model.blocks[1].norm.register_forward_hook(lambda *_: None),
}


VARIED = DEEP.replace("        self.norm =", "        self.scale = scale\n        self.norm =").replace(
    "(self)", "(self, scale=1.0)", 1
)
VARIED = VARIED.replace("torch.relu(self.norm(x))", "torch.relu(self.norm(x)) * self.scale")


def test_a_network_without_the_expected_attributes_runs_the_original_code(checker: Checker, tmp_path: Path) -> None:
    capture = checker.capture(VARIED, "Model")
    candidate = fused(capture, VARIED, nodes=[node.name for node in capture.graph.nodes][:2])
    assert "{'scale': 1.0}, blocks_0" in candidate.source
    module = loaded(tmp_path / "varied_network.py", candidate.source)
    model, x = module.Model(), torch.randn(4, 12)
    with torch.no_grad():
        assert module.model_fits(model, x) is None, "on a CPU, where no GPU is asked for either"
        del model.blocks[2].scale
        assert module.model_fits(model, x) is None


HOSTILE = """import torch
class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.isinstance = torch.nn.LayerNorm(12)
        self.all = torch.nn.LayerNorm(12)
    def forward(self, x):
        return self.all(torch.relu(self.isinstance(x)))
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.Block = Block()
        self.tensors = Block()
        self.x = Block()
        self.t = torch.nn.Parameter(torch.ones(12))
    def forward(self, x):
        return self.x(self.tensors(self.Block(x) * self.t))
def get_inputs():
    return [torch.randn(4, 12)]
def get_init_inputs():
    return []
"""


def test_submodules_may_have_the_names_of_builtins_in_the_guard(checker: Checker) -> None:
    capture = checker.capture(HOSTILE, "Model")
    verdict = verified(capture, fused(capture, HOSTILE, nodes=[node.name for node in capture.graph.nodes][:2]))
    assert verdict.is_correct, verdict.reason
