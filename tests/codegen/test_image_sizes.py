"""Image sizes behind strided convolutions, pools and windows are free in units: kernels run for other images."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mtmc_lsp.core.sizes import conditions_hold
from mtmc_lsp.verify.worker.interpreter.source import on_cpu
from tests.codegen.harness import verified
from tests.planning.situations import fully_fused, start

HEAD = "import torch\nfrom torch import nn\nimport torch.nn.functional as F\n\n\n"
STRIDED = """class Strided(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(4, 8, 3, stride=2, padding=1)

    def forward(self, x):
        return F.relu(self.conv(x))
"""
PATCHES = """class Patches(nn.Module):
    def __init__(self):
        super().__init__()
        self.proj = nn.Conv2d(3, 16, 4, stride=4)

    def forward(self, x):
        return F.gelu(self.proj(x).flatten(2).transpose(1, 2))
"""
STEM = """class Stem(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, stride=2, padding=1)

    def forward(self, x):
        return F.max_pool2d(F.relu(self.conv(x)), 3, 2, 1)
"""
POOLS = "def pools(x):\n    return F.max_pool2d(x, 3, 2, 1) + torch.sigmoid(F.avg_pool2d(x, 3, 2, 1))\n"
UNPADDED = "def unpadded(x):\n    return F.avg_pool2d(x, 3, stride=1) * F.max_pool2d(x, 3, stride=1)\n"
LENGTHS = "def lengths(x):\n    return F.avg_pool1d(x, 4) * 2\n"
WINDOWS = """def windows(x):
    B, H, W, C = x.shape
    x = x.view(B, H // 7, 7, W // 7, 7, C)
    return F.gelu(x.permute(0, 1, 3, 2, 4, 5).contiguous().view(-1, 49, C))
"""
PADDED = """def padded(x):
    B, H, W, C = x.shape
    x = F.pad(x, (0, 0, 0, (4 - W % 4) % 4, 0, (4 - H % 4) % 4))
    B, H, W, C = x.shape
    return x.view(B, H // 4, 4, W // 4, 4, C).transpose(2, 3).reshape(-1, 16, C).exp()
"""
MERGING = """def merging(x):
    return torch.cat([x[:, 0::2, 0::2], x[:, 1::2, 0::2], x[:, 0::2, 1::2], x[:, 1::2, 1::2]], -1) * 2
"""
CUT_OFF = "def cut_off(x):\n    return F.max_pool2d(x, 3, 3, 1) * 2\n"
CHAINED = "def chained(x):\n    return F.max_pool2d(F.avg_pool2d(F.relu(x), 2), 3, 2) + 1\n"
FOLDED = "def folded(x):\n    return F.relu(F.pixel_unshuffle(x, 2))\n"

CASES = {
    # Code, workload, shapes for which the kernels run, and shapes for which the original code runs.
    "Strided": (STRIDED, "x=f32[B,4,H,W] B=2 H=12 W=16", [(1, 4, 8, 30), (3, 4, 22, 10)], [(2, 4, 13, 16)]),
    "Patches": (PATCHES, "x=f32[B,3,H,W] B=2 H=16 W=24", [(1, 3, 32, 12), (3, 3, 20, 8)], [(2, 3, 18, 24)]),
    "Stem": (STEM, "x=f32[B,3,H,W] B=2 H=16 W=24", [(1, 3, 32, 12), (3, 3, 20, 8)], [(2, 3, 18, 24)]),
    "pools": (POOLS, "x=f32[B,C,H,W] B=2 C=3 H=12 W=16", [(1, 3, 8, 30), (3, 5, 22, 10)], [(2, 3, 12, 15)]),
    "unpadded": (UNPADDED, "x=f32[B,C,H,W] B=2 C=3 H=12 W=16", [(1, 3, 9, 30), (3, 5, 3, 3)], []),
    "lengths": (LENGTHS, "x=f32[B,C,T] B=2 C=3 T=16", [(1, 3, 8), (3, 5, 24)], [(2, 3, 18)]),
    "windows": (WINDOWS, "x=f32[B,H,W,4] B=2 H=14 W=28", [(1, 35, 14, 4), (3, 14, 14, 4)], []),
    "padded": (
        PADDED,
        "x=f32[B,H,W,8] B=2 H=10 W=16",
        [(1, 14, 8, 8), (3, 6, 20, 8)],
        [(2, 12, 16, 8), (2, 10, 15, 8)],
    ),
    "merging": (MERGING, "x=f32[B,H,W,8] B=2 H=8 W=16", [(1, 14, 8, 8), (3, 6, 20, 8)], []),
    "cut_off": (CUT_OFF, "x=f32[B,4,H,W] B=2 H=9 W=15", [(1, 4, 6, 3), (2, 4, 3, 12)], [(1, 4, 10, 12)]),
    "chained": (CHAINED, "x=f32[B,4,H,W] B=2 H=22 W=26", [(1, 4, 6, 14)], [(1, 4, 8, 14), (1, 4, 2, 2)]),
    "folded": (FOLDED, "x=f32[B,4,H,W] B=2 H=8 W=16", [(1, 4, 14, 8), (3, 4, 6, 20)], []),
}


CALLS = """
import sys
import torch
import original, ours
from mtmc_lsp.verify.worker.run_target import LaunchCount

name, accepted, refused = sys.argv[1], *map(eval, sys.argv[2:])
targets = [getattr(original, name), getattr(ours, name)]
if name[0].isupper():
    targets = [target().eval() for target in targets]
    targets[1].load_state_dict(targets[0].state_dict())


def result(target, x):
    try:
        return target(x)
    except RuntimeError:
        return torch.zeros(())


launches = LaunchCount()
with torch.no_grad(), launches.counting():
    for shape in (*accepted, *refused):
        before, x = launches.count, torch.randn(shape)
        torch.testing.assert_close(result(targets[1], x), result(targets[0], x), rtol=1e-4, atol=1e-5)
        assert (launches.count > before) is (shape in accepted), shape
"""


@pytest.mark.parametrize("name", CASES)
def test_kernels_run_for_other_image_sizes(captured, name: str, tmp_path: Path) -> None:
    code, workload, accepted, refused = CASES[name]
    text = f"{HEAD}# mtmc: {workload}\n{code}"
    capture = captured(text, name)
    candidate = fully_fused(capture, start(capture, text))
    assert verified(capture, candidate).reason == ""
    (tmp_path / "original.py").write_text(text)
    (tmp_path / "ours.py").write_text(on_cpu(candidate.source, text))
    env = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    command = [sys.executable, "-c", CALLS, name, repr(accepted), repr(refused)]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_an_image_that_is_smaller_than_a_window_is_left_to_the_users_code(captured) -> None:
    graph = captured(f"{HEAD}# mtmc: x=f32[B,3,H,W] B=2 H=12 W=16\n{UNPADDED}", "unpadded").graph
    assert conditions_hold(graph.conditions, {"B": 1, "H": 3, "W": 3})
    assert not conditions_hold(graph.conditions, {"B": 1, "H": 2, "W": 3})


@pytest.mark.parametrize("workload", ["x=f32[2,3,12,16]", "x=f32[B,3,12,16] B=2"])
def test_image_sizes_that_the_workload_states_as_numbers_stay_constant(captured, workload: str) -> None:
    graph = captured(f"{HEAD}# mtmc: {workload}\n{POOLS}", "pools").graph
    assert [str(size) for size in graph.inputs[0].type.shape[2:]] == ["12", "16"]


@pytest.mark.parametrize(
    ("name", "workload", "note"),
    [
        (
            "Strided",
            "x=f32[B,4,H,12] B=2 H=13",
            "H must be a multiple of 2 plus 1, because of line 13: `return F.relu(self.conv(x))`",
        ),
        ("pools", "x=f32[B,3,12,T] B=2 T=3", "T is fixed at 3"),
    ],
)
def test_a_note_says_which_images_run_the_kernels(captured, name: str, workload: str, note: str) -> None:
    assumed = captured(f"{HEAD}# mtmc: {workload}\n{CASES[name][0]}", name).workload.assumed
    assert len(assumed) == 1
    assert assumed[0].startswith(note)
