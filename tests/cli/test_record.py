"""``mtmc record``: a user's program runs as ever, and its calls become workloads."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from runner import mtmc, project

from mtmc_lsp.app.pipeline import Pipeline
from mtmc_lsp.app.target_file import open_target, parse_request
from mtmc_lsp.core.settings import Settings

NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}

LAYERS = """\
import torch
from torch import nn


def scaled(x, scale=2.0, mask=None):
    y = torch.softmax(x * scale, -1)
    return y if mask is None else y * mask


@torch.no_grad()
def picked(table, index):
    return table.gather(0, index[:, None])


def plain(n):
    return n + 1


class Block(nn.Module):
    def __init__(self, width, eps=1e-6):
        super().__init__()
        self.lin = nn.Linear(width, width)
        self.eps = eps

    def forward(self, x):
        return torch.relu(self.lin(x)) + self.eps


class Wide(Block):
    def __init__(self, extra):
        super().__init__(8 * extra)


class Configured(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.width = config.width

    def forward(self, x):
        return x * self.width
"""

TRAIN = """\
import subprocess
import sys

import torch

from pkg.layers import Block, Configured, Wide, picked, plain, scaled


class Config:
    width = 3


def loss(pred, target, step):
    return (pred - target).square().mean() + step


def main():
    torch.manual_seed(0)
    block, configured, wide = Block(32), Configured(Config()), Wide(2)
    for step in range(6):
        x = torch.randn(16, 32)
        y = block(x)
        scaled(y.t(), scale=0.5)
        if step % 3 == 0:
            scaled(torch.randn(8, 48))
        picked(x, torch.randint(0, 16, (5,)))
        plain(step)
        configured(x)
        wide(torch.randn(4, 16))
        loss(y, x, step).backward()
    torch.compile(scaled, backend="eager")(torch.randn(2, 2))


if __name__ == "__main__":
    main()
    print("trained", *sys.argv[1:])
"""


def trained_project(folder: Path) -> Path:
    file = project(folder, TRAIN)
    (folder / "pkg").mkdir()
    (folder / "pkg" / "__init__.py").write_text("")
    (folder / "pkg" / "layers.py").write_text(LAYERS)
    return file


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any], str]:
    """A recorded program: its folder, what was found by name, and what it said itself."""
    folder = tmp_path_factory.mktemp("recorded")
    trained_project(folder)
    answer = mtmc(folder, "record", "--json", "--", sys.executable, "model.py", "--json", "now")
    assert answer.code == 0, answer.err
    return folder, {target["qualname"]: target for target in answer.document["targets"]}, answer.err


def argument(target: dict[str, Any], name: str, call: int = 0) -> dict[str, Any]:
    return next(item for item in target["calls"][call]["arguments"] if item["name"] == name)


def test_the_program_runs_with_its_own_arguments_and_its_output_does_not_disturb_the_document(recorded) -> None:
    _, _, said = recorded
    assert "trained --json now" in said
    assert "not understood" not in said
    assert "Graph break" not in said


def test_functions_and_modules_called_with_tensors_are_found_and_others_are_not(recorded) -> None:
    _, found, _ = recorded
    assert set(found) == {"scaled", "picked", "Block.forward", "Configured.forward", "loss"}


def test_the_most_frequent_kind_of_call_comes_first_with_its_layout(recorded) -> None:
    _, found, _ = recorded
    assert [call["count"] for call in found["scaled"]["calls"]] == [6, 2, 1]
    tensor = argument(found["scaled"], "x")["tensor"]
    assert (tensor["shape"], tensor["stride"]) == ([32, 16], [1, 32])
    assert argument(found["scaled"], "scale")["constant"] == 0.5
    assert argument(found["scaled"], "x", 1)["tensor"]["stride"] is None


def test_ranges_are_kept_for_indices_and_for_what_is_never_negative(recorded) -> None:
    _, found, _ = recorded
    index = argument(found["picked"], "index")["tensor"]
    assert 0 <= index["low"] < index["high"] <= 15
    never_negative, normal = (argument(found["loss"], name)["tensor"] for name in ("pred", "target"))
    assert never_negative["low"] >= 0
    assert normal["low"] is None


def test_constructor_arguments_are_kept_also_those_that_a_subclass_passes_on(recorded) -> None:
    _, found, _ = recorded
    inits = [
        {item["name"]: item["constant"] for item in call["init_arguments"]} for call in found["Block.forward"]["calls"]
    ]
    assert inits == [{"width": 32, "eps": 1e-6}, {"width": 16, "eps": 1e-6}]


def test_training_gradients_and_varying_numbers_are_noted(recorded) -> None:
    _, found, _ = recorded
    call = found["loss"]["calls"][0]
    assert (call["count"], call["under_autograd"], call["varying"]) == (6, 6, ["step"])
    assert found["Block.forward"]["calls"][0]["in_training"] == 6
    assert found["Block.forward"]["calls"][0]["module_dtype"] == "float32"
    assert found["picked"]["calls"][0]["under_autograd"] == 0


def test_no_element_of_a_tensor_is_stored(recorded) -> None:
    """What is stored of a tensor is its type and its extremes."""
    folder, _, _ = recorded
    for line in (folder / ".mtmc" / "records.jsonl").read_text().splitlines():
        for call in json.loads(line)["calls"]:
            for item in call["arguments"]:
                if item["tensor"]:
                    assert set(item["tensor"]) == {
                        "shape",
                        "dtype",
                        "stride",
                        "low",
                        "high",
                        "requires_grad",
                        "high_size",
                    }
                else:
                    assert isinstance(item["constant"], (int, float, type(None)))
    assert (folder / ".mtmc" / ".gitignore").read_text() == "*\n"


def test_recorded_calls_are_the_workload_of_a_target_without_a_directive(recorded) -> None:
    folder, _, _ = recorded
    answer = mtmc(folder, "optimize", "pkg/layers.py::scaled", "--arch", "sm_90", "--json", **NO_GPU)
    assert answer.code == 0, answer.err
    assert answer.document["workload"]["source"] == "recorded"
    assert "recorded calls" in answer.document["workload"]["assumed"][0]
    assert any(step["status"] == "accepted" for step in answer.document["steps"])


def test_a_target_that_is_called_with_gradients_gets_kernels_for_both_passes(recorded) -> None:
    folder, _, _ = recorded
    answer = mtmc(folder, "optimize", "pkg/layers.py::Block", "--arch", "sm_90", "--json", **NO_GPU)
    assert answer.code == 0, answer.err
    assert answer.document["workload"]["trains"] is True
    assert "torch.autograd.Function" in answer.document["final"]["source"]
    names = {check["name"] for step in answer.document["steps"] for check in step["verdict"]["checks"]}
    assert any("gradient of lin_weight" in name for name in names)


def test_calls_that_cannot_be_repeated_are_told_with_the_reason(recorded) -> None:
    folder, _, _ = recorded
    answer = mtmc(folder, "optimize", "pkg/layers.py::Configured", "--json")
    assert (answer.code, answer.error["code"]) == (2, "no-workload")
    assert "constructor argument 'config' was a Config" in answer.error["message"]
    assert "# mtmc: x=f32" in answer.error["remedy"]


def test_what_is_shown_can_be_pasted_as_a_directive(tmp_path: Path) -> None:
    trained_project(tmp_path)
    answer = mtmc(tmp_path, "record", "--target", "pkg/layers.py::Block", "--", sys.executable, "model.py")
    assert answer.code == 0, answer.err
    assert "layers.py::Block.forward  12 calls, 2 variants" in answer.out
    assert "loss" not in answer.out
    shown = next(line for line in answer.out.splitlines() if "# mtmc:" in line)
    directive = shown[shown.index("#") :]
    assert directive == "# mtmc: module=train x=f32[16,32] grad=parameters init: width=32 eps=1e-06"
    (tmp_path / "pkg" / "layers.py").write_text(LAYERS.replace("class Block", f"{directive}\nclass Block"))
    planned = mtmc(tmp_path, "plan", "pkg/layers.py::Block", "--json", **NO_GPU)
    assert planned.code == 0, planned.err


def test_the_callers_autocast_is_recorded(tmp_path: Path) -> None:
    text = "import torch\n\n\ndef scaled(x):\n    return x * 2\n\n\nscaled(torch.ones(2))\nscaled(torch.ones(3))\n"
    # On a machine without a GPU, torch.autocast("cuda") does nothing.
    text += 'torch.set_autocast_enabled("cuda", True)\ntorch.set_autocast_dtype("cuda", torch.bfloat16)\n'
    project(tmp_path, f"{text}scaled(torch.ones(2))\nscaled(torch.ones(2))\n")
    answer = mtmc(tmp_path, "record", "--json", "--", sys.executable, "model.py")
    (target,) = answer.document["targets"]
    assert [(call["count"], call["autocast"]) for call in target["calls"]] == [(2, "bfloat16"), (1, ""), (1, "")]


def test_modules_run_with_m_and_child_processes_are_recorded(tmp_path: Path) -> None:
    trained_project(tmp_path)
    (tmp_path / "pkg" / "__main__.py").write_text(
        "import os, subprocess, sys, torch\n"
        "from .layers import scaled\n"
        "if sys.argv[1:]:\n"
        "    scaled(torch.randn(3, 5))\n"
        "    os._exit(0)\n"  # as multiprocessing's children end, without atexit
        "subprocess.run([sys.executable, '-m', 'pkg', 'child'], check=True)\n"
        "if os.fork() == 0:\n"
        "    scaled(torch.randn(3, 7))\n"
        "    os._exit(0)\n"
        "os.wait()\n"
        "scaled(torch.randn(3, 5))\n"
    )
    answer = mtmc(tmp_path, "record", "--json", "--", sys.executable, "-m", "pkg")
    assert answer.code == 0, answer.err
    (target,) = answer.document["targets"]
    shapes = {tuple(call["arguments"][0]["tensor"]["shape"]): call["count"] for call in target["calls"]}
    assert shapes == {(3, 5): 2, (3, 7): 1}


def test_processes_of_torch_multiprocessing_are_recorded(tmp_path: Path) -> None:
    """As torchrun's are: each is a Python of its own that inherits the environment."""
    project(
        tmp_path,
        "import torch\nimport torch.multiprocessing as mp\n\n\ndef work(x, w):\n    return torch.relu(x @ w)\n\n\n"
        "def main(rank):\n    work(torch.randn(4, 8), torch.randn(8, 2))\n\n\n"
        "if __name__ == '__main__':\n    mp.spawn(main, nprocs=2)\n",
    )
    answer = mtmc(tmp_path, "record", "--json", "--", sys.executable, "model.py")
    assert answer.code == 0, answer.err
    assert {target["qualname"]: target["calls"][0]["count"] for target in answer.document["targets"]} == {"work": 2}


def test_the_users_own_sitecustomize_and_path_are_as_without_us(tmp_path: Path) -> None:
    project(tmp_path, "import builtins, sys\nprint(builtins.marked, [p for p in sys.path if 'hook' in p])\n")
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "sitecustomize.py").write_text("import builtins\nbuiltins.marked = 'mine'\n")
    answer = mtmc(tmp_path, "record", "--", sys.executable, "model.py", PYTHONPATH=f"{tmp_path}/own:{_ours()}")
    assert "mine []" in answer.out, answer.err
    assert answer.code == 1
    assert "no function of this project was called with a tensor" in answer.out


