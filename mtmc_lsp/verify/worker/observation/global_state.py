"""Torch's and Python's global state, which decides how the rest of the program computes: a call must not change it.

Runs in workers.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Mapping
from typing import Any

import torch

OF_COMPILERS = ("TRITON_", "TORCHINDUCTOR_", "CUDA_")
"""Prefixes of environment variables that compilers set."""
RANDOM_STATE = "torch's random state"
STATE: Mapping[str, Callable[[], Any]] = {
    "the default dtype": torch.get_default_dtype,
    "gradient mode": torch.is_grad_enabled,
    "inference mode": torch.is_inference_mode_enabled,
    "the number of threads": torch.get_num_threads,
    "the precision of float32 products": torch.get_float32_matmul_precision,
    "torch.backends.cuda.matmul.allow_tf32": lambda: torch.backends.cuda.matmul.allow_tf32,
    "torch.backends.cudnn.allow_tf32": lambda: torch.backends.cudnn.allow_tf32,
    "torch.backends.cudnn.enabled": lambda: torch.backends.cudnn.enabled,
    "torch.backends.cudnn.benchmark": lambda: torch.backends.cudnn.benchmark,
    "torch.backends.cudnn.deterministic": lambda: torch.backends.cudnn.deterministic,
    "deterministic algorithms": torch.are_deterministic_algorithms_enabled,
    "autocast": lambda: (torch.is_autocast_enabled("cuda"), torch.is_autocast_enabled("cpu")),
    "environment variables": lambda: {k: v for k, v in os.environ.items() if not k.startswith(OF_COMPILERS)},
    "the working folder": os.getcwd,
    "Python's random state": random.getstate,
    RANDOM_STATE: lambda: _random_state(),
}


OF_IMPORTS = ("environment variables", "the working folder", "Python's random state", RANDOM_STATE)
"""What the imports of an honest file may change."""


def global_state() -> dict[str, Any]:
    """The present state by name."""
    return {name: read() for name, read in STATE.items()}


def changed_state(before: Mapping[str, Any]) -> list[str]:
    """The names of what differs from an earlier state."""
    return [name for name, value in global_state().items() if value != before[name]]


def _random_state() -> tuple[bytes, ...]:
    states = [torch.get_rng_state()]
    if torch.cuda.is_initialized():
        states.append(torch.cuda.get_rng_state())
    return tuple(state.numpy().tobytes() for state in states)
