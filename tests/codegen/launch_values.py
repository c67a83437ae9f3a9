"""Launches of a kernel that differ in one value, for property tests of direct launches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from hypothesis import strategies as st

INTEGERS = st.sampled_from([1, 0, -1, -16, 2, 15, 16, 17, 2**31 - 1, 2**31, 2**31 + 15, -(2**31), -(2**31) - 1])
VALUES: Mapping[str, st.SearchStrategy[Any]] = {
    "dtypes": st.tuples(*[st.sampled_from([torch.float32, torch.float16])] * 2),
    "offsets": st.tuples(*[st.sampled_from([0, 0, 0, 4, 8])] * 2),
    "n": INTEGERS | st.integers(-(2**63), 2**64 - 1) | st.booleans(),
    "scale": st.sampled_from([0.5, 2.0, 1, 1.0, True, 32, None]),
    "BLOCK": st.sampled_from([32, 64]),
    "num_warps": st.sampled_from([2, 4]),
}


@st.composite
def similar_launches(draw: Any, further: Mapping[str, st.SearchStrategy[Any]]) -> list[dict[str, Any]]:
    """Launches that each differ from the first one in one value; ``further`` are values besides :data:`VALUES`."""
    values = {**VALUES, **further}
    first = {name: draw(each) for name, each in values.items()} | {"offsets": (0, 0)}
    changed = draw(st.lists(st.sampled_from(sorted(values)), max_size=12))
    return [first, *({**first, name: draw(values[name])} for name in changed)]