def _ours() -> str:
    return str(Path(__file__).resolve().parents[2])


def test_a_failing_command_passes_its_code_on_and_keeps_what_was_seen(tmp_path: Path) -> None:
    project(tmp_path, "import torch\ndef f(x):\n    return x + 1\nf(torch.ones(2))\nraise SystemExit(7)\n")
    answer = mtmc(tmp_path, "record", "--", sys.executable, "model.py")
    assert answer.code == 7
    assert "the command ended with exit code 7" in answer.out
    assert "# mtmc: x=f32[2]" in answer.out


def test_an_interpreter_that_cannot_be_watched_is_told(tmp_path: Path) -> None:
    project(tmp_path, "pass\n")
    answer = mtmc(tmp_path, "record", "--", sys.executable, "-I", "model.py")
    assert answer.code == 1
    assert "started with -E, -I or -S" in answer.out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--", "no-such-program"], "cannot start no-such-program"),
        (["--target", "model.py::los", "--", "true"], "Available targets: loss"),
        (["--target", "absent.py::f", "--", "true"], "no such file"),
        (["--target", "loss", "--", "true"], "cannot read 'loss'"),
        ([], "COMMAND"),
    ],
)
def test_a_wrong_request_is_told(arguments: list[str], words: str, tmp_path: Path) -> None:
    project(tmp_path, TRAIN)
    answer = mtmc(tmp_path, "record", "--json", *arguments)
    assert answer.code == 2
    assert words in f"{answer.error['message']} {answer.error['remedy']}"


