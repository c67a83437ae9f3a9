"""Targets that change more than they return, draw random numbers, ask for CUDA or for gradients: right, or refused."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from runner import environment, mtmc, project

from mtmc_lsp.verify.worker.interpreter.source import on_cpu

NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}

REFUSED = """\
import torch
from torch import nn


# mtmc: x=f32[8,48]
def noisy(x):
    y = torch.relu(x)
    return torch.softmax(y + torch.poisson(x.abs()), -1)


# mtmc: x=f32[8,48]
def chosen(x):
    y = torch.relu(x)
    return torch.softmax(y[y > 0], -1)


# mtmc: x=f32[8,48]
def to_cuda(x):
    y = torch.relu(x)
    return torch.softmax(y.cuda(), -1)


# mtmc: x=f32[8,48]
class Rebinds(nn.Module):
    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls = 2
        return torch.relu(x)


SEEN = []


# mtmc: x=f32[8,48]
def logs(x):
    SEEN.append(x.shape)
    return torch.softmax(x, -1)


# mtmc: x=f32[8,48]
def undefined(x):
    return torch.softmax((x - 100).log(), -1)
"""


@pytest.mark.parametrize(
    ("name", "code", "kind", "words", "place"),
    [
        (
            "noisy",
            2,
            "unsupported",
            "draws random numbers (poisson)",
            "    return torch.softmax(y + torch.poisson",
        ),
        ("chosen", 2, "unsupported", "values of a tensor", "    return torch.softmax(y[y > 0], -1)"),
        ("to_cuda", 3, "environment", "this machine has no CUDA GPU", "    return torch.softmax(y.cuda(), -1)"),
        ("Rebinds", 2, "unsupported", "assigns self.calls", "        self.calls = 2"),
        ("logs", 2, "unsupported", "changes SEEN", "def logs(x):"),
        ("undefined", 2, "target-raises", "returns only NaN on the workload's inputs", "def undefined(x):"),
    ],
    ids=lambda value: value if isinstance(value, str) and value.isidentifier() else "",
)
def test_what_cannot_be_right_is_refused_with_place_and_remedy(
    name: str, code: int, kind: str, words: str, place: str, tmp_path: Path
) -> None:
    file = project(tmp_path, REFUSED)
    answer = mtmc(tmp_path, "optimize", f"model.py::{name}", "--apply", "--json", **NO_GPU)
    assert (answer.code, answer.error["code"]) == (code, kind), answer.err
    assert words in answer.error["message"]
    line = next(i for i, text in enumerate(REFUSED.splitlines(), 1) if text.startswith(place))
    assert (answer.error["path"], answer.error["line"]) == (str(file), line)
    assert answer.error["remedy"]
    assert file.read_text() == REFUSED


def test_a_name_that_is_nearly_right_is_suggested(tmp_path: Path) -> None:
    project(tmp_path, REFUSED)
    answer = mtmc(tmp_path, "optimize", "model.py::Rebind.forwrd", "--json")
    assert "Rebinds.forward" in answer.error["remedy"]


UNKNOWN = """\
import torch
from torch import nn


class Block(nn.Module):
    def __init__(self, width, eps=1e-6):
        super().__init__()
        self.lin = nn.Linear(width, 2 * width)

    def forward(self, x, index, scale=1.0):
        return self.lin(x) * scale
"""


def test_the_directive_to_add_is_filled_in_as_far_as_the_code_tells(tmp_path: Path) -> None:
    file = project(tmp_path, UNKNOWN)
    answer = mtmc(tmp_path, "optimize", "model.py::Block", "--json")
    assert (answer.code, answer.error["code"], answer.error["line"]) == (2, "no-workload", 5)
    directive = "# mtmc: x=f32[64,1024] index=i64[64]@0..9 init: width=1024"
    assert directive in answer.error["remedy"]
    assert "mtmc record" in answer.error["remedy"]
    file.write_text(UNKNOWN.replace("class Block", f"{directive}\nclass Block"))
    assert mtmc(tmp_path, "plan", "model.py::Block", **NO_GPU).code == 0


CHANGES = """\
import torch
import torch.nn.functional as F
from torch import nn


# mtmc: x=f32[8,48]
def whole(x):
    x.add_(1)
    return torch.softmax(x * 2, -1)


# mtmc: x=f32[8,48]
def part(x):
    x[:, :4].mul_(2)
    return torch.softmax(x * 2, -1)


# mtmc: x=f32[8,48] y=f32[48]
def through_a_view(x, y):
    x.view(-1)[:48].copy_(y)
    return torch.softmax(x * 2, -1)


# mtmc: x=f32[8,48]
class Statistics(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(48))
        self.register_buffer("var", torch.ones(48))

    def forward(self, x):
        return torch.relu(F.batch_norm(x, self.mean, self.var, training=True))


# mtmc: x=f32[8,48]
class Counts(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(48))

    def forward(self, x):
        self.mean.mul_(0.9).add_(x.mean(0) * 0.1)
        return torch.relu(x - self.mean)


