"""Targets whose arguments are tuples, lists, dictionaries, named tuples, dataclasses, or tensors of unusual strides."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from mtmc_lsp.actions.catalogue import IllegalAction, apply_action
from mtmc_lsp.capture.client import find_workload, run_capture
from mtmc_lsp.core.action import ActionKind, MacroAction
from mtmc_lsp.core.errors import TargetUnsupported
from mtmc_lsp.core.json_codec import from_json
from mtmc_lsp.core.workload import Capture
from mtmc_lsp.process.module_files import load_file
from mtmc_lsp.schedule.schedule import Schedule
from mtmc_lsp.source.targets import find_target
from mtmc_lsp.verify.worker.interpreter.source import on_cpu
from tests.codegen.checker import Checker
from tests.codegen.harness import verified
from tests.planning.situations import fully_fused, start

TEXT = """
from dataclasses import dataclass
from typing import NamedTuple, Optional

import torch


class Rope(NamedTuple):
    cos: torch.Tensor
    sin: torch.Tensor


@dataclass(frozen=True)
class Config:
    weight: torch.Tensor
    bias: Optional[torch.Tensor] = None
    eps: float = 1e-5


def rotate_half(x):
    return torch.cat((-x[..., 8:], x[..., :8]), dim=-1)


# mtmc: q=f32[B,H,S,16] k=f32[B,H,S,16] position_embeddings=(f32[B,S,16],f32[B,S,16]) B=2 H=3 S=8
def apply_rope(q, k, position_embeddings, *, unsqueeze_dim=1, mask=None):
    cos, sin = position_embeddings
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin


# mtmc: x=f32[S,16] rope=Rope(cos=f32[S,16],sin=f32[S,16]) S=8
def rotate(x, rope):
    return x * rope.cos + rotate_half(x) * rope.sin


# mtmc: batch={"x":f32[N,D],"mask":bool[N],"scale":2.0} N=12 D=9
def scaled(batch):
    return {"x": torch.where(batch["mask"][:, None], batch["x"] * batch["scale"], 0.0)}


# mtmc: x=f32[N,D] config=Config(weight=f32[D],bias=f32[D],eps=1e-6) N=6 D=20
def norm(x, config):
    y = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + config.eps) * config.weight
    return y if config.bias is None else y + config.bias


# mtmc: layers=[(f32[N],{"gain":f32[N]}),(f32[N],{"gain":f32[N]})] sizes=[[4,5],[6]] N=24
def nested(layers, sizes):
    return [torch.relu(x) * options["gain"] + sizes[0][1] for x, options in layers]


# mtmc: cache=(f32[N,4],f32[N,4]) x=f32[N,4] N=8
def update(cache, x):
    cache[0].mul_(0.5).add_(x)
    return cache[0] + cache[1]


# mtmc: x=f32[N] more=(f32[N],f32[N]) named={"gain":f32[N]} N=20
def combined(x, *more, **named):
    for other in more:
        x = x + other
    return torch.tanh(x) * named["gain"]


# mtmc: scores=f32[B,H,S] mask=f32[B,H,S]{S,0,1} row=f32[B,H,S]{0,0,1} B=2 H=3 S=20
def masked(scores, mask, row):
    return torch.softmax(scores + mask * row, -1)


# mtmc: windows=f32[W,8]{4,1} W=10
def frames(windows):
    return (windows * windows).sum(-1)
"""
TARGETS = ("apply_rope", "rotate", "scaled", "norm", "nested", "update", "combined", "masked", "frames")


@pytest.fixture(scope="module")
def captures(checker: Checker) -> dict[str, Capture]:
    return {name: checker.capture(TEXT, name) for name in TARGETS}


@pytest.fixture(scope="module")
def sources(captures: dict[str, Capture]) -> dict[str, str]:
    """The file with each target's kernels."""
    return {name: fully_fused(item, start(item, TEXT)).source for name, item in captures.items()}


