"""The request that cross-compiles kernels."""

from __future__ import annotations

from dataclasses import dataclass

from mtmc_lsp.core.results import CompileReport
from mtmc_lsp.core.run import KernelLaunch
from mtmc_lsp.process.protocol import NoAnswer, Request


@dataclass(frozen=True)
class TensorLayout:
    """A tensor without data."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    """In elements."""
    dtype: str


@dataclass(frozen=True)
class LauncherCalls:
    """Calls of a launcher on tensors without data, which show the kernels that it launches."""

    launcher: str
    """Name of the function in the module."""
    inputs: tuple[tuple[TensorLayout, ...], ...]
    """The tensors of each call."""
    trained: tuple[int, ...] = ()
    """Numbers of the tensors whose gradients the backward pass computes, which then runs, too."""


@dataclass(frozen=True)
class CompileReports:
    """The reports of several versions."""

    reports: tuple[CompileReport, ...]


@dataclass(frozen=True)
class CompileRequest(Request[CompileReport], command="compile.launches"):
    """Compile every launch for every architecture; no GPU is needed.

    The answer has one report for each launch and architecture, in this order, or a single report with an empty kernel name if
    the module cannot be imported.
    """

    path: str
    """The file that the module replaces."""
    name: str
    """The module's name."""
    source: str
    launches: tuple[KernelLaunch, ...]
    archs: tuple[str, ...]
    """``sm_90``, ``gfx942``."""
    seconds: float
    """Time limit; the reports of launches that are not compiled in time contain an error."""
    calls: LauncherCalls | None = None
    """Where to find further launches."""
    builds_launchers: bool = False
    """Whether the kernels are for a GPU of this machine, so that what launches them is built, too."""


@dataclass(frozen=True)
class CompileVariantsRequest(Request[CompileReports], command="compile.variants"):
    """Compile several versions at once, so that their kernels share all cores."""

    versions: tuple[CompileRequest, ...]
    seconds: float
    """Time limit for all of them."""


@dataclass(frozen=True)
class PrepareCompilerRequest(Request[NoAnswer], command="compile.prepare"):
    """Import the compilers, and hash Triton's files for the keys of its cache, before there is anything to compile."""