# mtmc: x=f32[8,48]
class Decays(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(48))

    def forward(self, x):
        with torch.no_grad():
            self.weight.mul_(0.5)
        return torch.relu(x * self.weight) + 1
"""

SAME = """\
import copy, sys
import torch
sys.path.insert(0, {folder!r})
import before, after


def state(module, name):
    torch.manual_seed(0)
    x, y = torch.randn(8, 48), torch.randn(48)
    target = getattr(module, name)
    is_module = isinstance(target, type)
    call = target() if is_module else target
    with torch.no_grad():
        results = [call(x, y) if name == "through_a_view" else call(x) for _ in range(2)]
    return [*results, x, y, *(call.state_dict().values() if is_module else [])]


for mine, own in zip(state(after, {name!r}), state(before, {name!r}), strict=True):
    torch.testing.assert_close(mine, own)
import mtmc_count
print("launches", mtmc_count.count)
"""

COUNT = """\
import triton.runtime.interpreter as interpreter
count = 0
original = interpreter.GridExecutor.__call__
def counted(self, *args, **kwargs):
    global count
    count += 1
    return original(self, *args, **kwargs)
interpreter.GridExecutor.__call__ = counted
"""


def run_beside(folder: Path, before: str, after: str, code: str) -> str:
    """Run a script that imports both versions of a file, the later one with its guard meaning the interpreter's CPU."""
    (folder / "before.py").write_text(before)
    (folder / "mtmc_count.py").write_text(COUNT)
    (folder / "after.py").write_text("import mtmc_count\n" + on_cpu(after, before))
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=folder,
        env={**environment(), "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=800,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("name", ["whole", "part", "through_a_view", "Statistics", "Counts", "Decays"])
def test_what_changes_its_inputs_or_its_state_changes_them_alike_or_stays_as_it_is(name: str, tmp_path: Path) -> None:
    """Arguments, a part or a view of one, running statistics, a buffer, a parameter."""
    file = project(tmp_path, CHANGES)
    answer = mtmc(tmp_path, "optimize", f"model.py::{name}", "--arch", "sm_90", "--apply", "--json", **NO_GPU)
    if answer.code == 1 and name in ("through_a_view", "Counts"):
        assert file.read_text() == CHANGES
        assert answer.document["status"] in ("no_gain", "incorrect")
        return
    assert answer.code == 0, answer.err
    said = run_beside(tmp_path, CHANGES, file.read_text(), SAME.format(folder=str(tmp_path), name=name))
    assert int(said.split()[-1]) >= 2


ASKED = """\
import torch
from torch import nn


# mtmc: x=f32[8,48] grad=x device=cuda
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(48))

    def forward(self, x):
        return torch.softmax(torch.relu(x * self.weight) + 1, -1)
"""

TRAINS = """\
import sys, torch
sys.path.insert(0, {folder!r})
import before, after, mtmc_count


def trained(module):
    torch.manual_seed(0)
    block = module.Block()
    optimizer = torch.optim.SGD(block.parameters(), lr=0.5)
    gradients = []
    for _ in range(3):
        x = torch.randn(8, 48, requires_grad=True)
        optimizer.zero_grad()
        block(x).square().sum().backward()
        optimizer.step()
        gradients += [x.grad, block.weight.grad.clone()]
    return [*gradients, block.weight.detach()]


for mine, own in zip(trained(after), trained(before), strict=True):
    assert torch.allclose(mine, own, rtol=1e-4, atol=1e-6)
print("launches in training", mtmc_count.count)
with torch.no_grad():
    after.Block()(torch.randn(8, 48))
print("launches", mtmc_count.count)
"""


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any], str]:
    """A run on a workload that asks for gradients and for CUDA, applied."""
    folder = tmp_path_factory.mktemp("asked")
    project(folder, ASKED)
    answer = mtmc(folder, "optimize", "model.py::Block", "--arch", "sm_90", "--apply", "--json", **NO_GPU)
    assert answer.code == 0, answer.err
    return folder, answer.document, answer.err


def test_a_workload_with_gradients_gets_a_backward_pass(asked) -> None:
    _, document, _ = asked
    assert document["workload"]["trains"] is True
    assert "torch.autograd.Function" in document["final"]["source"]
    names = {check["name"] for step in document["steps"] for check in step["verdict"]["checks"]}
    assert any("gradient of x" in name for name in names)


def test_the_applied_file_trains_with_the_same_gradients_and_runs_kernels_with_and_without_them(asked) -> None:
    folder, _, _ = asked
    said = run_beside(folder, ASKED, (folder / "model.py").read_text(), TRAINS.format(folder=str(folder)))
    training, launches = (int(line.split()[-1]) for line in said.splitlines())
    assert 3 < training < launches


def test_cuda_asked_for_and_absent_is_verified_and_said_to_be_unmeasured(asked) -> None:
    _, document, said = asked
    assert (document["workload"]["device"], document["status"]) == ("cuda", "unmeasured")
    assert "unmeasured: no CUDA GPU" in said
