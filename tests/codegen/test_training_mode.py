"""Modules in training mode: batch norm uses the batch's statistics and updates the running ones in place."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mtmc_lsp.core.action import ActionKind
from mtmc_lsp.core.errors import TargetUnsupported
from mtmc_lsp.core.results import VerdictStatus
from mtmc_lsp.core.workload import Capture
from mtmc_lsp.rewrites import ir_of
from mtmc_lsp.schedule.schedule import Schedule
from mtmc_lsp.tuning.torch_cost import torch_cost
from tests.codegen.checker import planned
from tests.codegen.harness import fused, verified
from tests.planning.situations import H200, act, fully_fused, schedule_of, start

BODIES = {
    "images": ("nn.Conv2d(3, 6, 3)", "nn.BatchNorm2d(6)", "torch.randn(3, 3, 7, 7)"),
    "rows": ("nn.Linear(5, 6)", "nn.BatchNorm1d(6)", "torch.randn(9, 5)"),
    "volumes": ("nn.Conv3d(2, 4, 2)", "nn.BatchNorm3d(4, momentum=0.3)", "torch.randn(2, 2, 3, 4, 4)"),
    "without statistics": (
        "nn.Conv2d(3, 6, 3)",
        "nn.BatchNorm2d(6, track_running_stats=False)",
        "torch.randn(3, 3, 7, 7)",
    ),
    "without parameters": ("nn.Conv2d(3, 6, 1)", "nn.BatchNorm2d(6, affine=False)", "torch.randn(3, 3, 4, 4)"),
}
STEPS = """class Steps(nn.BatchNorm1d):
    def __init__(self):
        super().__init__(6)

    def forward(self, x):
        return super().forward(x[1:] - x[:-1])


"""
SPLIT = {"rows": 2, "block": 16, "loop": True, "split": 2, "warps": 4, "stages": 2}


def module(first: str, norm: str, x: str, more: str = "") -> str:
    return f"""import torch
import torch.nn as nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = {first}
        self.norm = {norm}
        {more}

    def forward(self, x):
        return torch.relu(self.norm(self.first(x)))


def get_inputs():
    return [{x}]


def get_init_inputs():
    return []
"""


IMAGES = module(*BODIES["images"])
TWICE = """import torch
import torch.nn as nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.BatchNorm2d(3), nn.BatchNorm2d(3)
        self.register_buffer("calls", torch.tensor(0))

    def forward(self, x):
        self.calls += 2
        return torch.relu(self.b(torch.sort(self.a(x), -1).values))


def get_inputs():
    return [torch.randn(4, 3, 5, 5)]


def get_init_inputs():
    return []
