"""The examples are plain PyTorch that a user can import, run on a CPU, and optimise as they stand."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from mtmc_lsp.core.dtypes import ITEMSIZE
from mtmc_lsp.process.module_files import load_file
from mtmc_lsp.source.targets import find_target
from mtmc_lsp.source.workload.directive import parse_directive

torch = pytest.importorskip("torch")
F = torch.nn.functional

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"

Run = Callable[[ModuleType], tuple[Any, Any]]
"""Calls an example at a small size; gives its result and the same thing computed another way."""


def rmsnorm_residual(module: ModuleType) -> tuple[Any, Any]:
    x, residual, weight = torch.randn(2, 3, 64), torch.randn(2, 3, 64), torch.randn(64)
    total = x + residual
    return module.rmsnorm_residual(x, residual, weight), (F.rms_norm(total, (64,), weight, eps=1e-6), total)


def swiglu(module: ModuleType) -> tuple[Any, Any]:
    block, x = module.SwiGLU(16, 40), torch.randn(2, 3, 16)
    gate, up, down = block.gate.weight, block.up.weight, block.down.weight
    return block(x), (F.silu(x @ gate.T) * (x @ up.T)) @ down.T


def bias_gelu_dropout(module: ModuleType) -> tuple[Any, Any]:
    x, bias = torch.randn(5, 64), torch.randn(64)
    torch.manual_seed(0)
    result = module.bias_gelu_dropout(x, bias, p=0.25)
    torch.manual_seed(0)
    kept = F.dropout(torch.ones(5, 64), p=0.25)
    assert 0.1 < (kept == 0).float().mean() < 0.4
    return result, F.gelu(x + bias) * kept


def label_smoothed_cross_entropy(module: ModuleType) -> tuple[Any, Any]:
    logits, target = torch.randn(7, 33), torch.randint(0, 33, (7,))
    result = module.label_smoothed_cross_entropy(logits, target)
    return result, F.cross_entropy(logits, target, label_smoothing=0.1)


def conv_block(module: ModuleType) -> tuple[Any, Any]:
    block, x = module.ConvBlock(8, 4), torch.randn(2, 8, 5, 6)
    groups = x.view(2, 4, -1)
    spread, mean = torch.var_mean(groups, dim=-1, unbiased=False, keepdim=True)
    normed = ((groups - mean) * torch.rsqrt(spread + 1e-5)).view_as(x)
    return block(x), (x + F.conv2d(F.silu(normed), block.conv.weight, block.conv.bias, padding=1)) * 0.7071


def rotary(module: ModuleType) -> tuple[Any, Any]:
    """A pair (x[i], x[i + half]) is turned by its angle, as a complex number is."""
    q, angles = torch.randn(1, 2, 3, 8), torch.randn(3, 4)
    result = module.apply_rotary(q, torch.cat((angles.cos(),) * 2, -1), torch.cat((angles.sin(),) * 2, -1))
    turned = torch.complex(q[..., :4], q[..., 4:]) * torch.polar(torch.ones_like(angles), angles)
    return result, torch.cat((turned.real, turned.imag), -1)


def masked_attention(module: ModuleType) -> tuple[Any, Any]:
    q, k, v = torch.randn(2, 3, 4, 8), torch.randn(2, 3, 6, 8), torch.randn(2, 3, 6, 8)
    mask = torch.zeros(4, 6).masked_fill(torch.ones(4, 6, dtype=torch.bool).triu(3), -math.inf)
    return module.masked_attention(q, k, v, mask), F.scaled_dot_product_attention(q, k, v, mask)


def temperature_softmax(module: ModuleType) -> tuple[Any, Any]:
    logits = torch.randn(3, 50)
    weights = torch.exp(logits / 0.5)
    return module.temperature_softmax(logits, temperature=0.5), weights / weights.sum(-1, keepdim=True)


def gemm_epilogue(module: ModuleType) -> tuple[Any, Any]:
    model, x, skip = module.Model(16, 12, 0.5), torch.randn(5, 16), torch.randn(5, 12)
    hidden = F.gelu(x @ model.linear.weight.T + model.linear.bias) * model.gain * 0.5
    return model(x, skip), F.silu(hidden.clamp(-3, 3) + skip)


def two_stages(module: ModuleType) -> tuple[Any, Any]:
    model, x = module.TwoStage(16), torch.randn(2, 5, 16)
    energy = (F.layer_norm(x, (16,)) * 0.5).square().mean(1)
    return model(x), energy / (energy.max(-1, keepdim=True).values + 1e-5)


def train_gpt(module: ModuleType) -> tuple[Any, Any]:
    x, weight, gate, up = torch.randn(6, 16), torch.randn(16), torch.randn(6, 24), torch.randn(6, 24)
    vocabulary, target = torch.randn(32, 16), torch.randint(32, (6,))
    results = module.rms_norm(x, weight), module.gated(gate, up), module.token_loss(x, vocabulary, target)
    log_probabilities = torch.log_softmax(x @ vocabulary.T, -1)
    loss = -log_probabilities[torch.arange(6), target].mean()
    return results, (F.rms_norm(x, (16,), weight, eps=1e-6), gate * torch.sigmoid(gate) * up, loss)


RUNS: dict[str, tuple[str, Run]] = {
    "rmsnorm_residual": ("rmsnorm_residual", rmsnorm_residual),
    "swiglu_mlp": ("SwiGLU", swiglu),
    "bias_gelu_dropout": ("bias_gelu_dropout", bias_gelu_dropout),
    "label_smoothed_cross_entropy": ("label_smoothed_cross_entropy", label_smoothed_cross_entropy),
    "groupnorm_silu_conv": ("ConvBlock", conv_block),
    "rotary_embedding": ("apply_rotary", rotary),
    "masked_attention": ("masked_attention", masked_attention),
    "temperature_softmax": ("temperature_softmax", temperature_softmax),
    "gemm_epilogue": ("Model", gemm_epilogue),
    "two_stage_module": ("TwoStage", two_stages),
    "train_gpt": ("rms_norm", train_gpt),
}
"""File to its target's name and how to run it."""

