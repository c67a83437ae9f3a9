"""No known way to fool a verification gets through, and no honest kernel is refused.

The candidates are judged in parts, each by whichever process of the test run comes to it first; the last test counts them all.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable
from typing import Any

import pytest
from cheats import CHEATS, CONSTANT, CONSTANT_ANSWER
from honest import BY_HAND, OF_OURS
from pairs import HONEST, REFERENCE, changed

from mtmc_lsp.core.results import CheckStatus, Verdict, VerdictStatus
from tests.codegen import families
from tests.codegen.checker import planned

WAYS = 36
"""Ways in the list of docs/verify.md."""
REFUSED = (VerdictStatus.INCORRECT, VerdictStatus.RUNTIME_ERROR)
PARTS = 3
"""That the cheats, and the honest kernels, are judged in."""
CONSTANT_CHEAT = "29 an answer that never changes"

Judge = Callable[..., Verdict]
Part = Callable[[str, int], dict[str, str]]


@pytest.fixture
def part(judge: Judge, tmp_path_factory: pytest.TempPathFactory) -> Part:
    """What is wrong with each of a part's verdicts, judged once in a test run; empty where nothing is."""
    base = tmp_path_factory.getbasetemp()
    folder = base.parent if os.environ.get("PYTEST_XDIST_WORKER") else base

    def judged(kind: str, number: int) -> dict[str, str]:
        path = folder / f"{kind}-{number}.json"
        with open(path.with_suffix(".lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not path.exists():
                one = cheat_missed if kind == "cheats" else honest_refused
                names = (all_cheats() if kind == "cheats" else all_honest())[number::PARTS]
                path.write_text(json.dumps({name: one(judge, name) for name in names}))
            found: dict[str, str] = json.loads(path.read_text())
            return found

    return judged


def all_cheats() -> list[str]:
    """Their names."""
    return [*CHEATS, CONSTANT_CHEAT]


def all_honest() -> list[str]:
    """Their names: by hand, and of our own coder."""
    return [*BY_HAND, *OF_OURS]


def test_the_honest_candidate_is_certified_by_every_check(judge: Judge) -> None:
    verdict = judge(REFERENCE, "rms", HONEST, "fast")
    assert verdict.status is VerdictStatus.CORRECT, verdict.reason
    assert {"result 0 values", "kernel's result used", "many calls"} <= {check.name for check in verdict.checks}


@pytest.mark.parametrize("number", range(PARTS))
@pytest.mark.parametrize("kind", ["cheats", "honest"])
def test_every_candidate_of_a_part_gets_the_verdict_that_it_deserves(kind: str, number: int, part: Part) -> None:
    wrong = {name: said for name, said in part(kind, number).items() if said}
    assert wrong == {}


@pytest.mark.timeout(900)  # where no other test has judged any, it judges them all
def test_no_cheat_is_certified_and_every_honest_kernel_is(part: Part, capsys: pytest.CaptureFixture[str]) -> None:
    """All known ways, each caught by what is meant to catch it; and honest kernels of many kinds."""
    cheats, honest = ({k: v for n in range(PARTS) for k, v in part(kind, n).items()} for kind in ("cheats", "honest"))
    ways = {int(name.split()[0]) for name in cheats}
    counts = [sum(not said for said in found.values()) for found in (cheats, honest)]
    with capsys.disabled():
        print(
            f"\n{counts[0]} of {len(cheats)} cheats by {len(ways)} of {WAYS} ways refused, "
            f"{counts[1]} of {len(honest)} honest kernels certified"
        )
    assert counts == [len(cheats), len(honest)]
    assert ways == set(range(1, WAYS + 1))
    assert (set(cheats), set(honest)) == (set(all_cheats()), set(all_honest()))
    assert len(honest) >= 40


def cheat_missed(judge: Judge, cheat: str) -> str:
    """What is wrong with the verdict on a cheat; empty where it is refused for the right reason."""
    if cheat == CONSTANT_CHEAT:
        constant = judge(CONSTANT, "constant", CONSTANT_ANSWER, "fast")
        return "" if constant.status is VerdictStatus.UNCERTIFIABLE else constant.status.value
    changes, caught_by = CHEATS[cheat]
    verdict = judge(REFERENCE, "rms", changed(HONEST, *changes), "fast")
    failed = [f"{c.name} {c.detail} {c.case}" for c in verdict.checks if c.status is CheckStatus.FAILED]
    said = " ".join([verdict.reason, *failed])
    return "" if verdict.status in REFUSED and caught_by in said else f"{verdict.status.value}: {said}"


def honest_refused(judge: Any, name: str) -> str:
    """Why an honest kernel was refused; empty where it was certified."""
    verdict = judge(*(BY_HAND[name] if name in BY_HAND else ours(judge, name)))
    return "" if verdict.is_correct else f"{verdict.status.value}: {verdict.reason}"


def ours(judge: Any, name: str) -> tuple[str, str, str, str]:
    """A family's reference, and what our own coder writes for it."""
    kinds = {**families.POINTWISE, **families.VIEWS, **families.REDUCTIONS, **families.NORMS}
    text = families.source(kinds[name], "f32")
    return text, "f", planned(judge.capture(text, "f")).source, "f"
