"""Sizes behave like integers, and values survive JSON."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mtmc_lsp.core.errors import Location, NoWorkload, RequestError, error_from_json
from mtmc_lsp.core.graph import Graph, GraphInput, InputKind, Node, Ref, TensorType
from mtmc_lsp.core.json_codec import from_json, to_json
from mtmc_lsp.core.settings import read_settings
from mtmc_lsp.core.sizes import Size

NAMES = ["a", "b", "c"]
VALUES = {"a": 3, "b": 5, "c": 7}


@st.composite
def sizes(draw) -> Size:
    total = Size.of(draw(st.integers(-5, 5)))
    for _ in range(draw(st.integers(0, 3))):
        term = Size.of(draw(st.integers(-4, 4)))
        for name in draw(st.lists(st.sampled_from(NAMES), max_size=2)):
            term = term * Size.symbol(name)
        total = total + term
    return total


@given(sizes(), sizes())
def test_arithmetic_on_sizes_is_arithmetic_on_their_values(x: Size, y: Size) -> None:
    assert (x + y).value(VALUES) == x.value(VALUES) + y.value(VALUES)
    assert (x * y).value(VALUES) == x.value(VALUES) * y.value(VALUES)
    assert (x - y).value(VALUES) == x.value(VALUES) - y.value(VALUES)


@given(sizes(), sizes())
def test_exact_division_inverts_multiplication(x: Size, y: Size) -> None:
    if y.terms:
        assert (x * y).divide_exactly(y) == x
        quotient = x.divide_exactly(y)
        assert quotient is None or quotient * y == x


@given(sizes())
def test_a_size_is_parsed_back_from_its_text(x: Size) -> None:
    assert Size.parse(str(x)) == x


@given(sizes(), st.integers(1, 9))
def test_floor_division_agrees_with_integer_floor_division(x: Size, divisor: int) -> None:
    assert (x // divisor).value(VALUES) == x.value(VALUES) // divisor


def test_a_graph_survives_json() -> None:
    kind = TensorType((Size.parse("2*n"), Size.of(4)), "float32", (Size.of(4), Size.of(1)))
    node = Node(
        "y", "aten.add.Tensor", (Ref("x"), float("inf"), (Size.symbol("n"), None)), {"alpha": 2}, (kind,), 3, "y"
    )
    graph = Graph(
        (GraphInput("x", "x", InputKind.ARGUMENT, kind),), (node,), (Ref("y"),), "(results[0], None)", {"n": 3}
    )
    assert from_json(Graph, json.loads(json.dumps(to_json(graph)))) == graph


def test_an_error_keeps_its_type_location_and_remedy_across_processes() -> None:
    error = NoWorkload("none", where=Location("a.py", 3), remedy="add one")
    back = error_from_json(error.to_json())
    assert type(back) is NoWorkload
    assert str(back) == "a.py:3: none\n  add one"


@pytest.mark.parametrize(
    ("table", "word"),
    [
        ("prcision = 'strict'", "prcision"),
        ("precision = 'loose'", "precision"),
        ("budget-seconds = 'x'", "budget_seconds"),
    ],
)
def test_an_invalid_setting_is_reported_with_its_file(tmp_path, table: str, word: str) -> None:
    (tmp_path / "pyproject.toml").write_text(f"[tool.mtmc]\n{table}\n")
    with pytest.raises(RequestError, match=word) as caught:
        read_settings(tmp_path)
    assert "pyproject.toml" in str(caught.value)
    assert caught.value.remedy


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("base_url = 'http://evil'", "unknown setting 'base_url' in [tool.mtmc.llm]"),
        ("budget_tokens = 0", "llm.budget_tokens: must be above 0, not 0"),
        ("budget_money = 1", "set llm.price_prompt"),
        ("repairs = -1", "llm.repairs: must not be below 0"),
        ("model = 3", "model in [tool.mtmc.llm] cannot be 3"),
    ],
)
def test_an_invalid_model_setting_is_reported_with_its_line(tmp_path, setting: str, message: str) -> None:
    (tmp_path / "pyproject.toml").write_text(f"[tool.mtmc]\nmax_steps = 3\n\n[tool.mtmc.llm]\n{setting}\n")
    with pytest.raises(RequestError) as error:
        read_settings(tmp_path)
    assert message in str(error.value)
    assert "pyproject.toml" in str(error.value)


def test_model_settings_have_a_separate_table(tmp_path) -> None:
    (tmp_path / "pyproject.toml").write_text("[tool.mtmc]\nmax_steps = 3\n[tool.mtmc.llm]\nmodel = 'm'\nrepairs = 1\n")
    settings = read_settings(tmp_path)
    assert (settings.max_steps, settings.llm.model, settings.llm.repairs) == (3, "m", 1)
