"""Mean and squared deviations are computed in one pass over a row, without cancellation."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mtmc_lsp.verify.cases import Case
from tests.codegen.checker import Checker
from tests.codegen.harness import fused

TEXT = "import torch\n\n\n# mtmc: x=f32[N,D]@{range} N=5 D=200\ndef f(x):\n    return {body}\n"
BODIES = {
    "variance": "x.var(-1)",
    "both": "torch.std_mean(x, -1)",
    "normalised": "torch.nn.functional.layer_norm(x, (x.shape[-1],))",
    "of what is computed": "(x * x + 3.0).var(-1, unbiased=False)",
    "of all": "x.var()",
}


@pytest.mark.parametrize("far", ["-1..1", "9999..10001"])
@pytest.mark.parametrize("config", [{"rows": 2}, {"rows": 1}, {"rows": 1, "split": 4}], ids=["rows", "row", "parts"])
@pytest.mark.parametrize("name", BODIES)
def test_one_pass_computes_both(checker: Checker, name: str, config: dict[str, int], far: str) -> None:
    text = TEXT.format(range=far, body=BODIES[name])
    capture = checker.capture(text)
    candidate = fused(capture, text, {**config, "block": 16, "loop": True, "warps": 1})
    walks = len(re.findall(r"for start in range", candidate.source))
    assert walks == 1 + (name == "normalised" and "split" in config), candidate.source
    for columns in (200, 64, 17, 2):
        case = Case({"N": 5, "D": columns}, "normal", 3)
        assert checker.failures(capture, [candidate], case) == [""], columns


@settings(max_examples=15, deadline=None)
@given(columns=st.integers(1, 150), parts=st.sampled_from([1, 2, 8]), block=st.sampled_from([8, 32]))
def test_all_block_sizes_and_splits_are_correct(checker: Checker, columns: int, parts: int, block: int) -> None:
    text = TEXT.format(range="100..101", body="torch.var_mean(x, -1, unbiased=False)")
    capture = checker.capture(text)
    candidate = fused(capture, text, {"rows": 1, "block": block, "loop": True, "warps": 1, "split": parts})
    assert checker.failures(capture, [candidate], Case({"N": 3, "D": columns}, "normal", 3)) == [""]