@pytest.fixture(scope="module")
def modules(sources: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, ModuleType]]:
    """The optimised files, with guards that accept CPU tensors."""
    folder: Path = tmp_path_factory.mktemp("containers")
    loaded = {}
    for name, source in sources.items():
        path = folder / f"optimised_{name}.py"
        path.write_text(on_cpu(source, TEXT))
        loaded[name] = load_file(path)
    yield loaded
    for name in sources:
        del sys.modules[f"optimised_{name}"]


@pytest.mark.parametrize("name", TARGETS)
def test_the_kernels_are_correct_and_run_in_all_cases(name: str, captures: dict[str, Capture]) -> None:
    assert verified(captures[name], fully_fused(captures[name], start(captures[name], TEXT))).reason == ""


def t(*shape: int) -> torch.Tensor:
    return torch.ones(shape)


CALLS: dict[str, tuple[str, Callable[[Any], tuple[Any, ...]], bool]] = {
    "a tuple": ("apply_rope", lambda m: (t(1, 2, 5, 16), t(1, 2, 5, 16), (t(1, 5, 16), t(1, 5, 16)), 1, None), True),
    "a list for a tuple": ("apply_rope", lambda m: (t(1, 2, 5, 16), t(1, 2, 5, 16), [t(1, 5, 16)] * 2, 1, None), False),
    "a longer tuple": ("apply_rope", lambda m: (t(1, 2, 5, 16), t(1, 2, 5, 16), (t(1, 5, 16),) * 3, 1, None), False),
    "no tuple": ("apply_rope", lambda m: (t(1, 2, 5, 16), t(1, 2, 5, 16), None, 1, None), False),
    "a tensor for a tuple": ("apply_rope", lambda m: (t(1, 2, 5, 16), t(1, 2, 5, 16), t(2, 1, 5, 16), 1, None), False),
    "other items": ("apply_rope", lambda m: (t(1, 2, 5, 16), t(1, 2, 5, 16), (t(1, 5, 16), None), 1, None), False),
    "another shape": (
        "apply_rope",
        lambda m: (t(1, 2, 5, 16), t(1, 2, 5, 16), (t(1, 5, 16), t(1, 4, 16)), 1, None),
        False,
    ),
    "a keyword": ("apply_rope", lambda m: (t(1, 2, 5, 16), t(1, 2, 5, 16), (t(1, 5, 16),) * 2, 2, None), False),
    "an optional tensor": (
        "apply_rope",
        lambda m: (t(1, 2, 5, 16), t(1, 2, 5, 16), (t(1, 5, 16),) * 2, 1, t(5)),
        False,
    ),
    "a named tuple": ("rotate", lambda m: (t(5, 16), m.Rope(t(5, 16), t(5, 16))), True),
    "a tuple for a named tuple": ("rotate", lambda m: (t(5, 16), (t(5, 16), t(5, 16))), False),
    "a dictionary": ("scaled", lambda m: ({"x": t(3, 4), "mask": t(3) > 0, "scale": 2.0},), True),
    "a missing key": ("scaled", lambda m: ({"x": t(3, 4), "mask": t(3) > 0},), False),
    "a further key": ("scaled", lambda m: ({"x": t(3, 4), "mask": t(3) > 0, "scale": 2.0, "y": 1},), False),
    "another number": ("scaled", lambda m: ({"x": t(3, 4), "mask": t(3) > 0, "scale": 3.0},), True),
    "an integer": ("scaled", lambda m: ({"x": t(3, 4), "mask": t(3) > 0, "scale": 2},), False),
    "a tensor for a number": ("scaled", lambda m: ({"x": t(3, 4), "mask": t(3) > 0, "scale": t(3, 4)},), False),
    "a dataclass": ("norm", lambda m: (t(3, 4), m.Config(t(4), t(4), 1e-6)), True),
    "a field that is None": ("norm", lambda m: (t(3, 4), m.Config(t(4), None, 1e-6)), False),
    "another field": ("norm", lambda m: (t(3, 4), m.Config(t(4), t(4))), True),
    "another class": ("norm", lambda m: (t(3, 4), m.Rope(t(4), t(4))), False),
    "nested containers": ("nested", lambda m: ([(t(4), {"gain": t(4)}), (t(4), {"gain": t(4)})], [[4, 5], [6]]), True),
    "tuples for lists of numbers": ("nested", lambda m: ([(t(4), {"gain": t(4)})] * 2, ((4, 5), [6])), True),
    "floats for integers": ("nested", lambda m: ([(t(4), {"gain": t(4)})] * 2, [[4.0, 5], [6]]), False),
    "tensors for integers": ("nested", lambda m: ([(t(4), {"gain": t(4)})] * 2, [[t(4), 5], [6]]), False),
    "a wrong item deep inside": ("nested", lambda m: ([(t(4), {"gain": t(4)}), (t(4), [t(4)])], [[4, 5], [6]]), False),
    "an updated tensor": ("update", lambda m: ((t(3, 4), t(3, 4)), t(3, 4)), True),
    "an updated tensor twice": ("update", lambda m: ((t(3, 4),) * 2, t(3, 4)), False),
    "further arguments": ("combined", lambda m: (t(4), (t(4), t(4)), {"gain": t(4)}), True),
    "more further arguments": ("combined", lambda m: (t(4), (t(4),) * 3, {"gain": t(4)}), False),
    "other further keywords": ("combined", lambda m: (t(4), (t(4),) * 2, {"loss": t(4)}), False),
    "no further keywords": ("combined", lambda m: (t(4), (t(4),) * 2, {}), False),
    "expanded tensors": ("masked", lambda m: (t(2, 3, 9), t(2, 1, 9).expand(2, 3, 9), t(9).expand(2, 3, 9)), True),
    "a dense tensor": ("masked", lambda m: (t(2, 3, 9), t(2, 3, 9), t(9).expand(2, 3, 9)), False),
    "overlapping windows": ("frames", lambda m: (t(40).unfold(0, 8, 4),), True),
    "windows without overlap": ("frames", lambda m: (t(40).unfold(0, 8, 8),), False),
}


