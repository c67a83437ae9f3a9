"""The forms of results: what is taken apart is put together again as it was."""

from __future__ import annotations

from enum import Enum
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mtmc_lsp.core.returned import form, is_nested, leaves, put_together

LEAF = st.floats(allow_nan=False) | st.none()
NESTED = st.recursive(
    LEAF,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=4) | st.integers(-3, 3), inner, max_size=3)
    ),
    max_leaves=12,
)


@given(NESTED.filter(lambda value: value is not None))
def test_results_are_put_together_as_they_were(value: Any) -> None:
    found, own = [leaf for leaf in leaves(value) if leaf is not None], form(value)
    if is_nested(own):
        assert eval(put_together(own, lambda i: f"results[{i}]"), {}, {"results": found}) == value
    else:
        assert {"tensor": found[:1] and found[0], "list": found, "tuple": tuple(found)}[own] == value


class Name(str, Enum):
    """What some dictionaries have for keys: its text in Python is no text."""

    LOSS = "loss"


class Pair(NamedTuple):
    """What some functions return in the place of a tuple."""

    first: float
    second: float


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (1.0, "tensor"),
        ((1.0, None), "(0, None)"),
        ({"loss": None, "logits": 1.0}, "{'loss': None, 'logits': 0}"),
        ({Name.LOSS: 1.0}, "tensor"),
        ([1.0, {(1, 2): 2.0}], "list"),
        ([1.0], "list"),
        ((1.0, (2.0, 3.0)), "(0, (1, 2))"),
        ({"loss": 1.0, "parts": [2.0]}, "{'loss': 0, 'parts': [1]}"),
        (Pair(1.0, 2.0), "tensor"),
    ],
)
def test_forms_are_as_people_write_them(value: Any, expected: str) -> None:
    assert form(value) == expected
