"""The target's ATen graph for a workload, as a plain value that the capture worker sends back."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property
from typing import TYPE_CHECKING, Union

from mtmc_lsp.core.dependencies import Dependency
from mtmc_lsp.core.sizes import Number, NumberArgument, Size, product

if TYPE_CHECKING:
    from mtmc_lsp.core.loop import Loop


class InputKind(Enum):
    """Where a graph input comes from."""

    ARGUMENT = "argument"
    """An argument of the target."""
    PARAMETER = "parameter"
    """A parameter of the module. Its sizes follow from the constructor, so verification never varies them."""
    BUFFER = "buffer"
    """A buffer of the module. Its sizes are not varied either."""
    ATTRIBUTE = "attribute"
    """A tensor in a plain attribute of the module. Like a buffer, but it may be on another device than the arguments."""
    TANGENT = "tangent"
    """The gradient of a result, which the backward pass gets."""


@dataclass(frozen=True)
class TensorType:
    """Shape, dtype and strides of a tensor."""

    shape: tuple[Size, ...]
    """One size per dimension."""
    dtype: str
    """Torch's dtype name without ``torch.``."""
    stride: tuple[Size, ...]
    """In elements, one per dimension."""

    @cached_property
    def numel(self) -> Size:
        """Number of elements."""
        return product(self.shape)

    @property
    def is_contiguous(self) -> bool:
        """Whether the tensor is dense and row-major for all values of the named sizes."""
        return all(
            stride == dense or size == Size.of(1)
            for size, stride, dense in zip(self.shape, self.stride, contiguous_stride(self.shape), strict=True)
        )

    @cached_property
    def dense_dims(self) -> tuple[int, ...]:
        """The dimensions whose neighbouring elements are adjacent in memory (stride 1)."""
        return tuple(dim for dim, stride in enumerate(self.stride) if stride == Size.of(1))

    @property
    def is_channels_last(self) -> bool:
        """Whether the channels (dimension 1) of an image or volume have stride 1."""
        return len(self.shape) > 2 and self.stride[1] == Size.of(1) and self.shape[1] != Size.of(1)


def contiguous_stride(shape: tuple[Size, ...]) -> tuple[Size, ...]:
    """Strides, in elements, of a dense row-major tensor of ``shape``."""
    return tuple(product(shape[i + 1 :]) for i in range(len(shape)))


@dataclass(frozen=True)
class Ref:
    """Output number ``index`` of the node called ``name``, or the graph input of that name."""

    name: str
    index: int = 0

    def to_json(self) -> dict[str, object]:
        return {"ref": self.name, "index": self.index}

    @staticmethod
    def from_json(data: object) -> Ref:
        if not isinstance(data, dict) or "ref" not in data:
            raise TypeError(f"not a reference: {data!r}")
        return Ref(str(data["ref"]), int(data["index"]))


Argument = Union[Ref, Size, Number, bool, int, float, str, None, tuple["Argument", ...]]
"""An argument of a node: a tensor, a size, a number that is known at run time, a constant (dtypes and devices as strings), or a
tuple of arguments."""


def argument_to_json(value: Argument) -> object:
    """Encode ``value`` as JSON; a size is ``{"size": text}``, an infinite or NaN float ``{"float": text}``."""
    if isinstance(value, (Ref, Number)):
        return value.to_json()
    if isinstance(value, Size):
        return {"size": str(value)}
    if isinstance(value, tuple):
        return [argument_to_json(item) for item in value]
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return {"float": str(value)}
    return value


def argument_from_json(data: object) -> Argument:
    """Inverse of :func:`argument_to_json`."""
    if isinstance(data, dict):
        if "ref" in data:
            return Ref.from_json(data)
        if "float" in data:
            return float(data["float"])
        if "number" in data:
            return Number(str(data["number"]), str(data["kind"]), str(data["variable"]))
        return Size.parse(str(data["size"]))
    if isinstance(data, list):
        return tuple(argument_from_json(item) for item in data)
    if data is None or isinstance(data, (bool, int, float, str)):
        return data
    raise TypeError(f"not an argument: {data!r}")


INPUT_DEVICE = "input.device"
"""Placeholder argument for the device of the target's inputs."""


