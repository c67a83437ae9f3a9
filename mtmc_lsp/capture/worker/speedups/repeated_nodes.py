"""Decomposes the graph of a network node by node: nodes that differ in nothing but their tensors are traced once.

``ExportedProgram.run_decompositions`` traces the whole program twice more. Most nodes of a network stay as they are, and its
blocks repeat the same nodes: a call of ``silu`` on a tensor of the same type and strides has the same decomposition each time.
Where a node's decomposition could depend on anything else, the caller has torch decompose the program.
"""

from __future__ import annotations

import operator
import warnings
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.export.graph_signature import InputKind, OutputKind, TensorArgument
from torch.utils import _pytree as pytree

from mtmc_lsp.capture.worker.passes.non_polynomial_sizes import is_polynomial, simplified_stride

LEAST_OPERATIONS = 50
"""Torch decomposes smaller graphs, which take no time. Texts of kernels contain names of nodes, which would be others."""
WITHOUT_RESULT = "_assert_tensor_metadata"
"""The operator that checks a conversion's operand; torch removes it, too."""
SYMBOLS = (torch.SymInt, torch.SymFloat, torch.SymBool)

Table = Mapping[Any, Callable[..., Any]]


class _NotSeparable(Exception):
    """The decomposition of a node may depend on other nodes."""


@dataclass(frozen=True)
class DecomposedProgram:
    """The parts of an exported program that a reader of its graph needs."""

    graph: torch.fx.Graph
    graph_signature: Any
    constants: Mapping[str, Any]


@dataclass
class _Call:
    """The first of the nodes that call an operator with such arguments."""

    node: torch.fx.Node
    values: list[Any]
    """The node's arguments as a flat list, with tensors without data."""
    structure: Any
    placeholders: list[torch.fx.Node] = field(default_factory=list)
    """In the graph of all traces: the arguments that are nodes."""
    body: list[torch.fx.Node] = field(default_factory=list)
    """The operations of its decomposition."""
    result: Any = None
    """The node or nodes that are its result."""

    @property
    def varying(self) -> list[int]:
        """The positions of arguments that are nodes."""
        return [i for i, leaf in enumerate(pytree.tree_leaves((self.node.args, self.node.kwargs))) if _is_node(leaf)]

    def run(self, given: Sequence[Any]) -> Any:
        """Call the operator with other tensors and sizes in place of its nodes."""
        every = list(self.values)
        for i, value in zip(self.varying, given, strict=True):
            every[i] = value
        args, kwargs = pytree.tree_unflatten(every, self.structure)
        return self.node.target(*args, **kwargs)


def decomposed(program: Any, table: Table) -> DecomposedProgram | None:
    """The program that ``program.run_decompositions(table)`` returns, with other node names; None if torch must decompose it."""
    nodes = [node for node in program.graph.nodes if isinstance(node.target, torch._ops.OpOverload)]
    if len(nodes) <= LEAST_OPERATIONS:
        return None
    try:
        with warnings.catch_warnings():
            # A node's argument may be a size instead of the node that computes it.
            warnings.simplefilter("ignore")
            return _Rewriting(program, table).run()
    except Exception:
        # Torch decomposes the program, or raises an error that describes the problem.
        return None


def _trace(calls: Sequence[_Call], fake_mode: Any, table: Table) -> None:
    """Trace all calls as one function, in the contexts in which torch decomposes a program."""
    from torch._dispatch.python import enable_python_dispatcher
    from torch._functorch._aot_autograd.functional_utils import from_fun, to_fun
    from torch._functorch.aot_autograd import aot_autograd_decompositions
    from torch._subclasses.functional_tensor import FunctionalTensorMode
    from torch.export._trace import _ignore_backend_decomps
    from torch.export.exported_program import (
        _override_composite_implicit_decomp,
        _split_decomp_table_to_cia_and_python_decomp,
    )
    from torch.fx.experimental.proxy_tensor import make_fx, maybe_enable_thunkify

    overrides, others = _split_decomp_table_to_cia_and_python_decomp(dict(table))
    others = {**aot_autograd_decompositions, **others}
    functionalize = torch._C.DispatchKeySet(torch._C.DispatchKey.Functionalize)

    def every(*given: Any) -> list[Any]:
        values = iter(given)
        with maybe_enable_thunkify(), torch._C._ExcludeDispatchKeyGuard(functionalize):
            results = [call.run([to_fun(next(values)) for _ in call.varying]) for call in calls]
        return pytree.tree_map(from_fun, results)  # type: ignore[no-any-return]  # torch is not typed here

    with (
        fake_mode,
        _ignore_backend_decomps(),
        _override_composite_implicit_decomp(overrides),
        torch.no_grad(),
        enable_python_dispatcher(),
    ):
        # The tracer tells tensors apart by their objects, and nodes with other arguments may have one tensor twice.
        given = [call.values[i] for call in calls for i in call.varying]
        given = [value.detach() if isinstance(value, torch.Tensor) else value for value in given]
        with FunctionalTensorMode(export=True):
            graph = make_fx(every, decomposition_table=others)(*given).graph
    placeholders = iter(graph.find_nodes(op="placeholder"))
    order = {node: i for i, node in enumerate(graph.nodes)}
    for call, result in zip(calls, graph.output_node().args[0], strict=True):
        call.result = result
        call.placeholders = [next(placeholders) for _ in call.varying]
        pending = [node for node in pytree.tree_leaves(result) if _is_node(node)]
        body = set[torch.fx.Node]()
        while pending:
            node = pending.pop()
            if node in body or node in call.placeholders or isinstance(node.meta.get("val"), SYMBOLS):
                continue
            if node.op != "call_function":
                raise _NotSeparable
            body.add(node)
            pending += node.all_input_nodes
        call.body = sorted(body, key=order.__getitem__)
        found, expected = (
            [*map(_description, pytree.tree_leaves(each))] for each in (_values(result), call.node.meta["val"])
        )
        if found != expected:
            # The nodes that read it were exported with other strides.
            raise _NotSeparable


