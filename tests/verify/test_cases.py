"""Which inputs are tried."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from handwritten import ADD_IN_PLACE, RMS, SCALE_MODULE, Handwritten

from mtmc_lsp.verify import cases as cases_module
from mtmc_lsp.verify.cases import (
    AUTOGRAD,
    FLOAT64,
    FORWARD,
    FURTHER_VALUES,
    ON_CPU,
    VALUES,
    foreign_cases,
    verification_cases,
    version_cases,
)
from mtmc_lsp.verify.sizes.case_sizes import elements_of, is_interpretable, reduced_sizes, why_not_interpretable
from mtmc_lsp.verify.sizes.interpreter_limits import interpreted_elements


def cases_of(capture, *, interpreted: bool = True):
    return verification_cases(capture, interpreted=interpreted, seed=100)


def test_sizes_of_one_of_zero_and_of_no_multiple_of_sixteen_are_tried(capture_of) -> None:
    sizes = [tuple(case.sizes.values()) for case in cases_of(capture_of(RMS))]
    assert any(1 in pair for pair in sizes)
    assert any(0 in pair for pair in sizes)
    assert any(all(value % 16 and value % 2 for value in pair) and min(pair) > 16 for pair in sizes)


def test_every_distribution_is_tried_and_no_seed_twice(capture_of) -> None:
    cases = cases_of(capture_of(RMS))
    assert {c.distribution for c in cases} == {"normal", "uniform", "large", "tiny", "mixed", "constant"}
    assert len({case.seed for case in cases}) == len(cases)


def test_values_are_tried_at_sizes_that_are_left_to_kernels_whose_tiles_hardware_moves(capture_of) -> None:
    """At odd ones the guard of such a kernel would choose the user's own code."""
    capture = capture_of(RMS)
    capture = replace(capture, graph=replace(capture.graph, sizes=dict.fromkeys(capture.graph.sizes, 2048)))
    for interpreted in (True, False):
        cases = cases_of(capture, interpreted=interpreted)
        tried = {c.distribution for c in cases if all(size % 16 == 8 for size in c.sizes.values())}
        assert {"uniform", "tiny", "mixed", "constant", "large"} <= tried


def test_where_sizes_must_be_odd_all_distributions_are_tried_as_well(capture_of) -> None:
    capture = capture_of(RMS)
    name = capture.variable_sizes[0]
    bound = replace(capture, graph=replace(capture.graph, conditions=(f"{name} % 2 == 1",)))
    assert {c.distribution for c in cases_of(bound)} == {"normal", "uniform", "large", "tiny", "mixed", "constant"}


def test_the_first_case_is_the_workload_itself(capture_of) -> None:
    capture = capture_of(RMS)
    assert dict(cases_of(capture, interpreted=False)[0].sizes) == dict(capture.graph.sizes)


def test_calls_outside_the_guard_come_last(capture_of) -> None:
    capture = capture_of(RMS)
    assert [c.kind for c in cases_of(capture)][-2:] == [FLOAT64, AUTOGRAD]
    assert [c.kind for c in cases_of(capture, interpreted=False)][-3:] == [FLOAT64, AUTOGRAD, ON_CPU]
    assert all(c.kind == VALUES for c in cases_of(capture)[:-2])


def test_sizes_of_parameters_stay(capture_of) -> None:
    capture = capture_of(SCALE_MODULE)
    fixed = set(capture.graph.sizes) - set(capture.variable_sizes)
    for case in cases_of(capture):
        assert all(case.sizes[name] == capture.graph.sizes[name] for name in fixed)


def test_conditions_of_the_graph_are_kept(capture_of) -> None:
    capture = capture_of(RMS)
    name = capture.variable_sizes[0]
    bound = replace(capture, graph=replace(capture.graph, conditions=(f"{name} >= 4", f"{name} % 2 == 1")))
    assert cases_of(bound)
    assert all(case.sizes[name] >= 4 and case.sizes[name] % 2 for case in cases_of(bound))


@pytest.mark.parametrize("size", [10**8, 10**9])
def test_large_workloads_are_reduced_for_the_interpreter(capture_of, size: int) -> None:
    capture = capture_of(ADD_IN_PLACE)
    name = capture.variable_sizes[0]
    large = replace(capture, graph=replace(capture.graph, sizes={name: size}))
    assert max(case.sizes[name] for case in cases_of(large)) < 10**5
    assert is_interpretable(large)
    stuck = replace(large, variable_sizes=())
    assert is_interpretable(stuck, is_version=True) is False
    assert why_not_interpretable(stuck) == f"x has {size:,} elements"


HEADS = Handwritten(
    "Heads.forward",
    """


class Heads(torch.nn.Module):
    def __init__(self, width: int = 64, heads: int = 4):
        super().__init__()
        self.proj = torch.nn.Linear(width, width)
        self.heads = heads

    # mtmc: x=f32[B,T,64] B=8 T=1024
    def forward(self, x):
        B, T, C = x.shape
        return torch.relu(self.proj(x)).view(B, T, self.heads, C // self.heads)
""",
    "",
    "",
    "",
)


