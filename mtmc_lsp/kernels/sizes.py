"""The cases on which kernels are observed: sizes that blocks divide and others, small ones, values of one sign."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence

from mtmc_lsp.core.errors import Location, RequestError
from mtmc_lsp.core.workload import Workload, WorkloadSource
from mtmc_lsp.kernels.messages import CaseTrace, TraceCase

MOST_ELEMENTS = 12_000
"""Elements in one case of the arguments with named sizes: the interpreter runs it in some tenths of a second."""
MOST_FIXED_ELEMENTS = 2_000_000
"""The same limit for arguments of fixed size, such as a cache of keys."""
QUICK_STEPS, MOST_FAILING = 600, 6
"""Memory operations of a sound case, and the failing cases, on which each candidate is observed."""
SMALL = (1, 2, 1, 3), (2, 1, 3, 1)
LEAST = 4
BLOCK = re.compile(r"(?<![\w.])(\d{1,4})(?![\w.])")
LEAST_BLOCK, LARGEST_BLOCK, MOST_BLOCKS = 8, 4096, 3
BESIDE_BLOCKS = 5
"""The other sizes of a case with a size next to a block."""


def elements_of(workload: Workload, sizes: Mapping[str, int]) -> int:
    """The number of elements of all tensors among the arguments."""
    return sum(math.prod(size.value(sizes) for size in tensor.shape) for tensor in workload.tensors.values())


def _varying_elements(workload: Workload, sizes: Mapping[str, int]) -> int:
    """The elements of the tensors with named sizes."""
    shapes = (tensor.shape for tensor in workload.tensors.values())
    return sum(
        math.prod(size.value(sizes) for size in shape) for shape in shapes if not all(s.is_constant for s in shape)
    )


def trace_cases(workload: Workload, text: str) -> tuple[TraceCase, ...]:
    """The cases for a launcher, the smallest first.

    Raises:
        RequestError: the sizes are numbers, and too large for Triton's interpreter.
    """
    sizes = dict(workload.sizes)
    if workload.source is WorkloadSource.SCRIPT:
        return (TraceCase({}),)
    base = reduced(workload)
    if elements_of(workload, base) > MOST_FIXED_ELEMENTS:
        raise RequestError(
            "the sizes of the workload are too large for Triton's interpreter",
            where=Location(workload.target.path, workload.line or workload.target.start_line),
            remedy="Record a run with small inputs, too: its launches are observed, and the most frequent ones are timed."
            if workload.launch is not None
            else "Name the sizes, as in x=f32[M,N] M=4096 N=4096, so that smaller ones can be tried.",
        )
    if not sizes:
        return (TraceCase({}), TraceCase({}, "negative", 1), TraceCase({}, "positive", 2))
    names = list(base)
    most = 2 * max(MOST_ELEMENTS, _varying_elements(workload, base))
    odd = {name: _odd(base[name], i) for i, name in enumerate(names)}
    plans = [(base, "normal"), (odd, "normal"), (odd, "negative"), (odd, "positive")]
    plans += [({name: row[i % 4] for i, name in enumerate(names)}, "normal") for row in SMALL]
    for block in _blocks(text):
        for name in names:
            beside = {other: min(size, BESIDE_BLOCKS + i) for i, (other, size) in enumerate(odd.items())}
            plans += [({**beside, name: size}, "normal") for size in (block, block + 1, 3 * block - 1)]
        plans.append((dict.fromkeys(names, block), "normal"))
    allowed = {
        (tuple(plan.items()), distribution): None
        for plan, distribution in plans
        if _varying_elements(workload, plan) <= most
    }
    cases = [TraceCase(dict(items), distribution, seed) for seed, (items, distribution) in enumerate(allowed)]
    return tuple(sorted(cases, key=lambda case: elements_of(workload, case.sizes)))


def reduced(workload: Workload) -> dict[str, int]:
    """The workload's sizes, the largest one halved until the interpreter can run them."""
    sizes = dict(workload.sizes)
    while _varying_elements(workload, sizes) > MOST_ELEMENTS:
        largest = max(sizes, key=lambda name: sizes[name])
        if sizes[largest] <= LEAST:
            break
        sizes[largest] = max(LEAST, math.ceil(sizes[largest] / 2))
    return sizes


def _odd(size: int, position: int) -> int:
    """An odd size near ``size``, so that no block divides it. The distance depends on the position."""
    return max(3, (size - 3 + 4 * (position % 2) - 2 * position) | 1)


def _blocks(text: str) -> list[int]:
    """Numbers of the text that may be sizes of blocks, the most frequent first."""
    code = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))
    numbers = [int(item) for item in BLOCK.findall(code)]
    powers = [n for n in numbers if LEAST_BLOCK <= n <= LARGEST_BLOCK and not n & (n - 1)]
    return sorted(set(powers), key=lambda n: (-powers.count(n), n))[:MOST_BLOCKS]


def quick_cases(traces: Sequence[CaseTrace]) -> list[TraceCase]:
    """The cases on which candidates are observed: those that show a fault, and sound ones that take little time."""
    failing = [trace for trace in traces if trace.faults][:MOST_FAILING]
    shown = {id(trace) for trace in failing}
    return [t.case for t in traces if id(t) in shown or (t.is_sound and not t.refusal and t.steps <= QUICK_STEPS)]
