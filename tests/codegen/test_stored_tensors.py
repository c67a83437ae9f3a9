"""Modules that store tensors between calls: hidden states, caches, running averages."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from mtmc_lsp.core.errors import TargetUnsupported
from mtmc_lsp.verify.worker.interpreter.source import on_cpu
from tests.codegen.harness import verified
from tests.planning.situations import fully_fused, start


def module(forward: str, *, init: str = "self.state = torch.randn(6, 20)", device: str = "") -> str:
    body = "".join(f"        {line}\n" for line in forward.split("\n"))
    return (
        "import torch\nimport torch.nn as nn\n\n\nclass Cell(nn.Module):\n    def __init__(self):\n"
        f"        super().__init__()\n        {init}\n\n    # mtmc: x=f32[6,20]\n    def forward(self, x):\n{body}"
    )


KEPT = {
    "a hidden state": (
        "self.state = torch.tanh(x + self.state)\nreturn self.state * 2",
        ["self.state = cell_results[1]"],
    ),
    "returned as it is": ("self.state = torch.tanh(x + self.state)\nreturn self.state", ["return cell_results[0]"]),
    "beside two results": (
        "y = torch.sigmoid(x) * self.state\nself.state = y + 1\nreturn y, y.sum(-1)",
        ["self.state = cell_results[2]", "return (cell_results[0], cell_results[1])"],
    ),
    "what it is given": (
        "y = x * self.state\nself.state = x\nreturn torch.relu(y) + 1",
        ["self.state = cell_results[1]"],
    ),
    "a cache that grows": (
        "self.state = torch.cat([self.state, x])\nreturn torch.softmax(self.state, -1) * 3",
        ["self.state = cell_results[1]"],
    ),
    "written into first": (
        "self.state.mul_(0.5)\nself.state = torch.tanh(x + self.state)\nreturn self.state.exp() + x",
        ["self.state = cell_results[1]"],
    ),
    "set to its start": (
        "self.state.copy_(x)\nself.state = torch.tanh(self.state * 3)\nreturn self.state + x",
        ["self.state = cell_results[1]", "state.copy_(x)"],
    ),
}


@pytest.mark.parametrize("name", KEPT)
def test_stored_tensors_match_the_original(name: str, captured) -> None:
    forward, expected = KEPT[name]
    text = module(forward)
    capture = captured(text, "Cell")
    candidate = fully_fused(capture, start(capture, text))
    for line in expected:
        assert line in candidate.source
    assert verified(capture, candidate).reason == ""


def test_a_buffer_may_be_replaced(captured) -> None:
    text = module(
        "self.mean = 0.9 * self.mean + 0.1 * x.mean(0)\nreturn torch.relu(x - self.mean)",
        init="self.register_buffer('mean', torch.zeros(20))",
    )
    capture = captured(text, "Cell")
    candidate = fully_fused(capture, start(capture, text))
    assert "self.mean = cell_results[1]" in candidate.source
    assert verified(capture, candidate).reason == ""


def test_a_tensor_that_the_first_call_creates_is_stored_and_no_condition_reads_it(captured) -> None:
    text = module(
        "self.mean = x.mean(-1, keepdim=True)\nself._center(x)\nreturn torch.relu(x - self.mean) * self.scale",
        init="pass\n\n    def _center(self, x):\n        self.scale = (x - self.mean).abs().amax(-1, keepdim=True)",
    )
    capture = captured(text, "Cell")
    candidate = fully_fused(capture, start(capture, text))
    guard = candidate.source.split("def cell_fits(")[1].split("\n\n\n")[0]
    assert "self.mean" not in guard and "self.scale" not in guard
    assert "self.mean = cell_results[1]" in candidate.source
    assert "self.scale = cell_results[2]" in candidate.source
    assert verified(capture, candidate).reason == ""


def test_a_tensor_of_a_submodule_is_stored_there(captured) -> None:
    text = (
        "import torch\nimport torch.nn as nn\n\n\nclass Step(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.last = None\n\n    def forward(self, x):\n"
        "        y = x if self.last is None else torch.tanh(x + self.last)\n        self.last = y * 0.5\n        return y\n\n\n"
        "class Net(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.steps = nn.ModuleList([Step(), Step()])\n\n    # mtmc: x=f32[6,20]\n    def forward(self, x):\n"
        "        for step in self.steps:\n            x = step(x) + 1\n        return x\n"
    )
    capture = captured(text, "Net")
    candidate = fully_fused(capture, start(capture, text))
    assert "self.steps[0].last = net_results[1]" in candidate.source
    assert "self.steps[1].last = net_results[2]" in candidate.source
    assert verified(capture, candidate).reason == ""


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("self.state = cell_results[1]\n", "pass\n"),
        ("self.state = cell_results[1]\n", "self.state = cell_results[0]\n"),
    ],
)
def test_a_candidate_that_stores_another_tensor_is_incorrect(right: str, wrong: str, captured) -> None:
    text = module(KEPT["a hidden state"][0])
    capture = captured(text, "Cell")
    candidate = fully_fused(capture, start(capture, text))
    assert right in candidate.source
    assert verified(capture, replace(candidate, source=candidate.source.replace(right, wrong))).reason != ""


@pytest.mark.parametrize(
    ("forward", "words"),
    [
        (
            "y = x + self.last if hasattr(self, 'last') else x\nself.last = y * 2\nreturn y + 1",
            "reads self.last, which its module does not have before the first call",
        ),
        ("self.calls = len(x)\nreturn x + 1", "self.calls"),
        ("self.state = 3\nreturn x + 1", "self.state"),
    ],
)
def test_refusals_name_the_reason(forward: str, words: str, captured) -> None:
    with pytest.raises(TargetUnsupported, match=words):
        captured(module(forward, init="self.calls, self.state = 0, torch.zeros(6, 20)"), "Cell")


CALLS = """
import torch, own, ours