@pytest.mark.parametrize("case", CALLS)
def test_the_guard_accepts_calls_with_the_same_structure_and_never_raises(
    case: str, modules: dict[str, ModuleType]
) -> None:
    name, arguments, is_accepted = CALLS[case]
    guard = getattr(modules[name], f"{name}_fits")
    assert bool(guard(*arguments(modules[name]))) == is_accepted


def test_generated_code_has_the_names_that_the_target_unpacks(sources: dict[str, str]) -> None:
    assert "cos, sin = position_embeddings[0], position_embeddings[1]" in sources["apply_rope"]
    assert "def apply_rope_launch(q, k, cos, sin," in sources["apply_rope"]
    assert "    x, config_weight, config_bias, " in sources["norm"]


def test_the_edited_file_gives_the_original_results_for_other_structures(modules: dict[str, ModuleType]) -> None:
    rotate, x = modules["rotate"].rotate, torch.randn(5, 16)
    with pytest.raises(AttributeError, match="no attribute 'cos'"):
        rotate(x, (x, x))
    scaled = modules["scaled"].scaled
    assert torch.equal(scaled({"x": x, "mask": x[:, 0] < 9, "scale": 3})["x"], x * 3)


GET_INPUTS = """
from collections import OrderedDict

import torch


class Model(torch.nn.Module):
    def __init__(self, sizes):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(sizes[0][1]))

    def forward(self, batch, bias, shape, *more):
        x, = more
        return torch.relu(x * self.weight + bias) * batch["scale"] + shape[0][1] + batch["offset"]


def get_inputs():
    batch = OrderedDict(scale=torch.rand(4, 1).expand(4, 6), offset=1.5)
    return [batch, torch.rand(6).expand(4, 6), [(4, 5)], torch.randn(4, 12)[:, ::2]]


def get_init_inputs():
    return [((2, 6),)]
"""