def test_reduced_products_keep_rows_enough_for_their_kernels(capture_of) -> None:
    """A kernel that splits its operands takes no fewer than 32 rows; verification must still run it, on all values."""
    capture = capture_of(HEADS)
    assert {"B", "T"} <= set(capture.variable_sizes), "the division is of C alone"
    own = [case for case in cases_of(capture) if case.kind == VALUES]
    enough = [case for case in own if case.sizes["B"] * case.sizes["T"] >= 32]
    assert {case.distribution for case in enough} >= {"normal", "uniform", "tiny", "mixed", "constant", "large"}
    assert any(case.sizes["B"] * case.sizes["T"] < 32 for case in own)


def test_products_whose_rows_are_sizes_of_their_own_have_cases_too(captured) -> None:
    text = """import torch
# mtmc: x=f32[M,D] y=f32[N,D] w=f32[D,D] M=24 N=10 D=40
def f(x, y, w):
    return x @ w, y @ w
"""
    cases = verification_cases(captured(text, "f"), interpreted=True, seed=7)
    odd = [case.sizes for case in cases if case.sizes["M"] != case.sizes["N"] and case.sizes["M"] % 2]
    assert odd, "each size for itself"


LOOKUP = """
# mtmc: table=f32[30000,512] index=i64[B,S]@0..29999 B=8 S=1024
def rows(table, index):
    return table[index] * 2.0
"""
WIDE = """
# mtmc: x=f32[B,4096,512] B=8
def spread(x):
    return x[:, :1].expand(-1, 4096, -1) * 2.0 + x[:, :, :1]
"""
HUGE_PRODUCT = """
# mtmc: x=f32[8192,8192] w=f32[8192,1024] scale=f32[N] N=4
def product(x, w, scale):
    return torch.relu(x @ w) * scale.sum()
"""


def test_of_a_table_only_the_rows_that_indices_choose_count(captured) -> None:
    """An embedding of a large vocabulary is verified: no kernel reads the whole table."""
    capture = captured(f"import torch\n{LOOKUP}", "rows")
    assert is_interpretable(capture)
    assert reduced_sizes(capture)["S"] < 64
    read = captured(f"import torch\n{LOOKUP.replace('table[index]', '(table + 1.0)[index]')}", "rows")
    work = [sum(interpreted_elements(item.graph, reduced_sizes(item)).values()) for item in (capture, read)]
    assert work[1] > 20 * work[0]


def test_views_add_nothing_to_the_work_of_the_interpreter(captured) -> None:
    capture = captured(f"import torch\n{WIDE}", "spread")
    views = {node.name for node in capture.graph.nodes if node.word in ("slice", "expand")}
    assert views
    assert not views & interpreted_elements(capture.graph, capture.graph.sizes).keys()


def test_the_products_of_a_workload_can_be_what_is_too_large(captured) -> None:
    capture = captured(f"import torch\n{HUGE_PRODUCT}", "product")
    assert not is_interpretable(capture, is_version=True)
    assert why_not_interpretable(capture) == "its matrix products have 68,719,476,736 multiply-adds"


IMAGES = """
# mtmc: x=f32[B,3,512,512] B=16
def brighten(x):
    return torch.relu(x * 1.5 - 0.25)
"""


def test_few_images_run_if_their_constant_sizes_are_large(captured) -> None:
    large = captured(f"import torch\n{IMAGES}", "brighten")
    small = captured(f"import torch\n{IMAGES.replace('512', '64')}", "brighten")
    assert [reduced_sizes(capture)["B"] for capture in (large, small)] == [2, 4]


MODULATED = """
# mtmc: x=f32[B,1024,64] c=f32[B,64] w=f32[64,64] v=f32[64,64] B=16
def modulated(x, c, w, v):
    return (x @ w) * (c @ v)[:, None]
"""


def test_a_product_of_few_rows_does_not_keep_the_others_large(captured) -> None:
    """Its kernel takes these few rows, so it takes fewer as well."""
    capture = captured(f"import torch\n{MODULATED}", "modulated")
    assert reduced_sizes(capture)["B"] == 4


def test_of_a_large_workload_only_the_first_case_has_its_sizes(captured) -> None:
    source = """import torch
import torch.nn.functional as F


# mtmc: x=f32[N,D] weight=f32[V,D] target=i64[N]@0..V-1 N=64 D=16 V=96 grad=x,weight
def loss(x, weight, target, scale=0.5):
    return scale * F.cross_entropy(x @ weight.T, target)
"""
    capture = captured(source, "loss")
    sizes = {"N": 8192, "D": 4096, "V": 128256}
    large = replace(capture, graph=replace(capture.graph, sizes=sizes))
    first, odd, *others = version_cases(large, interpreted=False, seed=0)
    assert dict(first.sizes) == sizes
    # Several tiles of rows and columns, and partial ones.
    assert all(1024 < odd.sizes[name] < sizes[name] + 16 and odd.sizes[name] % 2 for name in sizes)
    products = [case.sizes["N"] * case.sizes["V"] for case in (odd, *others)]
    assert max(products) <= sizes["N"] * sizes["V"] / 16
    # Rows as long as in the workload, several blocks of them.
    longest = [case.sizes for case in others if case.sizes["V"] == sizes["V"]]
    assert len(longest) == 1 and 128 < longest[0]["N"] < 1024 and 128 < longest[0]["D"] < 1024
    assert {case.kind for case in others} >= {FORWARD, FLOAT64, AUTOGRAD}
    assert any(case.numbers for case in others)
    # A candidate of others may depend on sizes in any way.
    foreign = foreign_cases(large, interpreted=False, seed=0)
    assert sum(dict(case.sizes) == sizes for case in foreign) > 2
    fewer = {"N": 1024, "D": 1024, "V": 16384}
    small = replace(capture, graph=replace(capture.graph, sizes=fewer))
    assert sum(dict(case.sizes) == fewer for case in version_cases(small, interpreted=False, seed=0)) > 2


