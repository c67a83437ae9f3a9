"""The target's ATen graph for a workload, as our own plain value: what crosses back from the capture worker."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property
from typing import Union

from mtmc_lsp.core.dependencies import Dependency
from mtmc_lsp.core.sizes import Size, product


class InputKind(Enum):
    """Where a graph input comes from."""

    ARGUMENT = "argument"
    """An argument of the target."""
    PARAMETER = "parameter"
    """A parameter of the module; its sizes follow from the constructor, so other shapes never vary it."""
    BUFFER = "buffer"
    """A buffer of the module, likewise."""


@dataclass(frozen=True)
class TensorType:
    """What is known of a tensor before it exists."""

    shape: tuple[Size, ...]
    """One size per dimension."""
    dtype: str
    """Torch's name, without ``torch.``."""
    stride: tuple[Size, ...]
    """Elements, one per dimension."""

    @property
    def numel(self) -> Size:
        """Number of elements."""
        return product(self.shape)

    @property
    def is_contiguous(self) -> bool:
        """Whether the strides are those of a dense row-major tensor, for every value of the named sizes."""
        return all(
            own == dense or size == Size.of(1)
            for size, own, dense in zip(self.shape, self.stride, contiguous_stride(self.shape), strict=True)
        )

    @property
    def is_channels_last(self) -> bool:
        """Whether the channels of images or volumes (dimension 1) lie densest."""
        return len(self.shape) > 2 and self.stride[1] == Size.of(1) and self.shape[1] != Size.of(1)


def contiguous_stride(shape: tuple[Size, ...]) -> tuple[Size, ...]:
    """Strides, in elements, of a dense row-major tensor of ``shape``."""
    return tuple(product(shape[i + 1 :]) for i in range(len(shape)))


@dataclass(frozen=True)
class Ref:
    """The ``index``-th output of the node, or the input, called ``name``."""

    name: str
    index: int = 0

    def to_json(self) -> dict[str, object]:
        return {"ref": self.name, "index": self.index}

    @staticmethod
    def from_json(data: object) -> Ref:
        if not isinstance(data, dict) or "ref" not in data:
            raise TypeError(f"not a reference: {data!r}")
        return Ref(str(data["ref"]), int(data["index"]))


Argument = Union[Ref, Size, bool, int, float, str, None, tuple["Argument", ...]]
"""An argument of a node: a tensor, a size, a constant (dtypes and devices as strings), or a tuple of these."""


def argument_to_json(value: Argument) -> object:
    """``value`` as JSON data; a size is ``{"size": text}``, an infinite or NaN float ``{"float": text}``."""
    if isinstance(value, Ref):
        return value.to_json()
    if isinstance(value, Size):
        return {"size": str(value)}
    if isinstance(value, tuple):
        return [argument_to_json(item) for item in value]
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return {"float": str(value)}
    return value


def argument_from_json(data: object) -> Argument:
    """The argument whose ``argument_to_json`` gave ``data``."""
    if isinstance(data, dict):
        if "ref" in data:
            return Ref.from_json(data)
        if "float" in data:
            return float(data["float"])
        return Size.parse(str(data["size"]))
    if isinstance(data, list):
        return tuple(argument_from_json(item) for item in data)
    if data is None or isinstance(data, (bool, int, float, str)):
        return data
    raise TypeError(f"not an argument: {data!r}")


INPUT_DEVICE = "input.device"
"""The argument that stands for the device that the target's inputs are on, whichever that is."""


MATRIX_PRODUCTS: Mapping[str, int] = {"mm": 0, "bmm": 0, "matmul": 0, "linear": 0, "addmm": 1, "baddbmm": 1}
"""Operations that are one matrix product, and which tensor operand's last dimension is summed over."""
PRODUCTS = frozenset({*MATRIX_PRODUCTS, "einsum", "mv", "dot", "scaled_dot_product_attention"})
"""Operations that are or hold matrix products, beside convolutions."""
DRAWN = frozenset({"rand", "randn"})
"""Operations that draw from PyTorch's generator and stay its own: calls in the same order give the same numbers."""
RECURRENT_GATES: Mapping[str, int] = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}
"""Recurrent layers, and how many products of its input each hidden unit needs at a step."""


@dataclass(frozen=True)
class GraphInput:
    """A tensor that the graph reads from outside."""

    name: str
    """Unique in the graph and a Python identifier: ``x``, ``norm_weight``."""
    access: str
    """Python for it inside the target's body: ``x``, ``self.norm.weight``."""
    kind: InputKind
    type: TensorType
    requires_grad: bool = False