def test_inputs_of_the_file_keep_their_structure_and_strides(captured) -> None:
    """The guard of a list of tuples was once false for the file's own workload."""
    capture = captured(GET_INPUTS, "Model")
    strides = {
        item.access: [step.value(capture.graph.sizes) for step in item.type.stride] for item in capture.graph.inputs
    }
    assert strides == {"batch['scale']": [1, 0], "bias": [0, 1], "more[0]": [12, 2], "self.weight": [1]}
    assert [(item.access, item.value) for item in capture.graph.numbers] == [("batch['offset']", 1.5)]
    candidate = fully_fused(capture, start(capture, GET_INPUTS))
    assert "_has_items(shape, [[4, 5]])" in candidate.source
    assert "type(batch) is OrderedDict and [*batch] == ['scale', 'offset']" in candidate.source
    assert verified(capture, candidate).reason == ""


REFUSED = {
    "def f(x, cache):\n    cache.append(x * 2)\n    return x + 1": (
        "cache=[f32[4]]",
        "changes a container that it gets",
    ),
    "def f(x, d):\n    d['y'] = x * 2\n    return x + 1": ("d={'z':f32[4]}", "changes a container that it gets"),
    "class C:\n    w = 1\ndef f(x, c=C()):\n    return x * c.w": ("", "argument 'c' of f is a C"),
    "def f(x, c):\n    return x * c[0][1]": ("c=[(f32[4],2),(f32[4],print)]", "cannot read the value 'print'"),
    "def f(x, c):\n    return x * c.w": ("c=Missing(w=f32[4])", "the file has no class Missing"),
}


@pytest.mark.parametrize("code", REFUSED)
def test_what_cannot_be_described_is_refused_with_a_reason(code: str, captured) -> None:
    directive, message = REFUSED[code]
    text = f"import torch\n{code}\n".replace("def f", f"# mtmc: x=f32[4] {directive}\ndef f")
    with pytest.raises(Exception, match=message):
        captured(text, "f")


def test_a_class_that_the_file_does_not_name_is_refused(user_file, interpreter_worker) -> None:
    user_file("class Pair(__import__('typing').NamedTuple):\n    a: object\n    b: object\n", "pairs.py")
    path = user_file(
        "import torch\ndef f(pair):\n    return pair.a + pair.b\n"
        "def get_inputs():\n    from pairs import Pair\n    return [Pair(torch.ones(3), torch.ones(3))]\n"
    )
    source = path.read_bytes()
    workload = find_workload(str(path), source, find_target(source, str(path), "f"))
    with pytest.raises(
        TargetUnsupported, match="argument 'pair' of f has a Pair, which its file does not name"
    ) as error:
        run_capture(workload, source, interpreter_worker, 120)
    assert error.value.remedy == "Import Pair at the top of the file."


def test_a_target_may_return_what_it_expands(captured) -> None:
    text = "import torch\n# mtmc: x=f32[N,D] row=f32[N,D]{0,1} N=5 D=12\ndef f(x, row):\n    return (x * row).sum(0).expand(3, -1)\n"
    capture = captured(text, "f")
    assert verified(capture, fully_fused(capture, start(capture, text))).reason == ""


def test_a_cuda_graph_is_illegal_for_arguments_whose_copies_have_other_strides(captures: dict[str, Capture]) -> None:
    for name, is_legal in (("rotate", True), ("masked", False), ("frames", False)):
        candidate = fully_fused(captures[name], start(captures[name], TEXT))
        schedule = from_json(Schedule, candidate.schedule)
        action = MacroAction(ActionKind.CUDA_GRAPH, (), (0, 0), {})
        if is_legal:
            assert apply_action(captures[name].graph, schedule, action).cuda_graph
        else:
            with pytest.raises(IllegalAction, match="gaps or shared elements"):
                apply_action(captures[name].graph, schedule, action)