CONTAINERS = """\
from dataclasses import dataclass
from typing import NamedTuple

import torch


class Rope(NamedTuple):
    cos: torch.Tensor
    sin: torch.Tensor


@dataclass
class Batch:
    ids: torch.Tensor
    weights: dict
    scale: float = 1.0


def combined(x, rope, batch, *more, **named):
    return x * rope.cos + batch.weights["w"] * batch.scale + more[0] * named["mask"] + rope.sin
"""
CONTAINERS_TRAIN = """\
import torch
from layers import Batch, Rope, combined

x = torch.randn(4, 6)
for scale in (2.0, 3.0):
    batch = Batch(torch.arange(4), {"w": torch.randn(4, 1).expand(4, 6)}, scale)
    combined(x, Rope(x, x), batch, torch.randn(6), mask=torch.ones(4, 6))
"""


def test_tuples_dataclasses_and_further_arguments_are_recorded_and_optimised(tmp_path: Path) -> None:
    project(tmp_path, CONTAINERS_TRAIN)
    (tmp_path / "layers.py").write_text(CONTAINERS)
    answer = mtmc(tmp_path, "record", "--", sys.executable, "model.py")
    directive = (
        "# mtmc: x=f32[4,6] rope=Rope(cos=f32[4,6],sin=f32[4,6]) "
        "batch=Batch(ids=i64[4]@0..3,weights={'w': f32[4,6]{1,0}},scale=2.0) more=(f32[6],) named={'mask': f32[4,6]}"
    )
    assert f"2  {directive}" in answer.out
    answer = mtmc(tmp_path, "optimize", "layers.py::combined", "--apply", "--json", **NO_GPU)
    assert answer.code == 0, answer.err
    edited = (tmp_path / "layers.py").read_text()
    assert "type(batch.weights) is dict and [*batch.weights] == ['w']" in edited
    assert "len(more) == 1" in edited


