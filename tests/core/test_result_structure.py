"""Structures of results: flattened results are rebuilt in the same structure."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mtmc_lsp.capture.result_structure import (
    can_be_rebuilt,
    fill_structure,
    is_nested,
    leaves,
    structure_of,
    tensors_of,
)


@dataclass(frozen=True)
class Tensor:
    """Stands for one: this process has no torch."""

    name: float
    dtype: str = "float32"
    stride: tuple[int, ...] = ()


class Pair(NamedTuple):
    """What some functions return in the place of a tuple."""

    first: object
    second: object


@dataclass
class Output:
    """What others return in the place of a dictionary."""

    loss: object
    states: object = None


LEAF = st.floats(allow_nan=False, allow_infinity=False) | st.none() | st.booleans() | st.text(max_size=4)
NESTED = st.recursive(
    LEAF | st.floats(allow_nan=False).map(Tensor),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=4) | st.integers(-3, 3), inner, max_size=3)
        | st.dictionaries(st.text(max_size=4), inner, max_size=3).map(OrderedDict)
        | st.builds(Pair, inner, inner)
        | st.builds(Output, inner, inner)
    ),
    max_leaves=12,
)


@given(NESTED.filter(lambda value: value is not None))
def test_results_are_put_together_as_they_were(value: Any) -> None:
    found, own = tensors_of(value), structure_of(value)
    if is_nested(own):
        names = {"Pair": Pair, "Output": Output, "OrderedDict": OrderedDict, "results": found}
        made = eval(fill_structure(own, lambda i: f"results[{i}]", str), names)
        assert made == value
        assert type(made) is type(value)
    else:
        assert {"tensor": found[:1] and found[0], "list": found, "tuple": tuple(found)}[own] == value


A, B = Tensor(1.0), Tensor(2.0)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (A, "tensor"),
        ((A, B), "tuple"),
        ((A, None), "(results[0], None)"),
        ([A], "list"),
        (None, "None"),
        ((A, (A, B)), "(results[0], (results[1], results[2]))"),
        ({"loss": A, "parts": [B], "mode": "train"}, "{'loss': results[0], 'parts': [results[1]], 'mode': 'train'}"),
        (Pair(A, 3), "Pair(results[0], 3)"),
        (Output(A, (B,)), "Output(loss=results[0], states=(results[1],))"),
    ],
)
def test_forms_are_as_people_write_them(value: Any, expected: str) -> None:
    assert structure_of(value) == expected


def test_a_size_among_the_results_is_read_when_they_are_put_together() -> None:
    text = "{'y': results[0], 'count': sizes['B*T']}"
    made = fill_structure(text, lambda i: f"out[{i}]", lambda size: size.replace("B", "x.shape[0]"))
    assert made == "{'y': out[0], 'count': x.shape[0] * T}"


@dataclass
class Scaled:
    """Is no plain dataclass: made again it is another."""

    value: float

    def __post_init__(self) -> None:
        self.value = self.value * 2.0


@dataclass
class Counting:
    """Neither: it knows more than it is made of."""

    value: float
    calls: int = field(default=0, init=False)


def _with_a_note(value: Any) -> Any:
    value.note = "warm"
    return value


@pytest.mark.parametrize(
    ("make", "plain"),
    [
        (lambda: Output(1.0, Pair(2.0, None)), True),
        (lambda: Scaled(1.5), False),
        (lambda: [Counting(1.5)], False),
        (lambda: _with_a_note(Output(1.0)), False),
    ],
)
def test_classes_that_are_more_than_their_parts_are_told(make: Callable[[], Any], plain: bool) -> None:
    assert can_be_rebuilt(make()) is plain


def test_leaves_are_in_order() -> None:
    assert leaves({"a": [1, (2,)]}) == [1, 2]
