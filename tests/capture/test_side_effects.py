"""Side effects of a target are detected and reported with line and remedy."""

from __future__ import annotations

import pytest

from mtmc_lsp.core.errors import EnvironmentNotAble, MtmcError, TargetUnsupported

HEAD = "import logging, random\n\nimport numpy\nimport torch\nfrom torch import nn\n\nLOG = []\nCALLS = 0\n\n\n# mtmc: x=f32[8,48]\n"
"""Targets start at line 12."""


def refusal(captured, text: str) -> MtmcError:
    with pytest.raises(MtmcError) as caught:
        captured(HEAD + text, "f")
    assert caught.value.remedy
    assert caught.value.where is not None
    return caught.value


def module(forward: str) -> str:
    return (
        "class f(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.register_buffer('mean', torch.zeros(48))\n        self.calls = 0\n\n"
        f"    def forward(self, x):\n        {forward}\n        return torch.relu(x - self.mean)\n"
    )


@pytest.mark.parametrize(
    ("text", "words", "line"),
    [
        ("def f(x):\n    LOG.append(1)\n    return x + 1\n", "changes LOG", 12),
        ("def f(x):\n    global CALLS\n    CALLS += 1\n    return x + 1\n", "changes CALLS", 12),
        ("def f(x):\n    random.random()\n    return x + 1\n", "Python's random module", 12),
        ("def f(x):\n    y = x + 1\n    print(y.shape)\n    return y\n", "prints", 14),
        ("def f(x):\n    y = x + 1\n    logging.warning('y')\n    return y\n", "writes to a log", 14),
        ("def f(x):\n    numpy.random.rand()\n    return x + 1\n", "numpy's global generator", 12),
        ("def f(x):\n    y = x + 1\n    return y * torch.multinomial(y.abs(), 1)\n", "(multinomial)", 14),
        ("def f(x):\n    y = x + 1\n    return y + torch.poisson(y.abs())\n", "(poisson)", 14),
        (module("self.calls = 2"), "assigns self.calls", 19),
        (module("self.calls += 1"), "changes self.calls", 12),
        ("def f(x):\n    y = x + 1\n    return y[y > 0]\n", "values of a tensor", 14),
        ("def f(x):\n    y = x + 1\n    return torch.tensor(y.tolist())\n", "values of a tensor", 14),
        ("def f(x):\n    return {'a': x + 1, 'b': x.device}\n", "returns a dict with a device in it", 12),
        ("def f(x):\n    return x + 1, {1}\n", "returns a tuple with a set in it", 12),
        ("def f(x):\n    yield x + 1\n", "returns a generator", 12),
    ],
)
def test_a_side_effect_is_refused(captured, text: str, words: str, line: int) -> None:
    error = refusal(captured, text)
    assert isinstance(error, TargetUnsupported)
    assert words in error.message
    assert error.where is not None and error.where.line == line


@pytest.mark.parametrize(
    "text",
    [
        # A level that is off writes nothing.
        "def f(x):\n    logging.getLogger('user').debug('y')\n    return x + 1\n",
        # A cache that only the first call fills is not a side effect of every call.
        "def f(x):\n    if not LOG:\n        LOG.append(torch.float32)\n    return x + 1\n",
        "def f(x):\n    state = random.getstate()\n    random.random()\n    random.setstate(state)\n    return x + 1\n",
        module("self.mean.mul_(0.9).add_(x.mean(0))"),
        module("self.mean += x.mean(0)"),
        module("y = self.mean * 2"),
        # PyTorch's recurrent layers cache a list of their weights.
        "class f(nn.Module):\n    def __init__(self):\n        super().__init__()\n        self.net = nn.GRU(48, 4)\n\n"
        "    def forward(self, x):\n        return self.net(x)[0] * 2\n",
    ],
    ids=[
        "a log that is off",
        "cache",
        "generator put back",
        "in place",
        "in place by an operator",
        "reading",
        "recurrent",
    ],
)
def test_a_call_without_lasting_side_effects_is_captured(captured, text: str) -> None:
    assert captured(HEAD + text, "f").graph.nodes


@pytest.mark.skipif("__import__('torch').cuda.is_available()", reason="there is a GPU")
@pytest.mark.parametrize("text", ["x.cuda()", "x.to('cuda')", "x + torch.ones(48, device='cuda')"])
def test_code_that_uses_cuda_without_a_gpu_is_an_error_of_the_environment(captured, text: str) -> None:
    error = refusal(captured, f"def f(x):\n    y = x + 1\n    return y * {text}\n")
    assert isinstance(error, EnvironmentNotAble)
    assert "this machine has no CUDA GPU" in error.message
    assert error.where is not None and error.where.line == 14


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("torch.from_numpy(y.numpy())", "f cannot be traced by torch.export"),
        ("y if torch.equal(x, y) else x", "f depends on the values of a tensor"),
    ],
)
def test_an_export_error_has_a_reason_without_torchs_advice(captured, text: str, problem: str) -> None:
    error = refusal(captured, f"def f(x):\n    y = x + 1\n    return x * ({text})\n")
    assert isinstance(error, TargetUnsupported)
    assert error.message.startswith(problem)
    assert error.where is not None and error.where.line == 14
    assert error.remedy
    for advice in ("file an issue", "draft_export", "TORCH_LOGS", "https://", "\n"):
        assert advice not in error.message


LAZY = """import sys, types

import torch


class Lazy(types.ModuleType):
    def __getattr__(self, name):
        raise ImportError(f"{name} needs a package that is not installed")


audio = Lazy("audio")


# mtmc: x=f32[8,48]
def f(x):
    return g(x) * 2


def g(x):
    return torch.relu(x)
"""


def test_a_lazy_module_beside_the_target_is_not_imported(captured) -> None:
    """Such modules import what they stand for at the first access of any attribute."""
    assert captured(LAZY, "f").graph.nodes


FINAL_SETTINGS = """import torch
from torch import nn


class Settings:
    scale = 2.0

    def __init__(self):
        self.offset = 1.0

    def __init_subclass__(cls):
        raise RuntimeError("Settings is final")


# mtmc: x=f32[8,48]
class f(nn.Module):
    def __init__(self):
        super().__init__()
        self.settings = Settings()

    def forward(self, x):
        return torch.relu(x * self.settings.scale + self.settings.offset)
"""


def test_a_module_may_keep_an_object_of_a_class_that_refuses_subclasses(captured) -> None:
    assert captured(FINAL_SETTINGS, "f").graph.nodes


@pytest.mark.parametrize("decorator", ["", "@torch.no_grad()\n"])
def test_a_number_that_counts_calls_in_an_argument_is_a_side_effect(captured, decorator: str) -> None:
    text = (
        'import torch\n\n\n# mtmc: p=f32[8] state={"step":3,"m":f32[8]}\n'
        f'{decorator}def f(p, state):\n    state["step"] += 1\n    p.add_(state["m"].mul_(0.9))\n'
    )
    with pytest.raises(TargetUnsupported, match="f changes a container that it gets as an argument"):
        captured(text, "f")
