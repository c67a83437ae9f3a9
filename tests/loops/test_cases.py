"""Long loops of the user's code run at their full length in few cases, and at sizes where a kernel runs in most."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from mtmc_lsp.verify import cases as cases_module
from mtmc_lsp.verify.cases import AUTOGRAD, ON_CPU, VALUES, version_cases
from mtmc_lsp.verify.sizes.block_sizes import largest_sizes
from mtmc_lsp.verify.worker.comparison.draws import loops_without_indices
from tests.loops.block_examples import BLOCKS
from tests.loops.cell_examples import CELLS
from tests.loops.examples import LOOPS
from tests.loops.test_cells import fully_fused
from tests.planning.situations import start


@pytest.mark.parametrize("length", [16384, 2048, 130])
def test_most_cases_of_a_long_loop_have_few_iterations(captured, length: int) -> None:
    source = LOOPS.replace("a=f32[B,T,D] b=f32[B,T,D] B=3 T=20 D=5", f"a=f32[B,T,D] b=f32[B,T,D] B=3 T={length} D=5")
    capture = captured(source, "recurrence")
    (node,) = (node for node in capture.graph.nodes if node.loop is not None)
    (name,) = node.loop.count.symbols()
    cases = version_cases(capture, interpreted=False, seed=0)
    lengths = [case.sizes[name] for case in cases]
    assert lengths[0] == length and max(lengths) > length
    # A slow loop runs few iterations more where sizes are larger than the workload's.
    assert max(lengths) < length + 160 if length == 16384 else max(lengths) >= 1.2 * length
    full = sum(each > 0.9 * length for each in lengths)
    assert full == 2 if length > 130 else full > len(lengths) / 2
    operations = len(node.loop.nodes) * sum(each for each in lengths if each <= 0.9 * length)
    assert operations < 2000 * len(lengths)
    values = {case.distribution for case in cases if case.kind == VALUES and case.sizes[name] >= 130}
    assert {"uniform", "tiny", "mixed", "constant", "large"} <= values


def test_choices_are_recorded_where_a_loop_has_indices(captured) -> None:
    assert loops_without_indices(captured(LOOPS, "recurrence").graph)
    source = LOOPS.replace("        out[:, t] = h\n    return out\n", "        out[:, t] = h\n    return out.max(1)\n")
    assert not loops_without_indices(captured(source, "recurrence").graph)


def guard_limits(capture, candidate) -> dict[str, int]:
    """The limits of named sizes in the guard's text."""
    accesses = {item.access: item.type.shape for item in capture.graph.inputs}
    found: dict[str, int] = {}
    for access, dim, limit in re.findall(r"(\w+)\.shape\[(\d)\](?: [-+] \d)? <= (\d+)", candidate.code.block):
        (name,) = accesses[access][int(dim)].symbols()
        found[name] = min(found.get(name, int(limit)), int(limit))
    return found


@pytest.mark.parametrize(
    ("text", "name"),
    [
        (BLOCKS, "viterbi"),
        (BLOCKS, "ctc"),
        (BLOCKS, "running"),
        (CELLS, "elman"),
        (CELLS, "heads"),
        (LOOPS, "recurrence"),
    ],
)
def test_kernels_of_loops_run_in_all_cases_but_one_with_values(text: str, name: str, captured) -> None:
    """A block holds up to 2^n elements of an axis: more than that are left to the user's code, which one case verifies."""
    capture = captured(text, name)
    limits, guarded = largest_sizes(capture.graph), guard_limits(capture, fully_fused(capture, start(capture, text)))
    if text != LOOPS:
        assert limits.keys() == guarded.keys() and all(limits[size] <= guarded[size] for size in limits)
    for interpreted in (False, True):
        cases = [case for case in version_cases(capture, interpreted=interpreted, seed=0) if case.kind == VALUES]
        beyond = [case for case in cases if any(case.sizes[size] > guarded[size] for size in guarded)]
        assert len(beyond) <= 1
        if text == BLOCKS and not interpreted:
            assert [case.sizes[size] for case in beyond for size in limits] == [limits[size] + 1 for size in limits]


STEPS = """
import torch


# mtmc: x=f32[B,H] W=f32[H,H]@-0.1..0.1 B=4 H=64
def steps(x, W):
    for _ in range(500):
        x = torch.tanh(x @ W)
    return x
"""


@pytest.mark.parametrize(("width", "most", "on_cpu"), [(64, 20_000, True), (4096, 20_000, False), (64, 1000, False)])
def test_a_loop_whose_iterations_together_take_long_is_not_called_on_the_cpu(
    captured, monkeypatch: pytest.MonkeyPatch, width: int, most: int, on_cpu: bool
) -> None:
    """Its number of iterations is constant, so no case has fewer."""
    monkeypatch.setattr(cases_module, "SLOW_LOOP", most)
    capture = captured(STEPS, "steps")
    capture = replace(capture, graph=replace(capture.graph, sizes={"B": 4, "H": width}), variable_sizes=())
    kinds = {case.kind for case in version_cases(capture, interpreted=False, seed=0)}
    assert (ON_CPU in kinds) == on_cpu


@pytest.mark.parametrize("most", [900, 1000])
def test_gradients_of_a_long_loop_are_compared_without_the_oracle(
    captured, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    """The user's code computes them, in the version as well."""
    monkeypatch.setattr(cases_module, "LOOP_OPERATIONS", most)
    cases = version_cases(captured(STEPS, "steps"), interpreted=False, seed=0)
    assert [case.has_oracle for case in cases if case.kind == AUTOGRAD] == [most == 1000]
    assert all(case.has_oracle for case in cases if case.kind == VALUES)
