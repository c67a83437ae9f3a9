"""Stand-ins for functions of ``torch.cuda`` that launchers call, where there is no GPU. Runs in workers."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import torch

CAPABILITY = (9, 0)
"""Launchers choose options by it; the interpreter runs any of them."""
PROPERTIES = SimpleNamespace(
    name="CPU", major=CAPABILITY[0], minor=CAPABILITY[1], multi_processor_count=132, total_memory=1 << 36, warp_size=32,
    max_threads_per_multi_processor=2048, regs_per_multiprocessor=65536, shared_memory_per_multiprocessor=233472,
    shared_memory_per_block_optin=232448, L2_cache_size=50 << 20,
)  # fmt: skip
"""Those of an H100."""


def stand_in_for_cuda() -> None:
    """Let launchers run that name the GPU: the device context, its capability, its properties, synchronisation."""
    if torch.cuda.is_available():
        return
    answers: dict[str, Any] = {
        "device": lambda *_: contextlib.nullcontext(),
        "device_of": lambda *_: contextlib.nullcontext(),
        "stream": lambda *_: contextlib.nullcontext(),
        "get_device_capability": lambda *_: CAPABILITY,
        "get_device_properties": lambda *_: PROPERTIES,
        "get_device_name": lambda *_: PROPERTIES.name,
        "current_device": lambda: 0,
        "device_count": lambda: 1,
        "set_device": lambda *_: None,
        "synchronize": lambda *_: None,
        "empty_cache": lambda: None,
        "manual_seed": lambda *_: None,
        "manual_seed_all": lambda *_: None,
    }
    for name, answer in answers.items():
        setattr(torch.cuda, name, answer)
