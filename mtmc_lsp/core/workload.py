"""What is optimised (target) and on what (workload)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from mtmc_lsp.core.graph import Graph
from mtmc_lsp.core.sizes import Size


class TargetKind(Enum):
    """What kind of code a target is."""

    FUNCTION = "function"
    METHOD = "method"
    """``Class.forward`` of an ``nn.Module`` (or another method of it)."""
    MODULE = "module"
    """The ``nn.Module`` class; its ``forward`` is what runs."""
    KERNEL = "kernel"
    """A ``@triton.jit`` function."""


@dataclass(frozen=True)
class Target:
    """A piece of the user's file."""

    path: str
    """Absolute path of the file."""
    qualname: str
    """``rmsnorm``, ``Block``, ``Block.forward``."""
    kind: TargetKind
    start_line: int
    """1-based line of the ``def`` or ``class`` (decorators not counted)."""
    end_line: int
    """1-based last line."""

    @property
    def class_name(self) -> str:
        """For a module or a method the class's qualified name, else the empty string."""
        if self.kind is TargetKind.MODULE:
            return self.qualname
        return self.qualname.rpartition(".")[0] if self.kind is TargetKind.METHOD else ""


class WorkloadSource(Enum):
    """Where a workload was found; the order is the order of precedence."""

    DIRECTIVE = "directive"
    ANNOTATIONS = "annotations"
    GET_INPUTS = "get_inputs"
    RECORDED = "recorded"


@dataclass(frozen=True)
class TensorSpec:
    """An example tensor to make."""

    shape: tuple[Size, ...]
    dtype: str
    stride: tuple[Size, ...] | None = None
    """Elements; ``None`` for dense row-major."""
    low: float | None = None
    """Smallest value; with ``high`` the values are uniform between (integers: both included)."""
    high: float | None = None
    """Without a range floats are normal and integers 0 or 1."""
    requires_grad: bool = False
    high_size: Size | None = None
    """The largest value where it follows a named size: an index into a dimension."""


@dataclass(frozen=True)
class ArgumentSpec:
    """One argument of the target (or of its constructor): a tensor to make, or a constant."""

    name: str
    tensor: TensorSpec | None = None
    constant: object = None
    """int, float, bool, str, None or a list of these, where ``tensor`` is ``None``."""


@dataclass(frozen=True)
class KeptTensor:
    """A tensor that the target's module keeps from one call to the next: an attribute that each call sets anew."""

    name: str
    """As an argument of the call; a Python identifier."""
    access: str
    """Python for it inside the target's body: ``self.cell.hidden``."""
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class Workload:
    """A target plus example inputs. For ``get_inputs`` the file itself makes them, and ``arguments`` is empty."""

    target: Target
    source: WorkloadSource
    arguments: tuple[ArgumentSpec, ...] = ()
    init_arguments: tuple[ArgumentSpec, ...] = ()
    """For modules: the constructor's arguments."""
    sizes: Mapping[str, int] = field(default_factory=dict)
    """Values of the named sizes in the argument shapes."""
    device: str = "cuda"
    """``cuda`` or ``cpu``: where the user runs it. Without a GPU everything is verified on the CPU instead."""
    line: int = 0
    """1-based line of the directive or annotation, 0 if there is none."""
    assumed: tuple[str, ...] = ()
    """Sentences on what was assumed, to be shown."""
    kept: tuple[KeptTensor, ...] = ()
    """What the target was seen to keep between calls: further arguments, and results behind its own."""

    @property
    def as_constructed(self) -> bool:
        """Whether modules stay in the mode that they are constructed in, which is training unless they say otherwise.

        A file that makes its own inputs says how it is called, KernelBench's harness by this mode; others are evaluated.
        """
        return self.source is WorkloadSource.GET_INPUTS


@dataclass(frozen=True)
class CapturedArgument:
    """An argument as the target was called with in capture, so that other shapes of it can be made."""

    name: str
    """Parameter name of the target (``self`` left out)."""
    input: str | None = None
    """Name of the graph input where this is a tensor, else ``None``."""
    constant: object = None
    """Else its value; an empty dictionary for ``*args`` and ``**kwargs``, which take nothing."""
    keyword: bool = False
    """Whether it must be passed by keyword."""
    low: float | None = None
    """Smallest value seen, for integer tensors; 0 for tensors of floats without a negative element."""
    high: float | None = None
    """Largest value seen, for integer tensors."""
    is_kept: bool = False
    """Whether the target's module holds it, and the caller does not pass it."""


@dataclass(frozen=True)
class Environment:
    """The machine and the versions that a result holds for."""

    python: str
    torch: str
    triton: str
    """Empty where triton is not installed."""
    gpu: str = ""
    """Empty where there is no CUDA GPU."""
    capability: str = ""
    """``sm_90``; empty without a GPU."""
    driver: str = ""


@dataclass(frozen=True)
class Capture:
    """What the capture worker found: the graph, how to call the target, and eager facts."""

    workload: Workload
    graph: Graph
    arguments: tuple[CapturedArgument, ...]
    environment: Environment
    flops: float
    """Floating point operations of one call, by torch's own counter."""
    bytes: float
    """Bytes of all inputs read once plus all outputs written once."""
    module_name: str
    """The name under which the target's file was imported (``pkg.mod``)."""
    variable_sizes: tuple[str, ...] = ()
    """Named sizes that may be given other values: those of arguments alone, not of parameters."""
    uses_random: bool = False
    """Whether the graph draws random numbers (dropout), so outputs are compared under a shared seed."""