COMPILED = """\
import torch
from torch import nn


def gated(x, y):
    return torch.sigmoid(x) * y


def shared(x):
    return torch.relu(x) + 1


class Inner(nn.Module):
    def forward(self, x):
        return torch.tanh(x) * 2


class Outer(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Inner()

    def forward(self, x):
        return self.inner(x) - gated(x, x)


def bounded(x):
    return x.clamp(0, 1)


act = lambda x: x.relu() * 2


def around(x, k):
    def inner(x):
        return x + 1

    def closure(x):
        return x * k

    return closure(inner(x))


def main():
    x = torch.randn(4, 8)
    outer = Outer()
    outer.compile(backend="eager")
    fast = torch.compile(shared, backend="eager")
    for _ in range(3):
        outer(x)
        fast(x)
        bounded(x)
    shared(x)
    around(act(x), 2)


if __name__ == "__main__":
    with torch.no_grad():
        main()
"""


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a program that was recorded and compiles some of its calls."""
    folder = tmp_path_factory.mktemp("compiled")
    project(folder, COMPILED)
    answer = mtmc(folder, "record", "--", sys.executable, "model.py")
    assert answer.code == 0, answer.err
    assert "model.py::shared  4 calls, all the same, compiled" in answer.out
    assert "model.py::Outer.forward  3 calls, all the same, compiled" in answer.out
    assert "model.py::bounded  3 calls, all the same\n" in answer.out
    assert "model.py::gated  only inside code of torch.compile, where its inputs are not known" in answer.out
    return folder


def test_compiled_calls_and_calls_inside_compiled_code_are_told_from_eager_calls(compiled: Path) -> None:
    records = {
        record["qualname"]: record
        for record in map(json.loads, (compiled / ".mtmc" / "records.jsonl").read_text().splitlines())
    }
    counts = {name: [(call["count"], call["compiled"]) for call in item["calls"]] for name, item in records.items()}
    assert counts == {
        "act": [(1, 0)],
        "around": [(1, 0)],
        "around.inner": [(1, 0)],
        "Outer.forward": [(3, 3)],
        "shared": [(4, 3)],
        "bounded": [(3, 0)],
        "gated": [],
        "Inner.forward": [],
    }
    assert {name for name, item in records.items() if item["traced"]} == {"gated", "Inner.forward"}


@pytest.mark.parametrize(
    ("name", "baseline"),
    [("shared", "compile"), ("Outer", "compile"), ("Outer.forward", "compile"), ("bounded", "eager")],
)
def test_a_version_must_beat_what_the_recorded_program_runs(compiled: Path, name: str, baseline: str) -> None:
    target = open_target(parse_request(f"{compiled / 'model.py'}::{name}", Settings(), sys.executable))
    assert Pipeline(target).baseline == baseline
    eager = open_target(parse_request(f"{compiled / 'model.py'}::{name}", Settings(baseline="eager"), sys.executable))
    assert Pipeline(eager).baseline == "eager"


def test_a_target_inside_compiled_code_with_a_directive_must_beat_the_compiler(compiled: Path) -> None:
    text = (compiled / "model.py").read_text().replace("def gated", "# mtmc: x=f32[4,8] y=f32[4,8]\ndef gated")
    request = parse_request(f"{compiled / 'model.py'}::gated", Settings(), sys.executable)
    assert Pipeline(open_target(request, text.encode())).baseline == "compile"
    answer = mtmc(compiled, "plan", "model.py::gated", "--json")
    assert (answer.code, answer.error["code"]) == (2, "no-workload")
    assert "its recorded calls are inside code of torch.compile" in answer.error["message"]
