"""Modules with hooks that compute a parameter: weight and spectral norm are part of the graph, other hooks are not."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.nn.utils import remove_weight_norm

from mtmc_lsp.core.errors import TargetUnsupported
from mtmc_lsp.core.workload import Capture
from mtmc_lsp.guard.worker.observed_calls import explain
from tests.codegen.harness import verified
from tests.planning.situations import fully_fused, start

TEXT = """
import torch
from torch import nn
from torch.nn.utils import spectral_norm, weight_norm


# mtmc: x=f32[B,16] B=4 module=eval
class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.scaled = weight_norm(nn.Linear(16, 16))
        self.bounded = spectral_norm(nn.Linear(16, 16))

    def forward(self, x):
        return x + torch.tanh(self.bounded(torch.relu(self.scaled(x))))
"""
Change = Callable[[Any], object]


def normed(module: ModuleType) -> Any:
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return module.Normed().eval()


def test_the_kernels_read_the_parameters_that_the_module_has(
    optimised: Callable[[str, str], tuple[Capture, str]],
) -> None:
    capture, _ = optimised(TEXT, "Normed")
    accesses = {item.access for item in capture.graph.inputs}
    assert {"self.scaled.weight_g", "self.scaled.weight_v", "self.bounded.weight_orig"} <= accesses
    assert not {"self.scaled.weight", "self.bounded.weight"} & accesses


def test_kernels_give_the_results_of_eager_mode_and_set_the_computed_parameters(
    optimised: Callable[[str, str], tuple[Capture, str]],
) -> None:
    """All cases have other values of the parameters; the attributes after the call are compared too."""
    capture, _ = optimised(TEXT, "Normed")
    assert {item.access for item in capture.workload.state} == {"self.scaled.weight", "self.bounded.weight"}
    verdict = verified(capture, fully_fused(capture, start(capture, TEXT)))
    assert verdict.is_correct, verdict.reason


@torch.no_grad()
def test_the_captured_hooks_let_the_kernels_run(load: Callable[[str, str], ModuleType]) -> None:
    module = load(TEXT, "Normed")
    assert module.normed_fits(normed(module), torch.ones(3, 16))


def _other_settings(item: Any) -> None:
    next(iter(item.scaled._forward_pre_hooks.values())).dim = 1


CHANGES: dict[str, Change] = {
    "one more hook": lambda item: item.scaled.register_forward_hook(lambda *_: None),
    "one more hook before": lambda item: item.scaled.register_forward_pre_hook(lambda *_: None),
    "other settings": _other_settings,
    "no hooks": lambda item: item.scaled._forward_pre_hooks.clear(),
}


@torch.no_grad()
@pytest.mark.parametrize("name", CHANGES)
def test_other_hooks_run_the_original_code(load: Callable[[str, str], ModuleType], name: str) -> None:
    module = load(TEXT, "Normed")
    item, x = normed(module), torch.ones(3, 16)
    CHANGES[name](item)
    assert not module.normed_fits(item, x)
    assert explain(module.normed_fits, (item, x), {}).reason == (
        "self.scaled has other hooks, or other settings of them; the kernels were made for WeightNorm"
    )


@torch.no_grad()
def test_a_removed_weight_norm_runs_the_original_code(load: Callable[[str, str], ModuleType]) -> None:
    module = load(TEXT, "Normed")
    item = normed(module)
    remove_weight_norm(item.scaled)
    assert not module.normed_fits(item, torch.ones(3, 16))


HOOKED = """
import torch
from torch import nn

SEEN = []


def doubled(layer, arguments, result):
    return 2 * result


def noted(layer, arguments, result):
    SEEN.append(result.shape)


# mtmc: x=f32[B,16] B=4 module=eval
class Hooked(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(16, 16)
        self.layer.register_forward_hook(doubled)

    def forward(self, x):
        return torch.tanh(self.layer(x))
"""


def test_a_function_of_the_file_that_is_a_hook_is_part_of_the_kernels(
    optimised: Callable[[str, str], tuple[Capture, str]],
) -> None:
    capture, _ = optimised(HOOKED, "Hooked")
    verdict = verified(capture, fully_fused(capture, start(capture, HOOKED)))
    assert verdict.is_correct, verdict.reason


def _moved_before(layer: Any, hook: Callable[..., Any]) -> None:
    layer._forward_hooks.clear()
    layer.register_forward_pre_hook(hook)


HOOK_CHANGES: dict[str, Callable[[ModuleType, Any], object]] = {
    "no hook": lambda module, layer: layer._forward_hooks.clear(),
    "twice": lambda module, layer: layer.register_forward_hook(module.doubled),
    "another function": lambda module, layer: layer.register_forward_hook(module.noted),
    "at another time": lambda module, layer: _moved_before(layer, module.doubled),
}


@torch.no_grad()
@pytest.mark.parametrize("name", HOOK_CHANGES)
def test_the_kernels_run_for_exactly_the_captured_functions(load: Callable[[str, str], ModuleType], name: str) -> None:
    module = load(HOOKED, "Hooked")
    item, x = module.Hooked().eval(), torch.ones(3, 16)
    assert module.hooked_fits(item, x)
    HOOK_CHANGES[name](module, item.layer)
    assert not module.hooked_fits(item, x)
    assert explain(module.hooked_fits, (item, x), {}).reason == (
        "self.layer has other hooks, or other settings of them; the kernels were made for doubled"
    )


def test_the_code_of_a_hook_is_compared_like_that_of_other_functions(load: Callable[[str, str], ModuleType]) -> None:
    assert "doubled" in load(HOOKED, "Hooked").hooked_up_to_date.__code__.co_names


def test_a_hook_with_another_effect_is_refused(captured: Callable[[str, str], Capture]) -> None:
    with pytest.raises(TargetUnsupported, match="changes SEEN"):
        captured(HOOKED.replace("register_forward_hook(doubled)", "register_forward_hook(noted)"), "Hooked")


def test_a_hook_without_a_name_in_the_file_is_not_part_of_the_kernels(captured: Callable[[str, str], Capture]) -> None:
    text = HOOKED.replace("register_forward_hook(doubled)", "register_forward_hook(lambda *values: 2 * values[2])")
    capture = captured(text, "Hooked")
    assert all(not module.hooks for module in capture.graph.modules)