def _values(argument: Any) -> Any:
    """An argument with the tensors and sizes of nodes instead of the nodes."""
    return torch.fx.node.map_arg(argument, lambda node: node.meta["val"])


def _is_node(value: Any) -> bool:
    return isinstance(value, torch.fx.Node)


def _is_tensor(node: torch.fx.Node) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor)


class _Rewriting:
    """The rewriting of one program's graph."""

    def __init__(self, program: Any, table: Table) -> None:
        self._program, self._table = program, table
        self._graph = torch.fx.Graph()
        self._results: dict[torch.fx.Node, Any] = {}
        """For each node of the program, what takes its place in the new graph."""
        self._calls: dict[torch.fx.Node, _Call] = {}
        """For each node that calls an operator, the first that calls it with such arguments."""
        self._sharing: dict[int, set[torch.fx.Node]] = defaultdict(set)
        """The nodes whose tensors share one storage."""
        for node in program.graph.nodes:
            for tensor in pytree.tree_leaves(node.meta.get("val")):
                if isinstance(tensor, torch.Tensor):
                    self._sharing[_storage(tensor)].add(node)

    def run(self) -> DecomposedProgram:
        signature = self._program.graph_signature
        if any(spec.kind is not InputKind.USER_INPUT for spec in signature.input_specs):
            raise _NotSeparable
        if any(spec.kind is not OutputKind.USER_OUTPUT for spec in signature.output_specs):
            raise _NotSeparable
        outputs = list(self._program.graph.output_node().args[0])
        self._check_outputs(outputs)
        self._collect_calls()
        for node in self._program.graph.nodes:
            if node.op == "placeholder":
                self._results[node] = self._graph.placeholder(node.name)
                self._results[node].meta = dict(node.meta)
            elif node.op == "output":
                self._graph.output(self._replaced(node.args[0])).meta = dict(node.meta)
            else:
                self._rewrite(node)
        for node in reversed(self._graph.nodes):
            if node.op == "call_function" and not node.users:
                self._graph.erase_node(node)
        specs = [
            replace(spec, arg=TensorArgument(self._results[output].name)) if isinstance(output, torch.fx.Node) else spec
            for spec, output in zip(signature.output_specs, outputs, strict=True)
        ]
        return DecomposedProgram(self._graph, replace(signature, output_specs=specs), self._program.constants)

    def _check_outputs(self, outputs: list[Any]) -> None:
        """Refuse results that share memory with an input or with each other: torch copies some of them."""
        tensors = [output for output in outputs if isinstance(output, torch.fx.Node)]
        storages = [_storage(output.meta["val"]) for output in tensors]
        shared = [self._sharing[storage] for storage in storages]
        if len({*storages}) < len(storages) or any(node.op == "placeholder" for nodes in shared for node in nodes):
            raise _NotSeparable

    def _replaced(self, argument: Any) -> Any:
        return torch.fx.node.map_arg(argument, self._results.__getitem__)

    def _rewrite(self, node: torch.fx.Node) -> None:
        value = node.meta.get("val")
        if node.target is operator.getitem:
            results = self._results[node.args[0]]
            self._results[node] = results[node.args[1]]
            return
        if isinstance(value, SYMBOLS):
            self._results[node] = self._graph.node_copy(node, self._results.__getitem__)
            return
        self._results[node] = self._inlined(self._calls[node], node) if value is not None else None

    def _check(self, node: torch.fx.Node, seen: Set[torch.fx.Node]) -> None:
        """Refuse a node whose decomposition may depend on others; ``seen`` are the nodes before it."""
        value, target = node.meta.get("val"), node.target
        if node.op in ("placeholder", "output") or target is operator.getitem or isinstance(value, SYMBOLS):
            return
        if not isinstance(target, torch._ops.OpOverload) or target.namespace != "aten":
            raise _NotSeparable
        tensors = pytree.tree_leaves(value)
        if value is None and target._opname == WITHOUT_RESULT:
            return
        if not tensors or not all(type(tensor) is FakeTensor for tensor in tensors):
            raise _NotSeparable
        if target._schema.is_mutable:
            self._check_write(node, seen)

    def _check_write(self, node: torch.fx.Node, seen: Set[torch.fx.Node]) -> None:
        """Refuse a write that anything but the node's result shows: to an input, or to a tensor that is read later."""
        target = node.args[0]
        if not isinstance(target, torch.fx.Node) or not _is_tensor(target) or not _is_tensor(node):
            raise _NotSeparable
        arguments = node.target._schema.arguments
        written = [i for i, argument in enumerate(arguments) if argument.alias_info and argument.alias_info.is_write]
        storage = _storage(target.meta["val"])
        if written != [0] or storage != _storage(node.meta["val"]):
            raise _NotSeparable
        for other in self._sharing[storage] & seen:
            if other.op == "placeholder" or any(reader not in seen for reader in other.users.keys() - {node}):
                raise _NotSeparable

    def _collect_calls(self) -> None:
        """Note for each node which call it repeats, and trace these calls."""
        calls: dict[object, _Call] = {}
        fake_modes = set()
        seen = set[torch.fx.Node]()
        for node in self._program.graph.nodes:
            self._check(node, seen)
            seen.add(node)
            if not _decomposes(node):
                continue
            leaves, structure = pytree.tree_flatten((node.args, node.kwargs))
            values = [leaf.meta["val"] if _is_node(leaf) else leaf for leaf in leaves]
            key = (node.target, str(structure), tuple(map(_description, values)))
            self._calls[node] = calls.setdefault(key, _Call(node, values, structure))
            fake_modes |= {value.fake_mode for value in values if isinstance(value, FakeTensor)}
        if len(fake_modes) != 1:
            raise _NotSeparable
        _trace([*calls.values()], fake_modes.pop(), self._table)

    def _inlined(self, call: _Call, node: torch.fx.Node) -> Any:
        """Copy the decomposition of a call into the new graph, as that of ``node``."""
        leaves = [leaf for leaf in pytree.tree_leaves((node.args, node.kwargs)) if _is_node(leaf)]
        copies = dict(zip(call.placeholders, map(self._results.__getitem__, leaves), strict=True))

        def copy_of(each: torch.fx.Node) -> Any:
            # The trace may take a size from a tensor of another call.
            return copies[each] if each in copies else _size(each)

        for each in call.body:
            args, kwargs = torch.fx.node.map_arg((each.args, each.kwargs), copy_of)
            target = each.target
            name = target.overloadpacket.__name__ if isinstance(target, torch._ops.OpOverload) else None
            copies[each] = self._graph.create_node("call_function", target, args, dict(kwargs), name)
            copies[each].meta = dict(each.meta)
            copies[each].meta["stack_trace"] = node.meta.get("stack_trace", "")
        return torch.fx.node.map_arg(call.result, copy_of)


