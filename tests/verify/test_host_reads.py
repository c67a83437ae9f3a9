"""Only what a candidate itself reads in Python gets further values: not what the verification reads around its calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from pairs import HONEST, REFERENCE, changed

from mtmc_lsp.core.results import Verdict, VerdictStatus
from mtmc_lsp.verify.foreign.further_calls import FurtherCalls
from mtmc_lsp.verify.worker.observation.host_reads import HostReads

END = "    return out\n"


def test_reads_in_the_call_are_counted_and_no_others() -> None:
    reads, x = HostReads(), torch.ones(3)
    x.sum().item()
    assert reads.call(lambda value: value + 1, x).tolist() == [2.0] * 3
    assert (reads.count, reads.converted) == (0, 0)
    reads.call(lambda value: (value.tolist(), bool(value.any())), x)
    assert (reads.count, reads.converted) == (2, 3)


@pytest.mark.parametrize("reads", [False, True])
def test_a_candidate_that_reads_gets_more_values_and_an_other_one_does_not(
    reads: bool, judge: Callable[..., Verdict], monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = list[Any]()
    original = FurtherCalls._with_more_values

    def noted(self: FurtherCalls, cases: Any) -> Iterator[Any]:
        for outcome in original(self, cases):
            tried.append(outcome)
            yield outcome

    monkeypatch.setattr(FurtherCalls, "_with_more_values", noted)
    text = changed(
        HONEST, (END, f"    if out.numel() and out.flatten()[0].item() > 1e30:\n        return out * 1\n{END}")
    )
    verdict = judge(REFERENCE, "rms", text if reads else HONEST, "fast")
    assert verdict.status is VerdictStatus.CORRECT, verdict.reason
    assert bool(tried) == reads