MATRIX_PRODUCTS: Mapping[str, int] = {"mm": 0, "bmm": 0, "matmul": 0, "linear": 0, "addmm": 1, "baddbmm": 1}
"""Operations that are a single matmul, and the index of the tensor operand whose last dimension is reduced."""
BATCH_NORM = "aten._native_batch_norm_legit_functional.default"
"""Batch norm in training mode; it returns new running statistics."""
PRODUCTS = frozenset({*MATRIX_PRODUCTS, "einsum", "mv", "dot", "scaled_dot_product_attention"})
"""Operations that are or contain matmuls, without convolutions."""
RANDOM_OPS = frozenset({"rand", "randn", "randint", "bernoulli", "exponential"})
"""Operations that draw from PyTorch's generator. They stay torch calls: the same call order gives the same numbers."""
MOST_FILLED = 16
"""Most indices of an ``index_fill`` in a kernel, which compares every position with each of them."""
RECURRENT_GATES: Mapping[str, int] = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}
"""Recurrent layers, and the number of input products per hidden unit and step."""


@dataclass(frozen=True)
class GraphInput:
    """A tensor that the graph reads from outside."""

    name: str
    """Unique in the graph and a Python identifier: ``x``, ``norm_weight``."""
    access: str
    """Python expression for it inside the target's body: ``x``, ``self.norm.weight``."""
    kind: InputKind
    type: TensorType
    requires_grad: bool = False


@dataclass(frozen=True)
class Node:
    """One ATen operation."""

    name: str
    op: str
    """ATen overload: ``aten.add.Tensor``."""
    args: tuple[Argument, ...]
    kwargs: Mapping[str, Argument]
    outputs: tuple[TensorType, ...]
    """One type per output tensor; ``Ref(name, i)`` refers to output i."""
    line: int = 0
    """1-based line in the target's file that this node comes from; 0 when unknown."""
    variable: str = ""
    """The user's variable name for the value, if an assignment on that line names it."""
    row_loop: RowLoop | None = None
    """Set if the node stands for a part of the graph that runs for one chunk of rows after another. Rewrites make such nodes;
    captured graphs, and so JSON, have none."""
    loop: Loop | None = None
    """The body of a node that is a loop over time steps."""
    rounds: bool = False
    """Whether kernels round 16-bit results, as a store does. Rewrites set it; captured graphs, and so JSON, do not."""

    def to_json(self) -> dict[str, object]:
        from mtmc_lsp.core.json_codec import to_json

        body = {"loop": to_json(self.loop)} if self.loop is not None else {}
        return body | {
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
        from mtmc_lsp.core.loop import Loop

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
            loop=from_json(Loop, data["loop"]) if "loop" in data else None,
        )

    @property
    def type(self) -> TensorType:
        """Type of the first output (usually the only one)."""
        return self.outputs[0]

    @property
    def word(self) -> str:
        """Readable operation name: ``softmax`` for ``aten._softmax.default``."""
        name = self.op.split(".")[1].strip("_")
        return "batch_norm" if name.startswith("native_batch_norm") else name

    def name_of(self, index: int) -> str:
        """A name for an output: the user's variable, or the name of the node."""
        if self.row_loop is not None:
            return self.row_loop.body.node(self.row_loop.body.outputs[index].name).name_of(0)
        name = self.variable or self.name
        return name if not index else f"{name}_{index}"

    @property
    def draws(self) -> bool:
        """Whether the operation draws random numbers from PyTorch's generator."""
        return self.op.split(".")[1] in RANDOM_OPS

    def inputs(self) -> Iterator[Ref]:
        """Every tensor that this node reads, in argument order, with repeats."""
        return iter(self._read)

    def reading(self, replacements: Mapping[Ref, Ref]) -> Node:
        """A copy of the node that reads other tensors where ``replacements`` maps them."""
        if not any(ref in replacements for ref in self.inputs()):
            return self
        args = tuple(_replace_refs(item, replacements) for item in self.args)
        return replace(
            self, args=args, kwargs={key: _replace_refs(item, replacements) for key, item in self.kwargs.items()}
        )

    @cached_property
    def _read(self) -> tuple[Ref, ...]:
        # Cached: planners read this millions of times for a network of a few hundred nodes.
        return tuple(ref for argument in (*self.args, *self.kwargs.values()) for ref in _iter_refs(argument))


def _replace_refs(value: Argument, replacements: Mapping[Ref, Ref]) -> Argument:
    if isinstance(value, Ref):
        return replacements.get(value, value)
    return tuple(_replace_refs(item, replacements) for item in value) if isinstance(value, tuple) else value


def _iter_refs(argument: Argument) -> Iterator[Ref]:
    if isinstance(argument, Ref):
        yield argument
    elif isinstance(argument, tuple):
        for item in argument:
            yield from _iter_refs(item)


