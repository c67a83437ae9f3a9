"""Long loops of the user's code run at their full length in few cases, since each iteration is several launches."""

from __future__ import annotations

import pytest

from mtmc_lsp.verify.cases import VALUES, version_cases
from mtmc_lsp.verify.worker.comparison.draws import loops_without_indices
from tests.loops.examples import LOOPS


@pytest.mark.parametrize("length", [4096, 130])
def test_most_cases_of_a_long_loop_have_few_iterations(captured, length: int) -> None:
    source = LOOPS.replace("a=f32[B,T,D] b=f32[B,T,D] B=3 T=20 D=5", f"a=f32[B,T,D] b=f32[B,T,D] B=3 T={length} D=5")
    capture = captured(source, "recurrence")
    (node,) = (node for node in capture.graph.nodes if node.loop is not None)
    (name,) = node.loop.count.symbols()
    cases = version_cases(capture, interpreted=False, seed=0)
    lengths = [case.sizes[name] for case in cases]
    assert lengths[0] == length and max(lengths) > length
    full = sum(each > 0.9 * length for each in lengths)
    assert full == 2 if length == 4096 else full > len(lengths) / 2
    operations = len(node.loop.nodes) * sum(each for each in lengths if each <= 0.9 * length)
    assert operations < 2000 * len(lengths)
    values = {case.distribution for case in cases if case.kind == VALUES and case.sizes[name] >= 130}
    assert {"uniform", "tiny", "mixed", "constant", "large"} <= values


def test_choices_are_recorded_where_a_loop_has_indices(captured) -> None:
    assert loops_without_indices(captured(LOOPS, "recurrence").graph)
    source = LOOPS.replace("        out[:, t] = h\n    return out\n", "        out[:, t] = h\n    return out.max(1)\n")
    assert not loops_without_indices(captured(source, "recurrence").graph)