@dataclass(frozen=True)
class Node:
    """One ATen operation."""

    name: str
    op: str
    """ATen overload, ``aten.add.Tensor``."""
    args: tuple[Argument, ...]
    kwargs: Mapping[str, Argument]
    outputs: tuple[TensorType, ...]
    """One type per tensor that the operation returns; ``Ref(name, i)`` names the i-th."""
    line: int = 0
    """1-based line of the target's file that made this node; 0 when unknown."""
    variable: str = ""
    """The user's own name for the value, where an assignment on that line gives one to this node."""

    def to_json(self) -> dict[str, object]:
        from mtmc_lsp.core.json_codec import to_json

        return {
            "name": self.name,
            "op": self.op,
            "args": [argument_to_json(item) for item in self.args],
            "kwargs": {key: argument_to_json(item) for key, item in self.kwargs.items()},
            "outputs": to_json(self.outputs),
            "line": self.line,
            "variable": self.variable,
        }

    @staticmethod
    def from_json(data: dict[str, object]) -> Node:
        from mtmc_lsp.core.json_codec import from_json

        args, kwargs, outputs = data["args"], data["kwargs"], data["outputs"]
        assert isinstance(args, list) and isinstance(kwargs, dict) and isinstance(outputs, list)
        return Node(
            name=str(data["name"]),
            op=str(data["op"]),
            args=tuple(argument_from_json(item) for item in args),
            kwargs={key: argument_from_json(item) for key, item in kwargs.items()},
            outputs=tuple(from_json(TensorType, item) for item in outputs),
            line=int(str(data["line"])),
            variable=str(data["variable"]),
        )

    @property
    def type(self) -> TensorType:
        """The type of the first (mostly the only) output."""
        return self.outputs[0]

    @property
    def word(self) -> str:
        """What people call the operation: ``softmax`` for ``aten._softmax.default``."""
        name = self.op.split(".")[1].strip("_")
        return "batch_norm" if name.startswith("native_batch_norm") else name

    @property
    def draws(self) -> bool:
        """Whether it draws random numbers from PyTorch's generator."""
        return self.op.split(".")[1] in DRAWN

    def inputs(self) -> Iterator[Ref]:
        """Every tensor that this node reads, in order, with repeats."""
        return iter(self._read)

    def reading(self, swap: Mapping[Ref, Ref]) -> Node:
        """The operation of other tensors in the place of some."""
        if not any(ref in swap for ref in self.inputs()):
            return self
        args = tuple(_swapped(item, swap) for item in self.args)
        return replace(self, args=args, kwargs={key: _swapped(item, swap) for key, item in self.kwargs.items()})

    @cached_property
    def _read(self) -> tuple[Ref, ...]:
        # Planners ask for this millions of times in a network of some hundred nodes.
        return tuple(ref for argument in (*self.args, *self.kwargs.values()) for ref in _refs(argument))


def _swapped(value: Argument, swap: Mapping[Ref, Ref]) -> Argument:
    if isinstance(value, Ref):
        return swap.get(value, value)
    return tuple(_swapped(item, swap) for item in value) if isinstance(value, tuple) else value


def _refs(argument: Argument) -> Iterator[Ref]:
    if isinstance(argument, Ref):
        yield argument
    elif isinstance(argument, tuple):
        for item in argument:
            yield from _refs(item)


@dataclass(frozen=True)
class UsedModule:
    """A module that the target calls or takes a tensor from: the graph holds only while it is what it was."""

    access: str
    """Python for it inside the target's body: ``self``, ``self.layers[0]``."""
    kind: str
    """Python for its class in the target's file, ``torch.nn.Linear``; in quotes where the file has no name for it."""
    length: int | None = None
    """How many modules a container holds."""


@dataclass(frozen=True)
class Mutation:
    """The target writes ``value`` into the input called ``input`` before it returns."""

    input: str
    value: Ref


