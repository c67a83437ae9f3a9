"""Targets (the code to optimise) and workloads (its example inputs).

Arguments may be containers: tuples, lists, dictionaries, named tuples and dataclasses. The items of a container are its *leaves*
(tensors and plain values) and further containers. A *path* is the Python expression of an item in terms of the target's
parameters: ``position_embeddings[0]``, ``batch['mask']``, ``config.weight``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

from mtmc_lsp.core.dtypes import PrecisionSettings, short_dtype
from mtmc_lsp.core.graph import Graph
from mtmc_lsp.core.sizes import PlainNumber, Size


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
class CodeRegion:
    """A run of statements in a target's body that is optimised in place, because the whole target cannot be captured.

    Statements are numbered from 0 through the whole body, nested ones after the statement that contains them. The generated
    dispatch has no number, so the numbers are the same in the user's file and in every version of it.
    """

    number: int
    """1-based number of the region among those of its target, in source order."""
    first: int
    """Number of its first statement."""
    last: int
    """Number of the last statement in the suite of the first one."""
    start_line: int
    """1-based, in the file without generated code."""
    end_line: int
    inputs: tuple[str, ...]
    """The local variables that it reads from the statements before it."""
    outputs: tuple[str, ...] = ()
    """The variables that it assigns and later statements read."""
    repeated: tuple[int, ...] = ()
    """Numbers of earlier statements that read sizes of arguments. They run again at its start, so sizes are not inputs."""
    returns: bool = False
    """Whether it ends the target: each way through it ends with a return. Then it has no outputs."""
    writes_follow: bool = False
    """Whether other statements of the target may write into tensors, also into memory that outputs share."""

    @property
    def lines(self) -> str:
        """Its lines as words: ``lines 12 to 15``."""
        one = self.start_line == self.end_line
        return f"line {self.start_line}" if one else f"lines {self.start_line} to {self.end_line}"


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
    region: CodeRegion | None = None
    """The part of the body that is captured and replaced; ``None`` for all of it."""

    @property
    def title(self) -> str:
        """The name, with the lines of the region if there is one: ``Block.forward, lines 12 to 15``."""
        return self.qualname if self.region is None else f"{self.qualname}, {self.region.lines}"

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
    SCRIPT = "script"
    """The target is a function without parameters that calls a kernel: a test or benchmark of the file."""
    LAUNCH = "launch"
    """The target is a kernel, which is launched as it was recorded."""


class ContainerKind(Enum):
    """Kind of a container."""

    TUPLE = "tuple"
    LIST = "list"
    DICT = "dict"
    FIELDS = "fields"
    """A named tuple or a dataclass: its class takes the fields as keyword arguments."""
    POSITIONAL = "positional"
    """The further arguments of ``*args``."""
    KEYWORDS = "keywords"
    """The further arguments of ``**kwargs``."""


@dataclass(frozen=True)
class Container:
    """The kind of one container, and the keys of its items."""

    kind: ContainerKind
    keys: tuple[int | str, ...]
    """Indices, keys or names of fields."""
    class_name: str = ""
    """Python expression for the class of ``FIELDS``, or of a ``DICT`` that is not a plain dictionary, in the target's file."""

    def path(self, whole: str, key: int | str) -> str:
        """The path of an item, from the path of the container."""
        return f"{whole}.{key}" if self.kind is ContainerKind.FIELDS else f"{whole}[{key!r}]"

    def expression(self, items: Sequence[str]) -> str:
        """Python expression for a new container with these items."""
        if self.kind in (ContainerKind.TUPLE, ContainerKind.POSITIONAL):
            return f"({', '.join(items)}{',' if len(items) == 1 else ''})"
        if self.kind is ContainerKind.LIST:
            return f"[{', '.join(items)}]"
        pairs = list(zip(self.keys, items, strict=True))
        if self.kind is ContainerKind.FIELDS:
            return f"{self.class_name}({', '.join(f'{key}={item}' for key, item in pairs)})"
        text = "{" + ", ".join(f"{key!r}: {item}" for key, item in pairs) + "}"
        return f"{self.class_name}({text})" if self.class_name else text


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
    """One argument of the target or of its constructor: a tensor to generate, a constant, or a container of these."""

    name: str
    """Name of the parameter; for an item of a container its path: ``position_embeddings[0]``."""
    tensor: TensorSpec | None = None
    constant: object = None
    """An int, float, bool, str, None or a list of these, if ``tensor`` and ``container`` are ``None``."""
    container: Container | None = None
    items: tuple[ArgumentSpec, ...] = ()
    """The items of the container."""