"""


def first_of(capture: Capture, word: str) -> str:
    return next(node.name for node in capture.graph.nodes if node.word == word)


@pytest.mark.parametrize("name", BODIES)
def test_batch_and_running_statistics_equal_the_users(captured, name: str) -> None:
    text = module(*BODIES[name])
    capture = captured(text, "Net")
    assert capture.graph.constants["self.norm.training"] is True
    candidate = planned(capture)
    assert candidate.launches
    verdict = verified(capture, candidate)
    assert verdict.status is VerdictStatus.CORRECT, verdict.reason


def test_running_statistics_are_updated_in_place(captured) -> None:
    capture = captured(IMAGES, "Net")
    nodes = [first_of(capture, "batch_norm"), first_of(capture, "relu")]
    for config in ({}, SPLIT):
        candidate = fused(capture, IMAGES, config, nodes)
        launcher = candidate.source.split("def net_launch(")[1].split("return")[0]
        assert ".copy_(" not in launcher
        assert "norm_num_batches_tracked.add_(1)" in launcher
        verdict = verified(capture, candidate)
        assert verdict.is_correct, verdict.reason


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("norm_running_mean * 0.9", "norm_running_mean * 0.91"),
        ("/ count * 0.1", "/ n_cols * 0.1"),
        ("norm_num_batches_tracked.add_(1)", "norm_num_batches_tracked.add_(2)"),
        ("norm_num_batches_tracked.add_(1)", "pass"),
        (
            "tl.store(new_norm_running_var_ptr",
            "tl.load(new_norm_running_var_ptr) if True else tl.store(new_norm_running_var_ptr",
        ),
    ],
)
def test_wrong_running_statistics_are_detected(captured, old: str, new: str) -> None:
    capture = captured(IMAGES, "Net")
    nodes = [first_of(capture, "batch_norm"), first_of(capture, "relu")]
    candidate = fused(capture, IMAGES, SPLIT, nodes)
    assert old in candidate.source
    wrong = replace(candidate, source=candidate.source.replace(old, new))
    assert "afterwards" in verified(capture, wrong).reason


def test_torch_calls_update_their_statistics_in_place(captured) -> None:
    """A functional batch norm would allocate the new statistics and copy them."""
    capture = captured(IMAGES, "Net")
    candidate = fused(capture, IMAGES, {}, [first_of(capture, "relu")])
    launcher = candidate.source.split("def net_launch(")[1].split("return")[0]
    assert "torch.nn.functional.batch_norm(" in launcher and "legit" not in launcher and ".copy_(" not in launcher
    verdict = verified(capture, candidate)
    assert verdict.is_correct, verdict.reason


def test_call_counters_use_one_launch_per_increment(captured) -> None:
    capture = captured(TWICE, "Net")
    candidate = planned(capture)
    launcher = candidate.source.split("def net_launch(")[1].split("return")[0]
    assert launcher.count("torch._foreach_add_(") == 1
    assert "calls.add_(2)" in launcher
    verdict = verified(capture, candidate)
    assert verdict.is_correct, verdict.reason


@pytest.mark.parametrize(
    ("norm", "x", "condition"),
    [
        ("nn.BatchNorm1d(6)", "torch.randn(9, 6)", "x.shape[0] > 1"),
        ("nn.BatchNorm2d(6)", "torch.randn(3, 6, 2, 2)", "x.shape[0] * x.shape[2] * x.shape[3] > 1"),
        ("nn.InstanceNorm1d(6)", "torch.randn(3, 6, 4)", "x.shape[2] > 1"),
        ("nn.GroupNorm(6, 6)", "torch.randn(3, 6)", "x.shape[0] > 1"),
        ("Steps()", "torch.randn(9, 6)", "x.shape[0] - 1 > 1"),
    ],
)
def test_statistics_of_one_value_run_the_original_code_which_raises(captured, norm, x, condition) -> None:
    text = module("nn.Identity()", norm, x).replace("class Net", f"{STEPS}class Net")
    candidate = planned(captured(text, "Net"))
    assert f"and {condition}\n" in candidate.source.split("def net_fits(")[1].split("def ")[0]


def test_a_module_that_is_constructed_in_evaluation_mode_stays_in_it(captured) -> None:
    text = module(*BODIES["images"], more="self.eval()")
    capture = captured(text, "Net")
    assert capture.graph.constants["self.norm.training"] is False
    assert not capture.graph.mutations


def test_other_workloads_run_in_evaluation_mode(captured) -> None:
    text = IMAGES.partition("def get_inputs")[0].replace("class Net", "# mtmc: x=f32[3,3,7,7]\nclass Net")
    assert captured(text, "Net").graph.constants["self.norm.training"] is False


def test_a_lazy_module_is_refused_with_a_remedy(captured) -> None:
    text = module("nn.Identity()", "nn.LazyBatchNorm1d()", "torch.randn(9, 6)")
    with pytest.raises(TargetUnsupported, match="before the first call"):
        captured(text, "Net")


def test_a_cuda_graph_may_change_buffers_and_says_which(captured) -> None:
    capture = captured(IMAGES, "Net")
    candidate = fully_fused(capture, start(capture, IMAGES))
    replayed = act(capture, candidate, ActionKind.CUDA_GRAPH, launches=1)
    assert schedule_of(replayed).cuda_graph
    held = "first_weight, first_bias, norm_weight, norm_bias, norm_running_mean, norm_running_var, norm_num_batches_tracked"
    call = " ".join(replayed.source.split("return _run_cuda_graph(")[1].split(")\n\n")[0].split())
    assert held in call and "(4, 5, 6)" in call


def test_batch_norm_with_few_channels_is_slow_in_the_library(captured) -> None:
    """One thread block computes a channel's statistics, so fewer channels with the same elements take longer."""

    def microseconds(shape: str, channels: int) -> float:
        text = module("nn.Identity()", f"nn.BatchNorm2d({channels})", f"torch.empty({shape})")
        capture = captured(text, "Net")
        ir = ir_of(capture.graph, Schedule())
        return torch_cost(ir, capture.graph.node(first_of(capture, "batch_norm")), H200).us

    assert microseconds("8, 4, 512, 512", 4) > 2.0 * microseconds("8, 64, 128, 128", 64)