@dataclass(frozen=True)
class Graph:
    """A functional ATen graph: nodes in execution order, with symbolic sizes and the conditions they were derived under."""

    inputs: tuple[GraphInput, ...]
    nodes: tuple[Node, ...]
    outputs: tuple[Ref, ...]
    """The tensors that the target returns, in order; none where it only changes what it is given."""
    returns: str
    """How the outputs are put together, and what else is returned, as :mod:`mtmc_lsp.capture.result_structure` has it."""
    sizes: Mapping[str, int]
    """The value of every named size in the workload."""
    mutations: tuple[Mutation, ...] = ()
    kept: tuple[str, ...] = ()
    """Attributes that the target sets, ``self.hidden``, each to one of the last outputs: these are none of its results."""
    unread: tuple[GraphInput, ...] = ()
    """Tensors that the target is given, or looks at, and no node reads: a size of theirs that is a number may be built into the
    graph, as may their dtype, or that they are there at all."""
    conditions: tuple[str, ...] = ()
    """Python conditions over named sizes (``s0 >= 2``, ``s0 % 8 == 0``) under which the graph holds."""
    constants: Mapping[str, object] = field(default_factory=dict)
    """Python values that are built into the graph, by their access: ``{"eps": 1e-6, "self.training": False}``.
    The graph holds only while each still has this value; each is an int, float, bool, str, None, a list of these, or for
    ``*args`` and ``**kwargs`` an empty dictionary: they take nothing."""
    dependencies: tuple[Dependency, ...] = ()
    """What else it was built from: globals, helper functions, class attributes, environment variables."""
    modules: tuple[UsedModule, ...] = ()
    """Holders come before what they hold."""
    same: tuple[tuple[str, str], ...] = ()
    """Further accesses of modules and tensors that the graph uses, each with the one that it is used by: they are one object."""
    fp32_matmul: str = "ieee"
    """How the user's own fp32 matrix products run: ``ieee`` or ``tf32``."""
    fp32_convolution: str = "ieee"
    """How the user's own fp32 convolutions run on a GPU, likewise; PyTorch's default there is ``tf32``."""
    convolutions_seen: Mapping[str, str] = field(default_factory=dict)
    """How single float32 convolutions were seen to run on the workload's GPU: node to mode. Where TF32 is allowed, the library
    chooses for each."""

    def convolution_mode(self, node: str) -> str:
        """How a float32 convolution of the user's runs: ``ieee`` or ``tf32``.

        Args:
            node: its name, or that of what a rewrite made of it.
        """
        return self.convolutions_seen.get(node.partition("_packed")[0], self.fp32_convolution)

    @property
    def runs_tf32(self) -> bool:
        """Whether some of its float32 products may run in TF32, as far as that was not seen otherwise."""
        return any(self._is_allowed_tf32(node) and self._runs_tf32(node) for node in self.nodes)

    @property
    def allows_tf32(self) -> bool:
        """Whether some of its float32 products, or their gradients, may run in TF32: the library chooses for each."""
        return any(self._is_allowed_tf32(node) for node in self.nodes)

    def _runs_tf32(self, node: Node) -> bool:
        return "conv" not in node.op or self.convolution_mode(node.name) == "tf32"

    def _is_allowed_tf32(self, node: Node) -> bool:
        # One setting is that of a GPU's convolutions and recurrent layers, which one library computes.
        by_cudnn = node.op.split(".")[1] in RECURRENT_GATES or "conv" in node.op
        mode = self.fp32_convolution if by_cudnn else self.fp32_matmul
        is_product = by_cudnn or node.op.split(".")[1] in PRODUCTS
        return is_product and mode == "tf32" and any(kind.dtype == "float32" for kind in node.outputs)

    def of_nodes(self, nodes: Iterable[Node], swap: Mapping[Ref, Ref]) -> Graph:
        """The graph of other nodes, which leaves the target with other values in the place of some."""
        outputs = tuple(swap.get(ref, ref) for ref in self.outputs)
        mutations = tuple(replace(item, value=swap.get(item.value, item.value)) for item in self.mutations)
        return replace(self, nodes=tuple(nodes), outputs=outputs, mutations=mutations)

    def type_of(self, ref: Ref) -> TensorType:
        """The type of what ``ref`` names."""
        found = self._input_types.get(ref.name)
        return found if found is not None else self.node(ref.name).outputs[ref.index]

    def node(self, name: str) -> Node:
        """The node called ``name``.

        Raises:
            KeyError: there is none.
        """
        return self.named[name]

    def readers(self, name: str) -> tuple[Node, ...]:
        """The nodes that read a node or an input, in execution order."""
        return self._readers.get(name, ())

    @cached_property
    def named(self) -> Mapping[str, Node]:
        """Every node by its name."""
        return {node.name: node for node in self.nodes}

    @cached_property
    def positions(self) -> Mapping[str, int]:
        """When each node runs, from 0."""
        return {node.name: i for i, node in enumerate(self.nodes)}

    @property
    def results(self) -> tuple[Ref | None, ...]:
        """What the target returns, without what it keeps."""
        return self.outputs[: len(self.outputs) - len(self.kept)]

    @cached_property
    def left(self) -> frozenset[Ref]:
        """Values that leave the target: it returns them, or writes them into an input."""
        return frozenset({*self.outputs, *(mutation.value for mutation in self.mutations)})

    @cached_property
    def replaced(self) -> Mapping[Ref, str]:
        """The input that each value is written into; the first where it is written into several."""
        return {mutation.value: mutation.input for mutation in reversed(self.mutations)}

    @cached_property
    def _input_types(self) -> Mapping[str, TensorType]:
        return {item.name: item.type for item in self.inputs}

    @cached_property
    def _readers(self) -> Mapping[str, tuple[Node, ...]]:
        found: dict[str, list[Node]] = {}
        for node in self.nodes:
            for name in dict.fromkeys(ref.name for ref in node.inputs()):
                found.setdefault(name, []).append(node)
        return {name: tuple(nodes) for name, nodes in found.items()}
