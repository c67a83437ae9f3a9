"""The step of many calls: on the same values, and on values that together cover the range of each element. Runs in workers.

A candidate may be wrong in each hundredth call, for a narrow range of one element, or overwrite a result much later.
"""

from __future__ import annotations

from collections.abc import Mapping
from time import process_time
from typing import Any

import numpy
import torch

from mtmc_lsp.capture.worker.arguments.strided_tensors import laid_out
from mtmc_lsp.verify.use.uses import Use
from mtmc_lsp.verify.worker.run_target import flatten, snapshot
from mtmc_lsp.verify.worker.use.steps import Entry, Steps
from mtmc_lsp.verify.worker.use.subject import Subject

OF_MANY_CALLS = Steps()
MOST_CALLS = 320
EQUAL_CALLS = 32
"""The first calls, on equal values."""
LEAST_CALLS = 8
MOST_BYTES = 1 << 26
"""Limit for the arguments of all calls."""
CALL_SECONDS, MORE_SECONDS = 1.0, 2.0
"""Processor time after which a candidate makes no further calls: after :data:`MANY_CALLS`, and after fewer."""
MANY_CALLS = 100
REFERENCE_SECONDS = 0.2
WIDTH = 4.0
"""Largest value, in units of the root mean square of the usual values."""


def number_of_calls(subject: Subject) -> int:
    """As many calls as cost the reference little time."""
    size = sum(tensor.numel() * tensor.element_size() for tensor in subject.inputs.values())
    target = subject.new()
    began = process_time()
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        for _ in range(LEAST_CALLS):
            subject.call(target)
    seconds = (process_time() - began) / LEAST_CALLS
    return int(max(LEAST_CALLS, min(MOST_CALLS, REFERENCE_SECONDS / (seconds + 1e-6), MOST_BYTES / (size + 1))))


def values_of_calls(inputs: Mapping[str, torch.Tensor], calls: int, seed: int) -> dict[str, torch.Tensor]:
    """The floating-point arguments of all calls, one call in each row.

    After the equal calls, each element takes one value in each of as many parts of its range as there are calls.
    """
    generator = torch.Generator().manual_seed(seed)
    rows = dict[str, torch.Tensor]()
    for name, value in inputs.items():
        if not value.is_floating_point() or not value.numel():
            continue
        usual = value.detach().float().cpu()
        equal = usual.expand(min(EQUAL_CALLS, calls // 4), *usual.shape)
        count = calls - len(equal)
        order = _orders(count, usual.numel(), seed + len(rows)).reshape(count, *usual.shape)
        part = (order + torch.rand(order.shape, generator=generator)) / count
        low, high = float(usual.min()), float(usual.max())
        if low < 0 < high:
            scale = float(usual.square().mean().sqrt())
            wide = (2 * part - 1) * WIDTH * scale
            normal = torch.special.ndtri(part.clamp(1e-4, 1 - 1e-4)) * scale
            varied = torch.where((order % 2 == 0), wide, normal)
        else:
            varied = low + part * (high - low)
        rows[name] = torch.cat([equal, varied]).to(value.dtype).to(value.device)
    return rows


def _orders(count: int, elements: int, seed: int) -> torch.Tensor:
    """The numbers below ``count`` in a random order for each element, in columns."""
    numbers = numpy.broadcast_to(numpy.arange(count, dtype=numpy.int16), (elements, count))
    shuffled = numpy.random.default_rng(seed).permuted(numbers, axis=1)
    return torch.from_numpy(shuffled).T.contiguous()


@OF_MANY_CALLS.step("many_calls")
def many_calls(subject: Subject, use: Use) -> list[Entry]:
    """Call on all values; the results stay in memory, and none may change later."""
    target, entries = subject.new(), []
    kept: list[tuple[Any, Any]] = []
    alive = []
    began = process_time()
    for i in range(int(use.value)):
        limit = CALL_SECONDS if i >= MANY_CALLS else MORE_SECONDS
        if subject.is_candidate and i >= LEAST_CALLS and process_time() - began > limit:
            break
        rows = {name: laid_out(row[i], subject.inputs[name].stride()) for name, row in subject.rows.items()}
        # As long as all arguments stay in memory, each call gets them at other addresses.
        alive.append({**subject.fresh(), **rows})
        returned = flatten(subject.call(target, alive[-1]))
        snapshots = [snapshot(value) for value in returned]
        kept += zip(returned, snapshots, strict=True)
        entries += [Entry(f"result {j} of call {i + 1}", value) for j, value in enumerate(snapshots)]
    return [Entry("the content of earlier results", _content(kept)), *entries]


def _content(kept: list[tuple[Any, Any]]) -> str:
    tensors = [(a.detach(), b) for a, b in kept if isinstance(a, torch.Tensor) and a.layout is torch.strided]
    # NaN equals NaN.
    is_same = all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in tensors)
    return "unchanged" if is_same else "changed by a later call"