def _size(node: torch.fx.Node) -> Any:
    """The value of a node that is a symbolic size."""
    value = node.meta["val"]
    if not isinstance(value, SYMBOLS):
        raise _NotSeparable
    return value


def _decomposes(node: torch.fx.Node) -> bool:
    """Whether a node calls an operator that computes tensors."""
    value, target = node.meta.get("val"), node.target
    return isinstance(target, torch._ops.OpOverload) and value is not None and not isinstance(value, SYMBOLS)


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _description(value: Any) -> object:
    """What a decomposition can depend on: everything about a tensor but its values; of other arguments, also the type."""
    if isinstance(value, FakeTensor):
        return (
            tuple(map(_description, value.shape)),
            tuple(map(_stride, value.stride())),
            _description(value.storage_offset()),
            value.dtype,
            value.device,
            value.layout,
            value.requires_grad,
            value.is_conj(),
            value.is_neg(),
        )
    if isinstance(value, torch.Tensor):
        raise _NotSeparable
    if isinstance(value, SYMBOLS):
        expression = value.node.expr
        return (int, str(expression)) if expression.is_Integer else (type(value), _text(expression, expression))
    return type(value), repr(value)


def _stride(value: Any) -> object:
    """The description of a stride, which torch writes as ``Min(size, 2*size)`` where a size could be 0."""
    return _text(value.node.expr, simplified_stride(value.node.expr)) if isinstance(value, SYMBOLS) else str(value)


def _text(expression: Any, simplified: Any) -> str:
    """An expression as text; torch may trace others in another form where it traces the whole program."""
    if not is_polynomial(simplified):
        raise _NotSeparable
    return str(expression)
