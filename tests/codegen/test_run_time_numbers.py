"""Python numbers among the arguments: kernels take those that only arithmetic uses at run time; others are constants."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from mtmc_lsp.core.workload import Capture
from mtmc_lsp.verify.cases import Case, version_cases
from tests.codegen.checker import Checker, greedy, planned

HEAD = "import math\nfrom math import floor\nimport numpy\nimport torch\nimport torch.nn.functional as F\n\n\n"


def text_of(body: str, arguments: str, dtype: str = "f32") -> str:
    names = ", ".join(part.partition("=")[0] for part in arguments.split())
    head = f"# mtmc: x=F[N,6] y=F[N,6] i=i32[N,6]@-5..5 {arguments} N=9\n".replace("=F[", f"={dtype}[")
    return f"{HEAD}{head}def f(x, y, i, {names}):\n    {body}\n"


def captured(checker: Checker, body: str, arguments: str, dtype: str = "f32") -> Capture:
    return checker.capture(text_of(body, arguments, dtype))


def number_cases(capture: Capture) -> list[Case]:
    return [case for case in version_cases(capture, interpreted=True, seed=3) if case.numbers]


FREE = {
    "factor": ("return x * s", "s=1.5"),
    "reversed": ("return (s - x) * s + s / (y.abs() + 1.0)", "s=1.5"),
    "quotient": ("return x / s - y", "s=3.0"),
    "integer factor": ("return x * n + n", "n=3"),
    "integers by an integer": ("return i * n + n - i", "n=3"),
    "integers by a float": ("return i * s", "s=0.3"),
    "scaled addend": ("return torch.add(x, y, alpha=s) - torch.sub(x, y, alpha=s)", "s=0.3"),
    "limits": ("return x.clamp(-c, c) + torch.clamp(y, min=c) + y.clip(max=c)", "c=0.7"),
    "limits of integers": ("return i.clamp(-n, n)", "n=2"),
    "comparison": ("return torch.where(x > s, x, y), x <= s, i == n", "s=0.2 n=2"),
    "where": ("return torch.where(x > 0, s, y) + torch.where(y > 0, x, s)", "s=0.3"),
    "filled": ("return x.masked_fill(y > 0, s) + torch.full_like(x, s) + torch.full((6,), s, device=x.device)", "s=0.3"),
    "interpolated": ("return torch.lerp(x, y, w)", "w=0.4"),
    "power": ("return x.abs() ** p + s ** y", "p=1.7 s=1.4"),
    "products": ("return torch.addcmul(x, x, y, value=s) + torch.addcdiv(x, x, y.abs() + 1.0, value=s)", "s=0.3"),
    "slope": ("return F.leaky_relu(x, s)", "s=0.1"),
    "epsilon": ("return F.layer_norm(x, (6,), eps=e) + F.rms_norm(y, (6,), eps=e) + F.normalize(x, dim=-1, eps=e)", "e=1e-3"),
    "hard tanh": ("return F.hardtanh(x, -c, c)", "c=0.5"),
    "computed": ("scale = 1 - b ** step\n    return x * scale + y / math.sqrt(1 + b * b) - b", "b=0.9 step=3"),
    "softmax": ("return torch.softmax(x / t, -1) @ torch.softmax(y * t, -1).t()", "t=0.7"),
    "updated": ("x.mul_(b).add_(y, alpha=1 - b)\n    x += b\n    return x * 1.0", "b=0.9"),
}  # fmt: skip


@pytest.mark.parametrize("dtype", ["f32", "f16", "f64"])
@pytest.mark.parametrize("name", FREE)
def test_kernels_compute_with_other_numbers_than_the_workloads(name: str, dtype: str, checker: Checker) -> None:
    body, arguments = FREE[name]
    capture = captured(checker, body, arguments, dtype)
    assert {item.access for item in capture.graph.numbers} == {part.partition("=")[0] for part in arguments.split()}
    assert capture.graph.constants == {}
    cases = number_cases(capture)
    assert len(cases) >= 5
    assert checker.first_failure(capture, greedy(capture, {}), cases) == ""
    assert checker.compile_errors(capture, greedy(capture, {})) == []


CONSTANT = {
    "compared": ("return x * s if s > 1 else x", "s=1.5"),
    "as a condition": ("return x * s if s else x", "s=1.5"),
    "rounded": ("return x * int(s)", "s=1.5"),
    "formatted": ("return x * float(f'{s}')", "s=1.5"),
    "by a function of math that is not traced": ("return x * math.floor(s)", "s=1.5"),
    "by a function that is imported by name": ("return x * floor(s)", "s=1.5"),
    "by numpy": ("return x * s * numpy.greater(s, 0).item()", "s=1.5"),
    "a dimension": ("return x.sum(n)", "n=1"),
    "an index": ("return x[:, n] * 2.0", "n=1"),
    "a slice": ("return x[:, :n] * 2.0", "n=2"),
    "a size": ("return x.reshape(n, -1) * 2.0", "n=3"),
    "a loop": ("for _ in range(n):\n        x = x * 2.0\n    return x", "n=3"),
    "in a list": ("return x * [1.0, 2.0, 3.0, 4.0, 5.0][n]", "n=1"),
    "in a dictionary": ("return x * {1.5: 2.0}.get(s, 3.0)", "s=1.5"),
    "a power of a norm": ("return torch.linalg.vector_norm(x, s, -1)", "s=2.0"),
    "a probability": ("return F.dropout(x, p, True)", "p=0.5"),
    "returned": ("return x * 2.0, s", "s=1.5"),
    "a tensor": ("return x * torch.tensor(s, device=x.device)", "s=1.5"),
    "cancelled": ("return x * (s / s)", "s=1.5"),
    "its type": ("return x * (2.0 if type(s) is float else 3.0) * s", "s=1.5"),
    "an attribute of a float": ("return x * s.is_integer()", "s=1.5"),
}


@pytest.mark.parametrize("name", CONSTANT)
def test_a_number_whose_value_decides_anything_else_is_a_constant(name: str, checker: Checker) -> None:
    body, arguments = CONSTANT[name]
    capture = captured(checker, body, arguments)
    assert capture.graph.numbers == ()
    assert list(capture.graph.constants) == [arguments.partition("=")[0]]


def test_one_constant_number_leaves_the_others_free(checker: Checker) -> None:
    body = "h = x * 2.0 if k > 1 else x\n    for _ in range(n):\n        h = h * s\n    return h.sum(d) / t"
    capture = captured(checker, body, "k=2.0 n=2 s=0.5 d=1 t=0.7 unused=1.0")
    assert [item.access for item in capture.graph.numbers] == ["s", "t", "unused"]
    assert list(capture.graph.constants) == ["k", "n", "d"]


def test_a_number_beside_a_free_size_is_a_constant(checker: Checker) -> None:
    capture = captured(checker, "return x * (s / x.shape[0])", "s=1.5")
    assert capture.graph.numbers == () or capture.graph.sizes == {}


def test_the_guard_checks_only_the_type_of_a_free_number(checker: Checker) -> None:
    source = planned(captured(checker, "return x * s + n", "s=1.5 n=3")).source
    assert "type(s) is float\n" in source
    assert "type(n) is int and n.bit_length() < 64\n" in source
    assert "1.5" not in source.partition("# mtmc: end")[0].partition("def f_fits")[2]


def test_numbers_that_python_cannot_compute_run_the_original_code(checker: Checker) -> None:
    """The original code raises the error, or computes with a complex number."""
    source = planned(captured(checker, "return x * (a / b) ** p", "a=1.5 b=2.0 p=0.5")).source
    start = source.index("def _have_number_types(")
    names: dict[str, Any] = {}
    exec(source[start : source.index("\n\n\n", start)], names)
    check = names["_have_number_types"]
    compute = "lambda: ((a / b) ** p,), float"
    assert compute in source

    def accepts(a: float, b: float, p: float) -> bool:
        return bool(check(lambda: ((a / b) ** p,), float))

    assert accepts(1.5, 2.0, 0.5)
    assert accepts(2.0, 4.0, 3.0)
    assert not accepts(1.0, 0.0, 1.0), "a division by zero"
    assert not accepts(-1.0, 2.0, 0.5), "a complex number"
    assert not accepts(10.0, 1.0, 1e9), "an overflow"


@pytest.mark.parametrize("written", ["1.5", "s * 1.0 + 0.01"])
def test_a_kernel_with_the_workloads_number_built_in_is_refused(written: str, checker: Checker) -> None:
    capture = captured(checker, "return x * s + y", "s=1.5")
    candidate = planned(capture)
    body = "x * s + y"
    assert body in candidate.source.partition("def f_fits")[0]
    kernel, rest = candidate.source.split("def f_fits", 1)
    wrong = candidate.__class__(
        "wrong", None, None, kernel.replace(body, f"x * ({written}) + y") + "def f_fits" + rest, None, None
    )
    cases = number_cases(capture)
    assert checker.first_failure(capture, candidate, cases) == ""
    assert checker.first_failure(capture, wrong, cases)


def test_every_number_is_once_zero_one_negative_and_large(checker: Checker) -> None:
    capture = captured(checker, "return x * s", "s=1.5")
    assert [case.numbers["s"] for case in number_cases(capture)] == [1.3125, 0.0, 1.0, -0.75, 16.0]


def test_float64_kernels_take_numbers_in_float64(checker: Checker) -> None:
    capture = captured(checker, "return x * s", "s=0.1", "f64")
    candidate = planned(capture)
    assert "s: tl.float64" in candidate.source
    torch.manual_seed(0)
    x = torch.randn(9, 6, dtype=torch.float64)
    inputs = {"x": x, "y": x, "i": torch.zeros(9, 6, dtype=torch.int32)}
    inputs = {item.name: inputs[item.name] for item in capture.graph.inputs}
    (result,) = checker.results(capture, candidate, inputs)
    assert torch.equal(result, x * 0.1)


def test_a_computed_number_has_the_users_name(checker: Checker) -> None:
    body = "step_size = s / 2\n    h = torch.sort(x * step_size, -1)[0]\n    return h * step_size"
    source = planned(captured(checker, body, "s=1.5")).source
    assert "    step_size = s / 2\n" in source


def test_numbers_of_a_module_method_and_of_containers_are_free(checker: Checker) -> None:
    text = HEAD + (
        "class Model(torch.nn.Module):\n    def forward(self, x, options, *, gain=2.0):\n"
        "        return x * options['scale'] + gain\n\n\n"
        "# mtmc: Model: \n"
    )
    text = text.replace("# mtmc: Model: \n", "").replace(
        "class Model", "# mtmc: x=f32[N,6] options={'scale':0.5,'name':'a'} N=9\nclass Model"
    )
    capture = checker.capture(text, "Model")
    assert [item.access for item in capture.graph.numbers] == ["options['scale']", "gain"]
    assert capture.graph.constants == {"options['name']": "a"}
    candidate = planned(capture)
    assert "else model_launch)(x, options['scale'], gain)" in candidate.source
    assert checker.first_failure(capture, candidate, number_cases(capture)) == ""


def test_numbers_of_get_inputs_are_free(checker: Checker, tmp_path: Path) -> None:
    text = HEAD + (
        "class Model(torch.nn.Module):\n    def forward(self, x, scale):\n        return x * scale + 1.0\n\n\n"
        "def get_inputs():\n    return [torch.randn(9, 6), 0.5]\n\n\ndef get_init_inputs():\n    return []\n"
    )
    capture = checker.capture(text, "Model")
    assert [item.access for item in capture.graph.numbers] == ["scale"]
    assert checker.first_failure(capture, planned(capture), number_cases(capture)) == ""
