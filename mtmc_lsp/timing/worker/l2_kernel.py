"""A Triton kernel that reads a tensor many times from the L2 cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

BLOCK = 4096
PROGRAMS_PER_SM = 4


@triton.jit  # type: ignore[untyped-decorator]
def _read_kernel(source, sums, blocks, repeats, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    total = tl.zeros((BLOCK,), tl.float32)
    for step in range(repeats):
        # Each step reads another block, past the L1 (.cg): nothing but the L2 can hold it.
        block = (program + step * programs) % blocks
        total += tl.load(source + block * BLOCK + tl.arange(0, BLOCK), cache_modifier=".cg")
    tl.store(sums + program, tl.sum(total, 0))


def launch_reads(source: torch.Tensor, sm_count: int, repeats: int) -> tuple[int, Callable[[], Any]]:
    """How many bytes the kernel reads, and what launches it.

    Args:
        source: float32 values that the L2 can hold.
        sm_count: multiprocessors of the GPU.
        repeats: how often all of ``source`` is read, about.
    """
    programs = PROGRAMS_PER_SM * sm_count
    blocks = source.numel() // BLOCK
    steps = max(1, repeats * blocks // programs)
    sums = torch.empty(programs, device=source.device)
    return 4 * BLOCK * programs * steps, lambda: _read_kernel[(programs,)](source, sums, blocks, steps, BLOCK=BLOCK)