def test_the_longest_size_of_a_large_workload_stays_with_few_elements(captured) -> None:
    source = """import torch
import torch.nn.functional as F


# mtmc: x=f32[B,T,D] weight=f32[V,D] target=i64[B,T]@0..V-1 B=2 T=8 D=16 V=96 grad=x,weight
def loss(x, weight, target):
    return F.cross_entropy((x @ weight.T).flatten(0, 1), target.flatten())
"""
    capture = captured(source, "loss")
    for sizes in ({"B": 8, "T": 1024, "D": 4096, "V": 128256}, {"B": 32, "T": 512, "D": 1024, "V": 128256}):
        large = replace(capture, graph=replace(capture.graph, sizes=sizes))
        others = version_cases(large, interpreted=False, seed=0)[1:]
        (long,) = [case.sizes for case in others if case.sizes["V"] == sizes["V"]]
        assert 2**27 < elements_of(large.graph, long) <= 2**29
        assert long["B"] * long["T"] > 100
    # Nothing but the longest size is left to halve.
    huge = replace(capture, graph=replace(capture.graph, sizes={"B": 2, "T": 8, "D": 8, "V": 1 << 28}))
    others = version_cases(huge, interpreted=False, seed=0)[1:]
    assert all(case.sizes["V"] < 1 << 28 for case in others)


@pytest.mark.parametrize(("dtype", "is_tried"), [("f32", True), ("f16", False)])
def test_calls_that_take_seconds_on_the_cpu_are_not_tried_there(dtype: str, is_tried: bool, captured) -> None:
    text = (
        f"import torch\n# mtmc: x={dtype}[512,1024] w={dtype}[1024,1024]\ndef f(x, w):\n    return torch.relu(x @ w)\n"
    )
    cases = verification_cases(captured(text, "f"), interpreted=False, seed=7)
    assert (ON_CPU in {case.kind for case in cases}) is is_tried


EMBEDDING = (
    "import torch\n\n# mtmc: ids=i64[N,D]@0..9 N=64 D=32\ndef f(ids):\n    return torch.sin(ids.float() * 0.5)\n"
)


@pytest.mark.parametrize(
    ("arguments", "count"), [("ids=i64[N,D]@0..9", 1), ("ids=f32[N,D]@0.5..1", 1), ("ids=f32[N,D]", 5)]
)
def test_a_version_has_no_distributions_that_no_argument_follows(captured, arguments: str, count: int) -> None:
    capture = captured(EMBEDDING.replace("ids=i64[N,D]@0..9", arguments), "f")
    repeated = [case for case in foreign_cases(capture, interpreted=False, seed=1) if case.kind == VALUES]
    cases = [case for case in version_cases(capture, interpreted=False, seed=1) if case.kind == VALUES]
    values = [case for case in cases if case.distribution in FURTHER_VALUES]
    by_sizes = Counter(tuple(case.sizes.values()) for case in values)
    assert max(by_sizes.values()) == count
    assert {tuple(case.sizes.values()) for case in cases} == {tuple(case.sizes.values()) for case in repeated}


@pytest.mark.parametrize(
    ("arguments", "body", "has_two"),
    [("x=f32[B,32]", "torch.softmax(x, -1)", False), ("x=f32[B,32] w=f32[16,32]", "x @ w.T", True)],
)
def test_a_network_whose_batch_alone_varies_has_one_small_and_one_larger_size(
    captured, monkeypatch, arguments: str, body: str, has_two: bool
) -> None:
    names = ", ".join(argument.partition("=")[0] for argument in arguments.split())
    capture = captured(f"import torch\n\n# mtmc: {arguments} B=8\ndef f({names}):\n    return {body}\n", "f")
    assert capture.variable_sizes == ("B",)

    def sizes() -> set[int]:
        return {case.sizes["B"] for case in version_cases(capture, interpreted=False, seed=1)}

    all_sizes = sizes()
    monkeypatch.setattr(cases_module, "is_network", lambda graph: True)
    few = sizes()
    assert {0, 1, 8} < few and 2 in all_sizes - few
    # Products have enough rows for their kernels in the first of the larger sizes.
    assert (len({size for size in all_sizes if size > 8}) == 2) is has_two
    assert len({size for size in few if size > 8}) == 1