@dataclass(frozen=True)
class RowLoop:
    """Operations that run for one chunk of rows after another, so that their large values never exist for all rows."""

    body: Graph
    """The operations for a chunk of rows. Its inputs are the node's arguments, in this order."""
    symbol: str
    """The named size of the body that is the number of rows of a chunk."""
    rows: int
    """Most rows of a chunk."""
    total: Size
    """Rows of all chunks."""
    inputs: tuple[Rows | None, ...]
    """For each input of the body, which dimensions of the argument are rows; None if every chunk reads it whole."""
    outputs: tuple[Rows | None, ...]
    """For each output of the body, which dimensions of the result are rows; None for a sum over all chunks."""
    sizes: tuple[str, ...] = ()
    """Named sizes that the body needs and that its inputs do not have, such as the number of all rows in a mean."""

    @property
    def chunks(self) -> int:
        """Number of chunks at the sizes of the workload."""
        return -(-self.total.value(self.body.sizes) // self.rows)


@dataclass(frozen=True)
class Rows:
    """Neighbouring dimensions of a tensor that are the rows of a loop: batch and length, for example."""

    first: int
    count: int = 1

    @property
    def dims(self) -> range:
        """The dimensions."""
        return range(self.first, self.first + self.count)


@dataclass(frozen=True)
class ModuleHook:
    """A forward pre-hook or forward hook of a module, whose effect is part of the graph."""

    kind: str
    """A function's name in the user's file, or the qualified name of a class: ``torch.nn.utils.weight_norm.WeightNorm``."""
    settings: Mapping[str, object] | None = None
    """The attributes of an instance of this class, which are plain values; ``None`` for a function."""
    is_before: bool = True
    """Whether it is a pre-hook."""


@dataclass(frozen=True)
class UsedModule:
    """A module that the target calls or reads a tensor from. The graph is valid only while this module is unchanged."""

    access: str
    """Python expression for it inside the target's body: ``self``, ``self.layers[0]``."""
    kind: str
    """Python expression for its class in the target's file: ``torch.nn.Linear``. Quoted if the file has no name for it."""
    length: int | None = None
    """Number of modules or parameters in a container, except ``ParameterDict``."""
    hooks: tuple[ModuleHook, ...] = ()
    """Its hooks at the capture. Empty if the graph does not contain their effect."""
    keys: tuple[str, ...] | None = None
    """The names of the modules in a container, in order, unless they are 0, 1 and so on; the keys of a ``ParameterDict``."""


@dataclass(frozen=True)
class Mutation:
    """The target writes ``value`` into the input called ``input`` before it returns."""

    input: str
    value: Ref


@dataclass(frozen=True)
class TensorContainer:
    """A list, tuple or dictionary in an attribute of the module that holds input tensors."""

    access: str
    """Python expression for it: ``self.anchors``."""
    length: int
    keys: tuple[str, ...] | None = None
    """The keys of a dictionary as Python literals; ``None`` for a list or tuple."""


@dataclass(frozen=True)
class Backward:
    """The backward pass in a graph: what it gets and what it computes. The nodes that no result needs belong to it."""

    tangents: tuple[GraphInput, ...]
    """The gradients of results that the backward pass gets. They are no inputs of the target."""
    results: tuple[int, ...]
    """For each tangent the number of its result."""
    gradients: tuple[str, ...]
    """The inputs whose gradients are the last outputs of the graph, in that order."""
    in_forward: bool = False
    """Whether the forward pass computes the gradients, for an upstream gradient of 1. The backward pass multiplies them."""
    early: tuple[str, ...] = ()
    """Nodes that the forward pass computes although only gradients need them, such as the row maxima of an attention."""


@dataclass(frozen=True)
class Graph:
    """A functional ATen graph: nodes in execution order, with symbolic sizes and the conditions under which it is valid."""

    inputs: tuple[GraphInput, ...]
    nodes: tuple[Node, ...]
    outputs: tuple[Ref, ...]
    """The tensors that the target returns, in order; empty if it only modifies its inputs."""
    returns: str
    """How the return value is built from the outputs and other values: see :mod:`mtmc_lsp.capture.result_structure`."""
    sizes: Mapping[str, int]
    """Value of every named size in the workload."""
    mutations: tuple[Mutation, ...] = ()
    state_attributes: tuple[str, ...] = ()
    """Attributes that the target sets (``self.hidden``), one per trailing entry of ``outputs``. They are not return values."""
    unread_inputs: tuple[GraphInput, ...] = ()
    """Input tensors that no node reads. The graph may still depend on their constant sizes, their dtype, or their presence."""
    conditions: tuple[str, ...] = ()
    """Python conditions over named sizes (``s0 >= 2``, ``s0 % 8 == 0``) under which the graph is valid."""
    constants: Mapping[str, object] = field(default_factory=dict)
    """Python values built into the graph, by access expression: ``{"eps": 1e-6, "self.training": False}``.
    The graph is valid only for these values. Each is an int, float, bool, str, None or a list of these. Empty ``*args`` and
    ``**kwargs`` are stored as an empty dictionary."""
    numbers: tuple[NumberArgument, ...] = ()
    """Numbers among the arguments for which the graph is valid whatever their value. They are not in ``constants``."""
    dependencies: tuple[Dependency, ...] = ()
    """Other inputs of the graph: globals, helper functions, class attributes, environment variables."""
    modules: tuple[UsedModule, ...] = ()
    """Containers come before their contents."""
    containers: tuple[TensorContainer, ...] = ()
    """Containers of attribute tensors; outer ones come first."""
    aliases: tuple[tuple[str, str], ...] = ()
    """Aliases: pairs of access expressions that give one object, such as tied weights, of which the graph uses the second one,
    and modes of modules that may change together only."""
    free_flags: tuple[str, ...] = ()
    """Access expressions of boolean arguments that may be true or false."""
    receiver: str = ""
    """The parameter of a class method that gets the class: ``cls``."""
    fp32_matmul: str = "ieee"
    """Precision of fp32 matmuls in the user's code: ``ieee`` or ``tf32``."""
    fp32_convolution: str = "ieee"
    """Precision of fp32 convolutions in the user's code on a GPU: ``ieee`` or ``tf32`` (PyTorch's default)."""
    backward: Backward | None = None
    """Set if the graph contains the backward pass, too."""
    has_pairs: bool = False
    """Whether complex values of the target are pairs of real ones."""
    autocast: str = ""
    """The dtype of the caller's autocast, whose casts are nodes; empty for calls without autocast."""
    deterministic: bool = False
    """Whether the user's process refuses operations that are not deterministic, so that no kernel may add atomically."""
    observed_convolution_modes: Mapping[str, str] = field(default_factory=dict)
    """Precision observed for individual float32 convolutions on the workload's GPU, by node name. Where TF32 is allowed, the
    library decides for each convolution."""

    def convolution_mode(self, node: str) -> str:
        """Precision of one float32 convolution in the user's code: ``ieee`` or ``tf32``.

        Args:
            node: name of the node, or of a node that a rewrite derived from it.
        """
        return self.observed_convolution_modes.get(node.partition("_packed")[0], self.fp32_convolution)

    @property
    def runs_tf32(self) -> bool:
        """Whether some float32 products may run in TF32, taking observed convolution modes into account."""
        return any(self._is_allowed_tf32(node) and self._runs_tf32(node) for node in self.nodes_and_bodies())

    @property
    def allows_tf32(self) -> bool:
        """Whether TF32 is allowed for some float32 products or their gradients. The library then decides for each."""
        return any(self._is_allowed_tf32(node) for node in self.nodes_and_bodies())

    @property
    def tf32_libraries(self) -> tuple[str, ...]:
        """The libraries that may run float32 products of this graph in TF32: ``cublas`` and ``cudnn``."""
        nodes = [node for node in self.nodes_and_bodies() if self._is_allowed_tf32(node) and self._runs_tf32(node)]
        names = {"cudnn" if _by_cudnn(node) else "cublas" for node in nodes}
        return tuple(sorted(names))

    def nodes_and_bodies(self) -> Iterator[Node]:
        """The nodes, and those in the bodies of loops over time."""
        for node in self.nodes:
            yield node
            yield from node.loop.nodes if node.loop is not None else ()

    def _runs_tf32(self, node: Node) -> bool:
        return "conv" not in node.op or self.convolution_mode(node.name) == "tf32"

    def _is_allowed_tf32(self, node: Node) -> bool:
        mode = self.fp32_convolution if _by_cudnn(node) else self.fp32_matmul
        is_product = _by_cudnn(node) or node.op.split(".")[1] in PRODUCTS
        return is_product and mode == "tf32" and any(kind.dtype == "float32" for kind in node.outputs)

    def of_nodes(self, nodes: Iterable[Node], replacements: Mapping[Ref, Ref]) -> Graph:
        """A copy of the graph with these nodes. ``replacements`` maps outputs and written values to new tensors."""
        outputs = tuple(replacements.get(ref, ref) for ref in self.outputs)
        mutations = tuple(replace(item, value=replacements.get(item.value, item.value)) for item in self.mutations)
        return replace(self, nodes=tuple(nodes), outputs=outputs, mutations=mutations)

    def type_of(self, ref: Ref) -> TensorType:
        """Type of the referenced tensor."""
        input_type = self._input_types.get(ref.name)
        return input_type if input_type is not None else self.node(ref.name).outputs[ref.index]

    def node(self, name: str) -> Node:
        """Look up a node by name.

        Raises:
            KeyError: no node has this name.
        """
        return self.named[name]

    def readers(self, name: str) -> tuple[Node, ...]:
        """The nodes that read the given node or input, in execution order."""
        return self._readers.get(name, ())

    @cached_property
    def named(self) -> Mapping[str, Node]:
        """All nodes by name."""
        return {node.name: node for node in self.nodes}

    @cached_property
    def positions(self) -> Mapping[str, int]:
        """Execution index of each node, from 0."""
        return {node.name: i for i, node in enumerate(self.nodes)}

    @property
    def results(self) -> tuple[Ref | None, ...]:
        """The target's return values, without the attributes that it sets."""
        return self.forward_outputs[: len(self.forward_outputs) - len(self.state_attributes)]

    @property
    def sources(self) -> tuple[GraphInput, ...]:
        """All tensors that nodes may read and that no node computes: the inputs, and the tangents of a backward pass."""
        return (*self.inputs, *self.backward.tangents) if self.backward else self.inputs

    @property
    def forward_outputs(self) -> tuple[Ref, ...]:
        """The outputs without the gradients."""
        return self.outputs[: len(self.outputs) - len(self.backward.gradients)] if self.backward else self.outputs

    @property
    def gradients(self) -> tuple[Ref, ...]:
        """The outputs of the backward pass, one for each input in ``backward.gradients``; empty without a backward pass."""
        return self.outputs[len(self.forward_outputs) :]

    @cached_property
    def backward_nodes(self) -> frozenset[str]:
        """The nodes of the backward pass: those that neither a result nor a written input needs."""
        if self.backward is None or self.backward.in_forward:
            return frozenset()
        return frozenset(self.named) - self.needed_by_results

    @cached_property
    def needed_by_results(self) -> frozenset[str]:
        """The nodes of the forward pass: those that results or written inputs need, and early ones. Others compute gradients."""
        pending = [ref.name for ref in self.forward_outputs] + [mutation.value.name for mutation in self.mutations]
        pending += self.backward.early if self.backward else ()
        needed: set[str] = set()
        while pending:
            name = pending.pop()
            if name in self.named and name not in needed:
                needed.add(name)
                pending += [ref.name for ref in self.named[name].inputs()]
        return frozenset(needed)

    @property
    def only_for_gradients(self) -> frozenset[Ref]:
        """The values that no result needs."""
        read = {ref for name in self.needed_by_results for ref in self.node(name).inputs()} | set(self.forward_outputs)
        values = (Ref(node.name, i) for node in self.nodes for i in range(len(node.outputs)))
        return frozenset(ref for ref in values if ref not in read)

    @cached_property
    def escaping(self) -> frozenset[Ref]:
        """Values that are visible outside the target: returned, or written into an input."""
        return frozenset({*self.outputs, *(mutation.value for mutation in self.mutations)})

    @cached_property
    def written_inputs(self) -> Mapping[Ref, str]:
        """The input that each value is written into; the first one if there are several."""
        return {mutation.value: mutation.input for mutation in reversed(self.mutations)}

    @cached_property
    def _input_types(self) -> Mapping[str, TensorType]:
        return {item.name: item.type for item in self.sources}

    @cached_property
    def _readers(self) -> Mapping[str, tuple[Node, ...]]:
        readers: dict[str, list[Node]] = {}
        for node in self.nodes:
            for name in dict.fromkeys(ref.name for ref in node.inputs()):
                readers.setdefault(name, []).append(node)
        return {name: tuple(nodes) for name, nodes in readers.items()}


def _by_cudnn(node: Node) -> bool:
    """Whether cuDNN computes it on a GPU: one setting controls convolutions and recurrent layers."""
    return node.op.split(".")[1] in RECURRENT_GATES or "conv" in node.op
