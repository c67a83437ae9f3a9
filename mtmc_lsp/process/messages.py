"""The request that starts a worker's libraries."""

from __future__ import annotations

from dataclasses import dataclass

from mtmc_lsp.process.protocol import NoAnswer, Request
from mtmc_lsp.process.sandbox import Isolation


@dataclass(frozen=True)
class StartAnswer:
    """The state of a worker after its libraries started."""

    isolation: Isolation
    """The sandbox that the worker runs in."""
    gpu: str
    """UUID of the GPU; empty without one."""
    free_bytes: int
    """Free GPU memory."""
    error: str
    """Why CUDA does not start; empty if it did or was not requested."""


@dataclass(frozen=True)
class Libraries:
    """What the libraries of a GPU will compute, by dtype. Each loads its kernels with its first operation."""

    products: tuple[str, ...] = ()
    convolutions: tuple[str, ...] = ()


@dataclass(frozen=True)
class StartRequest(Request[StartAnswer], command="process.start"):
    """Import torch and create the GPU context, so that the first real request does not wait for them."""

    gpu: bool
    """Whether to create a GPU context."""
    for_candidates: bool = False
    """Whether candidates will run here: also start Triton's driver and limit the GPU memory of the process."""
    libraries: Libraries = Libraries()
    """What to load, once."""


@dataclass(frozen=True)
class ReleaseRequest(Request[NoAnswer], command="process.release"):
    """Free GPU memory that other workers need: unused memory, and what can be computed again or kept on the host."""