KERNELBENCH = frozenset({"gemm_epilogue"})
"""Examples that give their inputs by functions, not by a directive."""

MEMORY_BOUND = sorted(set(RUNS) - KERNELBENCH - {"swiglu_mlp", "masked_attention", "train_gpt"})
"""Examples whose time is that of moving their tensors."""


def load(name: str) -> ModuleType:
    return load_file(EXAMPLES / f"{name}.py")


def workload(name: str) -> Any:
    path = EXAMPLES / f"{name}.py"
    text = path.read_bytes()
    return parse_directive(text, find_target(text, str(path), RUNS[name][0]), str(path))


def test_every_example_file_is_tested() -> None:
    """A new file in the folder of examples must be added here."""
    assert {path.stem for path in EXAMPLES.glob("*.py")} == set(RUNS)


@pytest.mark.parametrize("name", RUNS)
def test_an_example_computes_what_it_says_on_a_cpu(name: str) -> None:
    """Imported and called at a small size, it equals the same thing computed another way."""
    torch.manual_seed(3)
    result, expected = RUNS[name][1](load(name))
    torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", sorted(set(RUNS) - KERNELBENCH))
def test_the_directive_of_an_example_is_read_and_its_constructor_accepts_it(name: str) -> None:
    """A user copies the directive from here, so it must be right."""
    found = workload(name)
    assert found is not None
    assert all(argument.tensor is not None for argument in found.arguments)
    if found.init_arguments:
        init = {argument.name: argument.constant for argument in found.init_arguments}
        with torch.device("meta"):
            assert getattr(load(name), RUNS[name][0])(**init) is not None


@pytest.mark.parametrize("name", MEMORY_BOUND)
def test_a_memory_bound_example_is_larger_than_the_caches(name: str) -> None:
    """At least 64 MB in one tensor, so that what is timed is device memory."""
    found = workload(name)
    sizes = [
        math.prod(size.value(found.sizes) for size in argument.tensor.shape) * ITEMSIZE[argument.tensor.dtype]
        for argument in found.arguments
    ]
    assert max(sizes) >= 64e6


@pytest.mark.parametrize("name", sorted(KERNELBENCH))
def test_the_kernelbench_example_has_the_three_things_the_format_asks_for(name: str) -> None:
    """``Model``, ``get_inputs`` and ``get_init_inputs``; the model accepts both lists."""
    module = load(name)
    with torch.device("meta"):
        model = module.Model(*module.get_init_inputs())
        inputs = module.get_inputs()
        assert model(*inputs).shape == (module.batch_size, module.out_features)
