"""In-place updates of inputs: the kernel writes directly if no later operation reads the old value."""

from __future__ import annotations

import pytest
import torch

from mtmc_lsp.verify.cases import Case
from tests.codegen.checker import Checker, planned
from tests.codegen.harness import fused

HEAD = "import torch\n\n\n# mtmc: x=f32[N,8] g=f32[N,8] N=37\ndef f(x, g):\n"
DIRECT = {
    "an update": "x.mul_(0.9).add_(g, alpha=0.1)\n    return x",
    "an update beside another result": "y = x * g\n    x.add_(y)\n    return y",
    "two updates": "x.mul_(2.0).add_(g)\n    g.copy_(x * 0.5 + g)\n    return x, g",
    "nothing read": "x.copy_(g.exp())\n    return x",
}
COPIED = {
    "the old value moved": "x.copy_(x.flip(0) + g)\n    return x",
    "the old value summed": "x.copy_(x / x.sum(0) + g)\n    return x",
    "the old value read by another result alone": "y = x * 2.0\n    x.copy_(g)\n    return y",
}


ROWS = "import torch\n\n\n# mtmc: x=f32[8,N] m=f32[8] N=37\ndef f(x, m):\n"
OF_ROWS = "m.mul_(0.9).add_(x.mean(1), alpha=0.1)\n    return x - x.mean(1, keepdim=True)"
OF_ROWS_WANTED = "y = x * m[:, None]\n    m.copy_(m * 0.9 + y.mean(1))\n    return y"


def checked(checker: Checker, body: str, head: str = HEAD) -> str:
    text = f"{head}    {body}\n"
    capture = checker.capture(text)
    candidate = planned(capture)
    assert candidate.launches
    for n in (37, 1, 64):
        assert checker.failures(capture, [candidate], Case({"N": n}, "normal", 5)) == [""]
    return candidate.source.split("def f_launch(")[1].split("return")[0]


@pytest.mark.parametrize("name", DIRECT)
def test_an_elementwise_update_needs_no_copy(checker: Checker, name: str) -> None:
    assert "x.copy_(" not in checked(checker, DIRECT[name])


@pytest.mark.parametrize("name", COPIED)
def test_an_old_value_with_later_readers_is_not_overwritten(checker: Checker, name: str) -> None:
    assert "x.copy_(" in checked(checker, COPIED[name])


def test_a_per_row_update_needs_no_copy(checker: Checker) -> None:
    assert "m.copy_(" not in checked(checker, OF_ROWS, ROWS)
    assert "m.copy_(" in checked(checker, OF_ROWS_WANTED, ROWS), (
        "programs that share a row read the old number all along it"
    )


def test_overlapping_arguments_run_the_original_code(checker: Checker) -> None:
    """In the original, each operation sees earlier writes, also through the other argument."""
    text = f"{HEAD}    {DIRECT['an update']}\n"
    capture = checker.capture(text)
    source = fused(capture, text).source
    helper = "\n\n\n".join(source[source.index("_OVERLAP_RESULTS = {}") :].split("\n\n\n")[:2])
    names: dict[str, object] = {}
    exec(helper, names)
    base = torch.zeros(64)
    do_not_overlap = names["_do_not_overlap"]
    assert callable(do_not_overlap)
    assert do_not_overlap((base[:32], base[32:]), 1)
    assert not do_not_overlap((base[:33], base[32:]), 1)
    assert not do_not_overlap((base, base), 1)
    assert do_not_overlap((base[:8], base[32:], base[32:]), 1), "only what is written into matters"
    assert not do_not_overlap((base[::2], base[62:]), 1), "strides count"
    assert do_not_overlap((base[:32], base[62:]), 1), (
        "what is found for one is not remembered for another that begins alike"
    )
    assert not do_not_overlap((base[:33], base[32:]), 1)
    for start in range(40):
        assert do_not_overlap((base[start : start + 1], base[start + 1 :]), 1)
    assert len(names["_OVERLAP_RESULTS"]) <= 16
    assert "_do_not_overlap((x, g), 1)" in source
