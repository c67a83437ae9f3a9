"""How results follow choices by index among tied scores. Runs in workers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from mtmc_lsp.verify.worker.comparison.discrete import Ties
from mtmc_lsp.verify.worker.comparison.ill_conditioned import IllConditioned
from mtmc_lsp.verify.worker.oracle_runs.tensors import ResultKey


def following_results(
    others: Iterable[Mapping[ResultKey, torch.Tensor]],
    exact: Mapping[ResultKey, torch.Tensor],
    ties: Mapping[ResultKey, Ties],
    errors: Iterable[ResultKey],
    distances: Callable[[Mapping[ResultKey, torch.Tensor]], Mapping[ResultKey, float]],
) -> tuple[dict[ResultKey, IllConditioned], dict[ResultKey, float]]:
    """How the floating-point results follow choices among ties, and how far these move each; adds integer results to ``ties``.

    Args:
        others: the oracle's results with other choices.
        errors: the keys of the floating-point results.
    """
    following = {i: IllConditioned(is_uneven=True) for i in errors}
    moved = dict.fromkeys(following, 0.0)
    for results in others:
        for i, value in results.items():
            (following[i] if i in following else ties[i]).add_draw(value, exact[i])
        moved |= {i: max(moved[i], distance) for i, distance in distances(results).items() if i in moved}
    return following, moved


def with_integers_of(reference: Mapping[str, Any], oracle: Mapping[str, Any]) -> dict[str, Any]:
    """The oracle's results, with the reference's where they are no floating-point tensors."""

    def chosen(value: Any, exact: Any) -> Any:
        return exact if isinstance(value, torch.Tensor) and value.is_floating_point() else value

    after = {name: chosen(value, oracle["after"].get(name, value)) for name, value in reference["after"].items()}
    return {"results": list(map(chosen, reference["results"], oracle["results"])), "after": after}
