"""Targets (the code to optimise) and workloads (its example inputs)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from mtmc_lsp.core.dtypes import short_dtype
from mtmc_lsp.core.graph import Graph
from mtmc_lsp.core.sizes import Size


class TargetKind(Enum):
    """Kind of a target."""

    FUNCTION = "function"
    METHOD = "method"
    """``Class.forward`` of an ``nn.Module`` (or another method of it)."""
    MODULE = "module"
    """An ``nn.Module`` class; its ``forward`` is optimised."""
    KERNEL = "kernel"
    """A ``@triton.jit`` function."""


@dataclass(frozen=True)
class Target:
    """A function, class or kernel in the user's file."""

    path: str
    """Absolute path of the file."""
    qualname: str
    """``rmsnorm``, ``Block``, ``Block.forward``."""
    kind: TargetKind
    start_line: int
    """1-based line of the ``def`` or ``class``, without decorators."""
    end_line: int
    """1-based last line."""

    @property
    def class_name(self) -> str:
        """Qualified class name of a module or method; empty for other targets."""
        if self.kind is TargetKind.MODULE:
            return self.qualname
        return self.qualname.rpartition(".")[0] if self.kind is TargetKind.METHOD else ""


class WorkloadSource(Enum):
    """Origin of a workload, in order of precedence."""

    DIRECTIVE = "directive"
    ANNOTATIONS = "annotations"
    GET_INPUTS = "get_inputs"
    RECORDED = "recorded"


@dataclass(frozen=True)
class TensorSpec:
    """Description of an example tensor."""

    shape: tuple[Size, ...]
    dtype: str
    stride: tuple[Size, ...] | None = None
    """In elements; ``None`` for dense row-major."""
    low: float | None = None
    """Smallest value. With ``low`` and ``high``, values are uniform in this range (for integers both ends included)."""
    high: float | None = None
    """Largest value. Without a range, floats are normal and integers are 0 or 1."""
    requires_grad: bool = False
    high_size: Size | None = None
    """Largest value as a function of named sizes: for an index into a dimension."""


@dataclass(frozen=True)
class ArgumentSpec:
    """One argument of the target or of its constructor: a tensor to generate, or a constant."""

    name: str
    tensor: TensorSpec | None = None
    constant: object = None
    """An int, float, bool, str, None or a list of these, if ``tensor`` is ``None``."""


@dataclass(frozen=True)
class ModuleForm:
    """The dtype and mode in which the user runs the target's module."""

    dtype: str = ""
    """Of its floating-point parameters and buffers; empty as the constructor creates them."""
    training: bool | None = None
    """Whether it is in training mode; ``None`` if the user does not say so."""

    def completed_by(self, other: ModuleForm) -> ModuleForm:
        """This form, with what it leaves open taken from another one."""
        return ModuleForm(self.dtype or other.dtype, other.training if self.training is None else self.training)

    @property
    def words(self) -> str:
        """The form as in a directive: ``bf16,eval``; empty if it is open."""
        mode = {None: "", True: "train", False: "eval"}[self.training]
        return ",".join(word for word in (short_dtype(self.dtype) if self.dtype else "", mode) if word)


@dataclass(frozen=True)
class StateTensor:
    """A state tensor of the target's module: an attribute that each call replaces."""

    name: str
    """Its name as an argument of the call; a Python identifier."""
    access: str
    """Python expression for it inside the target's body: ``self.cell.hidden``."""
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class Workload:
    """A target and its example inputs. With ``get_inputs`` the file itself creates them, and ``arguments`` is empty."""

    target: Target
    source: WorkloadSource
    arguments: tuple[ArgumentSpec, ...] = ()
    init_arguments: tuple[ArgumentSpec, ...] = ()
    """Arguments of the constructor, for modules."""
    sizes: Mapping[str, int] = field(default_factory=dict)
    """Values of the named sizes in the argument shapes."""
    device: str = "cuda"
    """``cuda`` or ``cpu``: where the user runs it. Without a GPU, everything is verified on the CPU."""
    line: int = 0
    """1-based line of the directive or annotation, 0 if there is none."""
    assumed: tuple[str, ...] = ()
    """Assumptions that were made, as sentences for the user."""
    module: ModuleForm = ModuleForm()
    """How the module is prepared before the call; open for functions."""
    state: tuple[StateTensor, ...] = ()
    """State tensors that the target was observed to keep between calls: passed as extra arguments, returned as extra results."""

    @property
    def as_constructed(self) -> bool:
        """Whether modules stay in their initial mode (training by default) instead of being set to eval mode.

        A file with ``get_inputs`` defines its own calling convention, and KernelBench's harness uses the initial mode.
        """
        return self.source is WorkloadSource.GET_INPUTS and self.module.training is None


@dataclass(frozen=True)
class CapturedArgument:
    """An argument of the captured call, recorded so that it can be generated with other shapes."""

    name: str
    """Parameter name of the target (without ``self``)."""
    input: str | None = None
    """Name of the graph input if this is a tensor, else ``None``."""
    constant: object = None
    """Value if it is not a tensor; an empty dictionary for empty ``*args`` and ``**kwargs``."""
    keyword: bool = False
    """Whether it must be passed by keyword."""
    low: float | None = None
    """Smallest observed value of an integer tensor; 0 for a float tensor without negative elements."""
    high: float | None = None
    """Largest observed value of an integer tensor."""
    is_state: bool = False
    """Whether this is a state tensor of the module, which the caller does not pass."""


@dataclass(frozen=True)
class Environment:
    """The machine and package versions for which a result is valid."""

    python: str
    torch: str
    triton: str
    """Empty if triton is not installed."""
    gpu: str = ""
    """Empty without a CUDA GPU."""
    capability: str = ""
    """``sm_90``; empty without a GPU."""
    driver: str = ""


@dataclass(frozen=True)
class Capture:
    """Result of the capture worker: the graph, how to call the target, and properties of the eager run."""

    workload: Workload
    graph: Graph
    arguments: tuple[CapturedArgument, ...]
    environment: Environment
    flops: float
    """FLOPs of one call, by torch's counter."""
    bytes: float
    """Bytes of all inputs read once plus all outputs written once."""
    module_name: str
    """Module name under which the target's file was imported (``pkg.mod``)."""
    variable_sizes: tuple[str, ...] = ()
    """Named sizes that verification may vary: sizes of arguments, not of parameters."""
    uses_random: bool = False
    """Whether the graph draws random numbers (dropout), so outputs are compared under a shared seed."""
