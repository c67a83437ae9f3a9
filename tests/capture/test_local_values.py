"""The local variables of a target are described where each statement runs for the first time."""

from __future__ import annotations

from pathlib import Path

import pytest

from mtmc_lsp.capture.client import find_workload
from mtmc_lsp.capture.messages import LocalValues
from mtmc_lsp.capture.worker.regions.local_values import local_values
from mtmc_lsp.capture.worker.user_module import load_user_module
from mtmc_lsp.core.errors import TargetRaises
from mtmc_lsp.source.targets import find_target

HEAD = "import functools\n\nimport torch\n\n\n"


def values_of(folder: Path, text: str) -> LocalValues:
    path = folder / "model.py"
    path.write_text(HEAD + text)
    source = path.read_bytes()
    workload = find_workload(str(path), source, find_target(source, str(path), "f"))
    return local_values(load_user_module(str(path), as_name=f"model_{folder.name}"), workload, "cpu")


def described(values: LocalValues, number: int) -> dict[str, str]:
    """The variables at a statement: the shape of a tensor, a constant, or the name of a class."""
    words = {}
    for value in values.statements[number]:
        spec = value.spec
        if spec is None:
            words[value.name] = value.kind
        elif spec.tensor is not None:
            words[value.name] = f"{spec.tensor.dtype}[{', '.join(map(str, spec.tensor.shape))}]"
        else:
            words[value.name] = repr(spec.constant) if spec.container is None else spec.container.kind.value
    return words


def test_dimensions_that_follow_a_named_size_have_its_name_and_others_are_numbers(tmp_path: Path) -> None:
    text = "# mtmc: x=f32[N,8] w=f32[8,4] N=6\ndef f(x, w):\n    h = x @ w\n    y = h.t()\n    return y\n"
    values = values_of(tmp_path, text)
    assert described(values, 0) == {"x": "float32[N, 8]", "w": "float32[8, 4]"}
    assert described(values, 2) == {
        "x": "float32[N, 8]",
        "w": "float32[8, 4]",
        "h": "float32[N, 4]",
        "y": "float32[4, N]",
    }
    assert values.sizes == {"N": 6}


@pytest.mark.parametrize(
    ("expression", "strides"),
    [
        ("x.t()", ("1", "N")),
        ("x[:, ::2].t()", ("2", "2 * y_0")),
        ("x.view(2, 4, -1).permute(2, 0, 1)", ("1", "4 * N", "N")),
        ("torch.cat([x, x], 1)[:, : x.shape[1]]", ("2 * N", "1")),
        ("x.expand(3, 8, -1)", ("0", "N", "1")),
    ],
)
def test_strides_are_given_in_terms_of_the_named_sizes(
    expression: str, strides: tuple[str, ...], tmp_path: Path
) -> None:
    text = f"# mtmc: x=f32[8,N] N=12\ndef f(x):\n    y = {expression}\n    return y\n"
    y = next(value for value in values_of(tmp_path, text).statements[1] if value.name == "y")
    assert y.spec is not None and y.spec.tensor is not None and y.spec.tensor.stride is not None
    assert tuple(map(str, y.spec.tensor.stride)) == strides


def test_dimensions_that_depend_on_values_have_names_of_their_own(tmp_path: Path) -> None:
    text = "# mtmc: x=f32[N,8] N=90\ndef f(x):\n    rows = x[x[:, 0] > 0]\n    twice = torch.cat([rows, rows])\n    return twice\n"
    values = values_of(tmp_path, text)
    shapes = described(values, 2)
    assert shapes["rows"] == "float32[rows_0, 8]"
    assert shapes["twice"] == "float32[twice_0, 8]"
    assert values.sizes["twice_0"] == 2 * values.sizes["rows_0"]


def test_values_are_those_before_a_statement_even_if_it_is_a_loop_that_changes_them(tmp_path: Path) -> None:
    text = (
        "# mtmc: x=f32[4,8]\ndef f(x):\n    parts = []\n    n = 2\n    for i in range(n):\n        parts.append(x[i])\n"
        "        n = n + 1\n    return torch.stack(parts) + n\n"
    )
    values = values_of(tmp_path, text)
    assert described(values, 3) == {"x": "float32[4, 8]", "parts": "[]", "n": "2", "i": "0"}
    assert described(values, 5)["parts"] == "list"
    assert described(values, 5)["n"] == "4"


def test_values_of_other_kinds_have_the_name_of_their_class(tmp_path: Path) -> None:
    text = "# mtmc: x=f32[4,8]\ndef f(x):\n    layer = torch.nn.ReLU()\n    y = layer(x)\n    return y\n"
    assert described(values_of(tmp_path, text), 1)["layer"] == "ReLU"


def test_a_branch_that_does_not_run_has_no_values(tmp_path: Path) -> None:
    text = "# mtmc: x=f32[4,8]\ndef f(x):\n    if x.sum() > 1e9:\n        x = x + 1\n    return x\n"
    assert sorted(values_of(tmp_path, text).statements) == [0, 2]


def test_what_a_decorator_converts_is_seen_as_the_body_gets_it(tmp_path: Path) -> None:
    text = (
        "def half(g):\n    @functools.wraps(g)\n    def inner(x):\n        return g(x.half())\n    return inner\n\n\n"
        "# mtmc: x=f32[4,8]\n@half\ndef f(x):\n    y = x + 1\n    return y\n"
    )
    assert described(values_of(tmp_path, text), 1)["y"] == "float16[4, 8]"


def test_a_target_that_raises_says_so(tmp_path: Path) -> None:
    with pytest.raises(TargetRaises, match="boom"):
        values_of(tmp_path, "# mtmc: x=f32[4,8]\ndef f(x):\n    raise ValueError('boom')\n")
