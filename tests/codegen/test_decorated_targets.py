"""Decorated functions and methods: the kernels replace the body, so the body is captured."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from mtmc_lsp.core.errors import TargetUnsupported
from mtmc_lsp.verify.worker.interpreter.source import on_cpu
from tests.codegen.checker import Checker, planned
from tests.codegen.harness import some_cases
from tests.codegen.test_guard import loaded

HEAD = """\
import functools

import torch
from torch import nn


def tripled(function):
    @functools.wraps(function)
    def inner(*args, **kwargs):
        return function(*args, **kwargs) * 3

    return inner


def plain(function):
    def inner(*args):
        return function(*args) * 3

    return inner


def in_float32(function):
    @functools.wraps(function)
    def inner(x, *args):
        return function(x.float(), *args).to(x.dtype)

    return inner


def on_rows(function):
    @functools.wraps(function)
    def inner(x):
        return function(x.reshape(-1)).view_as(x)

    return inner


def scaled(function):
    @functools.wraps(function)
    def inner(x, scale=1.0):
        return function(x, scale * 2)

    return inner


def never(function):
    @functools.wraps(function)
    def inner(x):
        return x + 1

    return inner


"""
BODY = "def f(x):\n    return torch.softmax(x * 2, -1)\n"
DIRECTIVE = "# mtmc: x=f32[B,16] B=4\n"


@pytest.mark.parametrize(
    "decorators",
    [
        "@tripled\n",
        "@plain\n",
        "@tripled\n@plain\n",
        "@torch.no_grad()\n",
        "@torch.inference_mode()\n",
        "@functools.lru_cache(maxsize=1)\n",
        "@torch.autocast('cuda', enabled=False)\n",
        "@torch.autocast('cpu', dtype=torch.bfloat16)\n",
        "@torch.compile\n",
    ],
)
def test_a_decorated_function_gives_the_results_of_the_original(
    checker: Checker, tmp_path: Path, decorators: str
) -> None:
    text = HEAD + DIRECTIVE + decorators + BODY
    capture = checker.capture(text, "f")
    assert not any("mul.Tensor" in node.op and 3 in node.args for node in capture.graph.nodes)
    candidate = planned(capture)
    assert checker.first_failure(capture, candidate, some_cases(capture)) == ""
    assert loaded(tmp_path / "decorated.py", on_cpu(candidate.source, text)).f_fits(torch.ones(4, 16))


def test_a_decorated_forward_is_captured_with_its_module(checker: Checker) -> None:
    body = "    @tripled\n    def forward(self, x):\n        return torch.tanh(x) * self.weight\n"
    init = "    def __init__(self):\n        super().__init__()\n        self.weight = nn.Parameter(torch.ones(16))\n\n"
    text = f"{HEAD}{DIRECTIVE}class Block(nn.Module):\n{init}{body}"
    capture = checker.capture(text, "Block")
    assert [item.access for item in capture.graph.inputs] == ["x", "self.weight"]
    assert checker.first_failure(capture, planned(capture), some_cases(capture)) == ""


def test_a_decorator_that_converts_an_argument_decides_its_dtype(checker: Checker, tmp_path: Path) -> None:
    text = HEAD + DIRECTIVE.replace("f32", "f16") + "@in_float32\n" + BODY
    capture = checker.capture(text, "f")
    assert capture.graph.inputs[0].type.dtype == "float32"
    assert "x is float32, as the decorator of f passes it" in capture.workload.assumed
    module = loaded(tmp_path / "converted.py", on_cpu(planned(capture).source, text))
    assert module.f_fits(torch.ones(4, 16))
    assert not module.f_fits(torch.ones(4, 16).half())


@pytest.mark.parametrize(
    ("decorator", "body", "problem"),
    [
        ("@on_rows\n", BODY, "passes x to the body as float32[64] with strides [1]"),
        ("@scaled\n", "def f(x, scale=1.0):\n    return x * scale\n", "passes scale to the body as 2.0"),
        ("@never\n", BODY, "does not call its body"),
    ],
)
def test_a_decorator_whose_body_gets_another_call_is_refused_with_its_line(
    checker: Checker, decorator: str, body: str, problem: str
) -> None:
    text = HEAD + DIRECTIVE + decorator + body
    with pytest.raises(TargetUnsupported) as caught:
        checker.capture(text, "f")
    assert f"the decorator of f {problem}" in caught.value.message
    assert caught.value.where is not None and caught.value.where.line == text[: text.index("def f(x")].count("\n") + 1


def test_a_scripted_function_is_refused(checker: Checker) -> None:
    with pytest.raises(
        TargetUnsupported, match=r"f is compiled by torch\.jit\.script, which does not run its Python body"
    ):
        checker.capture(HEAD + DIRECTIVE + "@torch.jit.script\n" + BODY, "f")


@pytest.mark.parametrize("base", ["", "(nn.Module)"])
def test_a_static_method_is_a_target(checker: Checker, tmp_path: Path, base: str) -> None:
    text = (
        f"{HEAD}class Ops{base}:\n    {DIRECTIVE}    @staticmethod\n    def f(x, eps=1e-6):\n"
        "        return torch.tanh(x) / (x.abs().amax(-1, keepdim=True) + eps)\n"
    )
    capture = checker.capture(text, "Ops.f")
    candidate = planned(capture)
    assert checker.first_failure(capture, candidate, some_cases(capture)) == ""
    module = loaded(tmp_path / f"static{len(base)}.py", on_cpu(candidate.source, text))
    x = torch.randn(4, 16)
    assert module.ops_f_fits(x, 1e-6)


def test_a_helper_that_the_user_compiles_is_captured_as_it_is_written(checker: Checker) -> None:
    helper = "@torch.compile\ndef helper(x):\n    return torch.tanh(x)\n\n\n"
    capture = checker.capture(HEAD + helper + DIRECTIVE + "def f(x):\n    return helper(x) * 2\n", "f")
    assert [node.op.split(".")[1] for node in capture.graph.nodes] == ["tanh", "mul"]
    assert checker.first_failure(capture, planned(capture), some_cases(capture)) == ""
