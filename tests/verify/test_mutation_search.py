"""A search changes sizes and values towards larger errors, and refuses candidates that pass the fixed cases."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest
from pairs import HONEST, REFERENCE, changed

from mtmc_lsp.core.results import CheckStatus, Verdict, VerdictStatus
from mtmc_lsp.verify.foreign import mutation
from mtmc_lsp.verify.foreign.mutation import MOST_CASES, SEARCH
from mtmc_lsp.verify.foreign.value_mix import LIMITS, ValueMix

Judge = Callable[..., Verdict]
STORED = "x * scale * w"


def test_names_of_mixes_have_all_their_parameters() -> None:
    random, mix = Random(7), ValueMix()
    for _ in range(200):
        mix = mix.changed(random)
        assert ValueMix.of(mix.name) == mix
        assert all(low <= getattr(mix, name) <= high for name, (low, high) in LIMITS.items())


@pytest.mark.parametrize("error", ["2e-6", "1.5e-6"])
def test_errors_that_grow_with_the_part_of_zeros_are_found(
    judge: Judge, error: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the fixed cases, at most a fifth of the values of a row that has others are 0."""
    # On a busy machine, the usual time is enough for few cases only.
    monkeypatch.setattr(mutation, "MOST_SECONDS", 90.0)
    monkeypatch.setattr(mutation, "PART", 100.0)
    part = "tl.sum(tl.where((x == 0) & mask, 1.0, 0.0), axis=0) / columns"
    verdict = judge(REFERENCE, "rms", changed(HONEST, (STORED, f"{STORED} * (1 + {error} * {part})")), "fast")
    assert verdict.status is VerdictStatus.INCORRECT
    assert "varied" in verdict.reason, verdict.reason


def test_the_search_states_the_largest_error_of_an_honest_candidate(
    judge: Judge, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mutation, "MOST_SECONDS", 90.0)
    monkeypatch.setattr(mutation, "PART", 100.0)
    verdict = judge(REFERENCE, "rms", HONEST, "fast")
    assert verdict.status is VerdictStatus.CORRECT, verdict.reason
    (check,) = (check for check in verdict.checks if check.name == SEARCH)
    assert check.status is CheckStatus.PASSED
    assert check.detail.startswith(f"{MOST_CASES} cases tried") and "of its limit" in check.detail
