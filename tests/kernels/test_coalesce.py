"""A flat index is divided the other way round where lanes then access neighbouring elements, and nothing else depends on it."""

from __future__ import annotations

import pytest

from tests.kernels.observing import HEADER, Observing
from tests.kernels.proposing import applied, proposed

SCALE = (
    HEADER
    + """\
@triton.jit
def scale_kernel(x_ptr, factor_ptr, out_ptr, M, N, BLOCK: tl.constexpr):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = index % M
    column = index // M
    mask = index < M * N
    x = tl.load(x_ptr + row * N + column, mask=mask)
    factor = tl.load(factor_ptr + row, mask=mask)
    tl.store(out_ptr + row * N + column, x * factor, mask=mask)


# mtmc: x=f32[M,N] factors=f32[M] M=40 N=300
def scale(x, factors):
    out = torch.empty_like(x)
    scale_kernel[(triton.cdiv(x.numel(), 64),)](x, factors, out, x.shape[0], x.shape[1], BLOCK=64)
    return out
"""
)


def test_the_index_is_divided_the_other_way_round() -> None:
    text = applied(SCALE, "coalesce")
    assert "    row = index // N\n    column = index % N\n" in text
    assert len(set(SCALE.splitlines()) - set(text.splitlines())) == 2
    assert proposed(text, "coalesce") == [], "it is not changed back"


@pytest.mark.parametrize(
    "change",
    [
        ("mask = index < M * N", "mask = index < M * N - 1"),
        ("mask = index < M * N", "mask = index < N"),
        ("x_ptr + row * N + column, mask=mask", "x_ptr + row * N + column"),
        ("x * factor, mask", "x * factor + index, mask"),
        ("x * factor, mask", "x * factor * tl.sum(x), mask"),
        ("tl.store(out_ptr + row * N", "tl.store(out_ptr + index * N"),
        ("row * N + column", "column * M + row"),
        ("tl.store(", "tl.atomic_add("),
        ("    mask = index", "    row = row + 0\n    mask = index"),
    ],
)
def test_the_index_stays_if_more_depends_on_it_or_nothing_is_gained(change: tuple[str, str]) -> None:
    changed = SCALE.replace(*change)
    assert changed != SCALE
    assert proposed(changed, "coalesce") == []


def test_the_modulo_of_a_flat_index_stays() -> None:
    assert proposed(SCALE, "vectorize") == []
    assert len(proposed(SCALE.replace("column = index // M", "column = tl.program_id(1)"), "vectorize")) == 1


def test_the_other_order_computes_the_same(observe: Observing) -> None:
    text = applied(SCALE, "coalesce")
    sizes = [{"M": 5, "N": 70}, {"M": 2, "N": 5}]
    traces = observe(text, "scale", *sizes, original=SCALE)
    for trace in traces:
        assert not trace.faults, trace.faults
    before = observe(SCALE, "scale", *sizes)
    patterns = [
        next(access.pattern for access in t.accesses if access.tensor == "x_ptr") for t in (before[0], traces[0])
    ]
    assert patterns[0] != patterns[1] == "contiguous"
    broken = text.replace("index // N", "index // M")
    assert any(trace.faults for trace in observe(broken, "scale", *sizes, original=SCALE))