def leaves_of(arguments: Iterable[ArgumentSpec]) -> Iterator[ArgumentSpec]:
    """The arguments, with each container replaced by the leaves in it."""
    for argument in arguments:
        if argument.container is None:
            yield argument
        else:
            yield from leaves_of(argument.items)


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
class RecordedGrid:
    """How a kernel was launched, besides its arguments."""

    grid: tuple[int, ...]
    options: Mapping[str, int] = field(default_factory=dict)
    """``num_warps`` and the like, where the launch or an autotuner set them."""
    is_tuned: bool = False
    """Whether an autotuner of the kernel chose the options, and some of the arguments."""
    shared: Mapping[str, str] = field(default_factory=dict)
    """Arguments that are the same tensor as an earlier one."""


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
    trains: bool = False
    """Whether calls record gradients: of arguments whose description says so, and of the module's parameters."""
    autocast: str = ""
    """The dtype of the caller's autocast; empty for calls without autocast."""
    launch: RecordedGrid | None = None
    """For a kernel that is launched as recorded; None for functions and modules."""

    @property
    def tensors(self) -> Mapping[str, TensorSpec]:
        """All tensors among the arguments, by path."""
        return {leaf.name: leaf.tensor for leaf in leaves_of(self.arguments) if leaf.tensor is not None}

    @property
    def as_constructed(self) -> bool:
        """Whether modules stay in their initial mode (training by default) instead of being set to eval mode.

        A file with ``get_inputs`` defines its own calling convention, and KernelBench's harness uses the initial mode.
        """
        return self.source is WorkloadSource.GET_INPUTS and self.module.training is None


TORCH_NAME = re.compile(r"torch\.[a-z]\w*")
"""The text of a dtype, a layout or a memory format, such as ``torch.float32``."""


def is_torch_name(constant: object) -> bool:
    """Whether the constant of an argument is a dtype, a layout or a memory format, stored as its text.

    Calls with a string of that form are not captured.
    """
    return isinstance(constant, str) and TORCH_NAME.fullmatch(constant) is not None


@dataclass(frozen=True)
class CapturedArgument:
    """An argument of the captured call, recorded so that it can be generated with other shapes."""

    name: str
    """Parameter name of the target (without ``self``); for an item of a container its path."""
    input: str | None = None
    """Name of the graph input if this is a tensor, else ``None``."""
    constant: object = None
    """Value if it is neither a tensor nor a container; see :func:`is_torch_name`."""
    keyword: bool = False
    """Whether it must be passed by keyword."""
    low: float | None = None
    """Smallest observed value of an integer tensor; 0 for a float tensor without negative elements."""
    high: float | None = None
    """Largest observed value of an integer tensor."""
    is_state: bool = False
    """Whether this is a state tensor of the module, which the caller does not pass."""
    container: Container | None = None
    items: tuple[CapturedArgument, ...] = ()
    """The items of the container."""

    @property
    def is_structured(self) -> bool:
        """Whether a container's leaves are arguments by themselves. Lists and tuples of plain values are one argument."""
        kind = self.container.kind if self.container is not None else None
        if kind in (None, ContainerKind.TUPLE, ContainerKind.LIST):
            return any(item.input is not None or item.is_structured for item in self.items)
        return True

    @property
    def leaves(self) -> Iterator[CapturedArgument]:
        """All leaves of a container; the argument itself if it is none."""
        if self.container is None:
            yield self
        for item in self.items:
            yield from item.leaves


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
    settings: PrecisionSettings = field(default_factory=PrecisionSettings)
    """The settings of the user's process that decide in which precision torch computes."""

    @property
    def leaves(self) -> tuple[CapturedArgument, ...]:
        """The arguments, with each container replaced by the leaves in it."""
        return tuple(leaf for argument in self.arguments for leaf in argument.leaves)

    def with_numbers(self, values: Mapping[str, PlainNumber]) -> Capture:
        """The capture of a call with other values of run-time numbers, by path."""

        def changed(argument: CapturedArgument) -> CapturedArgument:
            constant = values.get(argument.name, argument.constant)
            return replace(argument, constant=constant, items=tuple(map(changed, argument.items)))

        numbers = tuple(replace(n, value=values.get(n.access, n.value)) for n in self.graph.numbers)
        graph = replace(self.graph, numbers=numbers)
        return replace(self, graph=graph, arguments=tuple(map(changed, self.arguments)))
