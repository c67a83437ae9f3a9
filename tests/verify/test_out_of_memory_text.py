"""The reason of a version that runs out of GPU memory."""

from __future__ import annotations

import pytest
import torch

from mtmc_lsp.verify.messages import CandidateSource
from mtmc_lsp.verify.worker.observation.failures import failure

ADVICE = (
    "CUDA out of memory. Tried to allocate 7.81 GiB. GPU 0 has a total capacity of 139.80 GiB of which 2.68 GiB is free. "
    "Process 14386 has 7.22 GiB memory in use. If reserved but unallocated memory is large try setting "
    "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation."
)


@pytest.mark.parametrize(
    ("text", "end"),
    [
        (ADVICE, "7.81 GiB needed, 2.68 GiB free"),
        ("CUDA error: out of memory", "OutOfMemoryError: CUDA error: out of memory"),
    ],
)
def test_the_reason_names_the_needed_and_the_free_memory(text: str, end: str) -> None:
    candidate = CandidateSource.__new__(CandidateSource)
    object.__setattr__(candidate, "separate", None)
    answer = failure("runtime_error", torch.OutOfMemoryError(text), candidate)
    assert answer.reason == f"it ran out of memory, which is limited: {end}"