torch.manual_seed(0)
cells = own.Cell(), ours.Cell()
cells[1].state = cells[0].state.clone()
with torch.no_grad():
    for number in range(4):
        x = torch.randn(6, 20)
        assert ours.cell_fits(cells[1], x)
        results = [cell(x) for cell in cells]
        torch.testing.assert_close(*results)
        torch.testing.assert_close(cells[0].state, cells[1].state)
        assert cells[0].state.shape[0] == 6 * (number + 2)
    cells[1].state = None
    assert not ours.cell_fits(cells[1], x), "its own code says what is wrong with that"
"""


def test_consecutive_calls_store_the_same_tensors_as_the_original(captured, tmp_path: Path) -> None:
    text = module(KEPT["a cache that grows"][0])
    capture = captured(text, "Cell")
    candidate = fully_fused(capture, start(capture, text))
    (tmp_path / "own.py").write_text(text)
    (tmp_path / "ours.py").write_text(on_cpu(candidate.source, text))
    env = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", CALLS], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


FIRST_CALL = """
import torch, own, ours

torch.manual_seed(0)
cells = own.Cell(), ours.Cell()
with torch.no_grad():
    for rows in (6, 6, 9):
        x = torch.randn(rows, 20)
        assert ours.cell_fits(cells[1], x)
        torch.testing.assert_close(*(cell(x) for cell in cells))
        torch.testing.assert_close(cells[0].mean, cells[1].mean)
"""


def test_the_first_call_runs_the_kernels_and_creates_the_stored_tensor(captured, tmp_path: Path) -> None:
    text = module("self.mean = x.mean(-1, keepdim=True)\nreturn torch.relu(x - self.mean)", init="pass")
    text = text.replace("x=f32[6,20]", "x=f32[N,20] N=6")
    capture = captured(text, "Cell")
    candidate = fully_fused(capture, start(capture, text))
    (tmp_path / "own.py").write_text(text)
    (tmp_path / "ours.py").write_text(on_cpu(candidate.source, text))
    env = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", FIRST_CALL], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
