"""Inputs for each reference, and witnesses made of them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.adversarial_second.cases import Witness

SIZES = {
    "softmax": (5, 70), "layer_norm": (5, 70), "rms_norm": (5, 70), "linear_gelu": (33, 40, 37),
    "running_sum": (4, 150), "cross_entropy": (6, 70), "gated": (2, 7, 12), "masked_softmax": (5, 70),
    "best": (5, 70), "gated_norm": (2, 3),
}  # fmt: skip
"""Sizes that suit each base kernel, in the order of its reference's directive; (M, K, N) for the product."""


def inputs(base: str, *sizes: int, seed: int = 0) -> list[torch.Tensor]:
    """Random arguments of a reference at these sizes."""
    draw = torch.Generator().manual_seed(seed)
    first, *rest = sizes or SIZES[base]

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=draw)

    if base == "linear_gelu":
        inner, outer = rest
        return [normal(first, inner), normal(inner, outer), normal(outer)]
    if base == "gated":
        length, width = rest
        return [normal(first, length, width), normal(width), normal(first, 1, width)]
    if base == "gated_norm":
        return [normal(first, rest[0], 64)]
    width = rest[0]
    x = normal(first, width)
    if base == "layer_norm":
        return [x, normal(width), normal(width)]
    if base == "rms_norm":
        return [x.half(), normal(width).half()]
    if base == "cross_entropy":
        return [x, torch.randint(0, width, (first,), generator=draw)]
    if base == "masked_softmax":
        return [x, torch.rand(first, width, generator=draw) < 0.3]
    return [x]


def at(base: str, *sizes: int, seed: int = 0) -> Witness:
    """One call with random arguments of these sizes."""
    return on(lambda: inputs(base, *sizes, seed=seed))


def on(make: Callable[[], list[Any]], view: Callable[[Any], Any] = lambda result: result) -> Witness:
    """One call with the arguments that ``make`` returns; ``view`` of the results is compared."""

    def witness(reference: Any, candidate: Any) -> tuple[Any, Any]:
        return view(reference(*copy.deepcopy(make()))), view(candidate(*make()))

    return witness


def changed(base: str, change: Callable[..., Any], *sizes: int) -> Witness:
    """One call whose first argument is ``change`` of the random one."""

    def make() -> list[Any]:
        first, *rest = inputs(base, *sizes)
        return [change(first), *rest]

    return on(make)


def calls(base: str, number: int, *sizes: int, same: bool = False) -> Witness:
    """The results of many calls, all compared; with ``same`` each has the same contents."""

    def witness(reference: Any, candidate: Any) -> tuple[Any, Any]:
        batches = [inputs(base, *sizes, seed=0 if same else seed) for seed in range(number)]
        results = [candidate(*batch) for batch in batches]
        return [reference(*batch) for batch in batches], results

    return witness


def module(action: Callable[[Any], Any], *arguments: Any) -> Witness:
    """What ``action`` returns for an instance of each class; both have the same parameters."""

    def witness(reference: Any, candidate: Any) -> tuple[Any, Any]:
        made = reference(*(arguments or (64, 1e-5)))
        other = candidate(*(arguments or (64, 1e-5)))
        other.load_state_dict(made.state_dict())
        torch.manual_seed(1)
        expected = action(made)
        torch.manual_seed(1)
        return expected, action(other)

    return witness
