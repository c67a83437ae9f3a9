"""No known way to fool a verification gets through, and no honest kernel is refused."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
from cheats import CHEATS, CONSTANT, CONSTANT_ANSWER
from honest import BY_HAND, OF_OURS
from pairs import HONEST, REFERENCE, changed

from mtmc_lsp.core.results import CheckStatus, Verdict, VerdictStatus
from tests.micro import families
from tests.micro.checker import planned

WAYS = 36
"""Ways in the list of docs/verify.md."""
REFUSED = (VerdictStatus.INCORRECT, VerdictStatus.RUNTIME_ERROR)


def test_the_honest_candidate_is_certified_by_every_check(judge: Callable[..., Verdict]) -> None:
    verdict = judge(REFERENCE, "rms", HONEST, "fast")
    assert verdict.status is VerdictStatus.CORRECT, verdict.reason
    assert {"result 0 values", "kernel's result used", "many calls"} <= {check.name for check in verdict.checks}


@pytest.mark.timeout(1500)  # some eighty candidates, each in a process of its own
def test_no_cheat_is_certified_and_every_honest_kernel_is(judge, capsys) -> None:
    """All known ways, each caught by what is meant to catch it; and kernels by hand and of our own coder."""
    with ThreadPoolExecutor(2) as pool:
        cheats = dict(zip(CHEATS, pool.map(lambda name: _missed(judge, name), CHEATS), strict=True))
        constant = judge(CONSTANT, "constant", CONSTANT_ANSWER, "fast")
        pairs = {**BY_HAND, **{name: _ours(judge, name) for name in OF_OURS}}
        verdicts = dict(zip(pairs, pool.map(lambda pair: judge(*pair), pairs.values()), strict=True))
    if constant.status is not VerdictStatus.UNCERTIFIABLE:
        cheats["29 an answer that never changes"] = constant.status.value
    missed = {name: said for name, said in cheats.items() if said}
    refused = {name: verdict.reason for name, verdict in verdicts.items() if not verdict.is_correct}
    ways = {int(name.split()[0]) for name in CHEATS} | {29}
    with capsys.disabled():
        print(
            f"\n{len(CHEATS) + 1 - len(missed)} of {len(CHEATS) + 1} cheats by {len(ways)} of {WAYS} ways refused, "
            f"{len(verdicts) - len(refused)} of {len(verdicts)} honest kernels certified"
        )
    assert (missed, refused) == ({}, {})
    assert ways == set(range(1, WAYS + 1))
    assert len(verdicts) >= 40


def _missed(judge: Callable[..., Verdict], cheat: str) -> str:
    """What is wrong with the verdict on a cheat; empty where it is refused for the right reason."""
    changes, caught_by = CHEATS[cheat]
    verdict = judge(REFERENCE, "rms", changed(HONEST, *changes), "fast")
    failed = [f"{c.name} {c.detail} {c.case}" for c in verdict.checks if c.status is CheckStatus.FAILED]
    said = " ".join([verdict.reason, *failed])
    return "" if verdict.status in REFUSED and caught_by in said else f"{verdict.status.value}: {said}"


def _ours(judge, name: str) -> tuple[str, str, str, str]:
    """A family's reference, and what our own coder writes for it."""
    kinds = {**families.POINTWISE, **families.VIEWS, **families.REDUCTIONS, **families.NORMS}
    text = families.source(kinds[name], "f32")
    return text, "f", planned(judge.capture(text, "f")).source, "f"
