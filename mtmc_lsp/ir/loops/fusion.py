"""Moves elementwise operations before and after a loop over time steps into its body.

An iteration reads one slice of a sequence along its time dimension. Where an elementwise operation computes the sequence, the
iteration computes that slice from the slices of the operands, and the sequence never reaches memory. The same holds after the
loop: where an operation reads all rows that the loop writes, an iteration computes its row at once.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace
from functools import lru_cache

from mtmc_lsp.core.graph import Argument, Node, Ref, TensorType, contiguous_stride
from mtmc_lsp.core.loop import Loop, LoopInput, LoopOutput, Position, pruned
from mtmc_lsp.core.sizes import Size
from mtmc_lsp.ir.loops.form import LoopForm, loop_form, row_type
from mtmc_lsp.ir.primitives import ONE, KernelIR, PrimOp
from mtmc_lsp.ir.region_values import used_outside
from mtmc_lsp.ir.regions import CannotFuse, Region

ELEMENTWISE = frozenset({PrimOp.POINTWISE, PrimOp.CONSTANT, PrimOp.EXPAND, PrimOp.ALIAS})
"""Primitives of operations whose slices are computed from slices of their operands."""
FREE_VIEWS = frozenset("unsqueeze permute transpose t expand alias detach".split())
"""Views that the body applies to a slice of the tensor itself."""
SAME = frozenset("clone alias detach contiguous _to_copy".split())
"""Operations whose result has the elements of their operand."""


def loop_in(ir: KernelIR, region: Region) -> LoopForm:
    """The loop of a region, with the operations around it that the region contains."""
    return fused_loop(ir, region.nodes)


class _Identity:
    """Makes a kernel IR hashable by identity."""

    def __init__(self, ir: KernelIR) -> None:
        self.ir = ir

    def __hash__(self) -> int:
        return id(self.ir)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Identity) and other.ir is self.ir


def fused_loop(ir: KernelIR, nodes: Iterable[str]) -> LoopForm:
    """The loop among ``nodes``, with the others as part of its body.

    Raises:
        CannotFuse: they cannot be part of it.
    """
    result = _fused(_Identity(ir), frozenset(nodes))
    if isinstance(result, str):
        raise CannotFuse(result)
    return result


@lru_cache(maxsize=256)
def _fused(identity: _Identity, nodes: frozenset[str]) -> LoopForm | str:
    try:
        return _Fusion(identity.ir, nodes).result()
    except CannotFuse as reason:
        return str(reason)


class _Fusion:
    """A loop while operations are moved into it."""

    def __init__(self, ir: KernelIR, members: Collection[str]) -> None:
        self.ir, self.graph, self.members = ir, ir.graph, members
        loops = [node for name in members if (node := self.graph.node(name)).loop is not None]
        if len(loops) != 1:
            raise CannotFuse("two loops over time steps")
        self.node = loops[0]
        assert self.node.loop is not None
        self.loop: Loop = self.node.loop
        self.arguments: list[Ref] = []
        self.inputs: list[LoopInput] = []
        self.nodes: list[Node] = []
        self.used = {item.name for item in self.loop.inputs} | {node.name for node in self.loop.nodes}
        self.slices: dict[tuple[Ref, Position | None], Ref] = {}
        """Values of the graph in the body: their slices, or all of them."""
        self.rows: dict[Ref, tuple[Position, Ref]] = {}
        """Values after the loop: where an iteration writes a slice of them, and the slice in the body."""

    def result(self) -> LoopForm:
        """The loop with all members."""
        self._move_sources()
        self._move_readers()
        outputs, kinds, results = [], [], used_outside(self.ir, self.members)
        for ref in results:
            outputs.append(self._output(ref))
            kinds.append(self.graph.type_of(ref))
        loop = replace(self.loop, inputs=tuple(self.inputs), nodes=tuple(self.nodes), outputs=tuple(outputs))
        node = replace(self.node, args=tuple(self.arguments), outputs=tuple(kinds), loop=loop)
        return loop_form(pruned(node), self.graph, results)

    def _output(self, ref: Ref) -> LoopOutput:
        if ref.name == self.node.name:
            output = self.loop.outputs[ref.index]
            return replace(output, base=self._argument(self._old(output.base)) if output.base is not None else None)
        if ref not in self.rows:
            raise CannotFuse("a value before the loop is read by other operations, too")
        position, value = self.rows[ref]
        return LoopOutput(value, position)

    def _old(self, number: int) -> Ref:
        ref = self.node.args[number]
        assert isinstance(ref, Ref)
        return ref

    # Before the loop ---------------------------------------------------------------------------------------------

    def _move_sources(self) -> None:
        """Compute what the loop reads from members in its body."""
        replaced: dict[Ref, Ref] = {}
        for item in self.loop.inputs:
            if item.argument is None:
                self.inputs.append(item)
                continue
            ref = self._old(item.argument)
            if item.is_state or ref.name not in self.members:
                if ref.name in self.members:
                    raise CannotFuse("an operation computes the state before the loop")
                self.inputs.append(replace(item, argument=self._argument(ref)))
                self.slices[ref, item.position] = Ref(item.name)
            else:
                replaced[Ref(item.name)] = self._slice(ref, item.position)
        for output in self.loop.outputs:
            if output.base is not None and self._old(output.base).name in self.members:
                raise CannotFuse("an operation computes a tensor that the loop writes in part")
        self.nodes += [node.reading(replaced) for node in self.loop.nodes]

    def _argument(self, ref: Ref) -> int:
        if ref not in self.arguments:
            self.arguments.append(ref)
        return self.arguments.index(ref)

    def _unique(self, name: str) -> str:
        while name in self.used:
            name = f"{name}_"
        self.used.add(name)
        return name

    def _slice(self, ref: Ref, position: Position | None) -> Ref:
        """The slice of length 1 of a value at a position, or all of it, as a value of the body."""
        key = ref, position
        if key in self.slices:
            return self.slices[key]
        if ref in self.rows and self.rows[ref][0] == position:
            return self.rows[ref][1]
        if ref.name in self.members:
            self.slices[key] = self._moved(self.graph.node(ref.name), position)
            return self.slices[key]
        if (view := self._through_view(ref, position)) is not None:
            self.slices[key] = view
            return view
        kind = self.graph.type_of(ref)
        node = self.graph.named.get(ref.name)
        name = (node.variable if node is not None else "") or ref.name
        name = self._unique(f"{name}_t" if position is not None else name)
        kind = row_type(kind, position.dim) if position is not None else kind
        self.inputs.append(LoopInput(name, kind, self._argument(ref), position))
        self.slices[key] = Ref(name)
        return Ref(name)

    def _through_view(self, ref: Ref, position: Position | None) -> Ref | None:
        """The slice of a view from the tensor that it views, so that several views of it are read once."""
        node = self.graph.named.get(ref.name)
        if node is None or node.op.split(".")[1] not in FREE_VIEWS:
            return None
        try:
            return self._moved(node, position)
        except CannotFuse:
            return None

    def _moved(self, node: Node, position: Position | None) -> Ref:
        """Compute a slice of a node's result in the body."""
        if node is self.node or len(node.outputs) > 1:
            raise CannotFuse("a value after the loop is read before it")
        sources = {ref: self._source_position(node, ref, position) for ref in node.inputs()}
        operands = {ref: self._slice(ref, at) for ref, at in sources.items()}
        shape = node.type.shape
        if position is not None:
            shape = row_type(node.type, position.dim).shape
        return self._added(node, operands, shape, position.dim if position is not None else None)

    def _added(self, node: Node, operands: dict[Ref, Ref], shape: tuple[Size, ...], dim: int | None) -> Ref:
        """Add a copy of a node to the body, for a slice along ``dim`` of its result."""
        name = self._unique(node.name)
        kind = TensorType(shape, node.type.dtype, contiguous_stride(shape))
        copy = replace(node, name=name, outputs=(kind,)).reading(operands)
        word = node.op.split(".")[1]
        if word in ("expand", "view", "reshape", "_unsafe_view") and dim is not None:
            copy = replace(copy, args=(copy.args[0], shape, *copy.args[2:]))
        if word == "flip" or (word == "slice" and dim is not None and self._number(node, 1, 0) % len(shape) == dim):
            # The slice of an iteration is at another position of the operand.
            copy = replace(copy, op="aten.alias.default", args=copy.args[:1])
        self.nodes.append(copy)
        return Ref(name)

    def _source_position(self, node: Node, ref: Ref, position: Position | None) -> Position | None:
        """Where a slice of a node's result reads an operand; ``None`` if it reads all of it."""
        word, kind = node.op.split(".")[1], self.graph.type_of(ref)
        if position is None:
            if not (self._is_elementwise(node) or word in SAME or word in ("unsqueeze", "permute", "transpose", "t")):
                raise CannotFuse(f"{node.word} is not elementwise")
            return None
        dim = self._dim_of_source(node, kind, position.dim)
        if dim is None or kind.shape[dim] == ONE:
            return None
        if word == "flip" and position.dim in self._dims(node, 1):
            return Position(dim, kind.shape[dim] - 1 - position.first, -position.step)
        if word == "slice" and self._number(node, 1, 0) % len(kind.shape) == dim:
            return Position(dim, position.first + self._start(node, kind.shape[dim]), position.step)
        return replace(position, dim=dim)

    def _dim_of_source(self, node: Node, kind: TensorType, dim: int) -> int | None:
        """The dimension of an operand that is dimension ``dim`` of the result; ``None`` if it has none."""
        word, rank = node.op.split(".")[1], len(node.type.shape)
        if self._is_elementwise(node) or word in SAME or word in ("flip", "slice", "expand"):
            aligned = dim - (rank - len(kind.shape))
            return aligned if aligned >= 0 else None
        if word == "unsqueeze":
            at = self._number(node, 1, 0) % rank
            if at == dim:
                raise CannotFuse("the time dimension is new")
            return dim - (at < dim)
        if word in ("permute", "transpose", "t"):
            return self._order(node)[dim]
        if word == "select":
            at = self._number(node, 1, 0) % len(kind.shape)
            return dim + (at <= dim)
        if word in ("view", "reshape", "_unsafe_view"):
            for other in range(len(kind.shape)):
                same_outside = contiguous_stride(kind.shape)[other] == contiguous_stride(node.type.shape)[dim]
                if same_outside and kind.shape[other] == node.type.shape[dim]:
                    return other
        raise CannotFuse(f"{node.word} is not elementwise")

    def _is_elementwise(self, node: Node) -> bool:
        prims = list(self.ir.of_node(node.name))
        return bool(prims) and {prim.op for prim in prims} <= ELEMENTWISE and node.name not in self.ir.opaque

    def _order(self, node: Node) -> list[int]:
        """For each dimension of a transposed value, its dimension before."""
        rank, word = len(node.type.shape), node.op.split(".")[1]
        if word == "permute":
            return [dim % rank for dim in self._dims(node, 1)]
        order = list(range(rank))
        first, second = (0, rank - 1) if word == "t" else (self._number(node, i, 0) % rank for i in (1, 2))
        order[first], order[second] = order[second], order[first]
        return order

    def _dims(self, node: Node, position: int) -> list[int]:
        value = node.args[position]
        items: tuple[Argument, ...] = value if isinstance(value, tuple) else (value,)
        rank = len(node.type.shape)
        return [item % rank for item in items if isinstance(item, int)]

    @staticmethod
    def _number(node: Node, position: int, default: int) -> int:
        value = node.args[position] if position < len(node.args) else default
        if isinstance(value, Size) and value.is_constant:
            value = value.constant
        if not isinstance(value, int):
            raise CannotFuse(f"{node.word} has no constant dimension")
        return value

    def _start(self, node: Node, length: Size) -> Size:
        """The first element of a slice with step 1."""
        if self._number(node, 4, 1) != 1:
            raise CannotFuse("a slice with steps")
        value = node.args[2] if len(node.args) > 2 else 0
        start = Size.of(value) if isinstance(value, (int, Size)) else Size.of(0)
        return start + length if start.is_constant and start.constant < 0 else start

    # After the loop ----------------------------------------------------------------------------------------------

    def _move_readers(self) -> None:
        """Compute what reads the rows of the loop from members in its body."""
        for i, output in enumerate(self.loop.outputs):
            if output.position is not None and output.base is None:
                kind = self.node.outputs[i]
                self.rows[Ref(self.node.name, i)] = output.position, self._with_dim(output, kind)
        after = {self.node.name}
        for node in self.graph.nodes:
            read = [ref for ref in node.inputs() if ref.name in after]
            if node.name not in self.members or not read:
                continue
            after.add(node.name)
            if missing := [ref for ref in read if ref not in self.rows]:
                raise CannotFuse(f"{missing[0].name} is complete only after the last iteration")
            positions = {self._result_position(node, ref) for ref in read}
            if len(positions) > 1:
                raise CannotFuse("an operation combines different iterations of the loop")
            (position,) = positions
            operands = {ref: self._operand(node, ref, position) for ref in node.inputs()}
            shape = row_type(node.type, position.dim).shape
            self.rows[Ref(node.name)] = position, self._added(node, operands, shape, position.dim)
        unused = set(self.members) - after - {ref.name for ref, _ in self.slices}
        if unused:
            raise CannotFuse("an operation that the loop neither reads nor feeds")

    def _operand(self, node: Node, ref: Ref, position: Position) -> Ref:
        return self.rows[ref][1] if ref in self.rows else self._slice(ref, self._source_position(node, ref, position))

    def _with_dim(self, output: LoopOutput, kind: TensorType) -> Ref:
        """The row of an output with length 1 along its time dimension."""
        assert output.position is not None
        value = next(node for node in self.nodes if node.name == output.value.name)
        if len(value.type.shape) == len(kind.shape):
            return output.value
        shape = row_type(kind, output.position.dim).shape
        name = self._unique(f"{value.name}_row")
        dense = TensorType(shape, value.type.dtype, contiguous_stride(shape))
        self.nodes.append(Node(name, "aten.unsqueeze.default", (output.value, output.position.dim), {}, (dense,)))
        return Ref(name)

    def _result_position(self, node: Node, ref: Ref) -> Position:
        """Where an iteration writes a node's result, from where it writes an operand."""
        position, kind = self.rows[ref][0], self.graph.type_of(ref)
        for dim, size in enumerate(node.type.shape):
            if size == ONE:
                continue
            try:
                source = self._source_position(node, ref, replace(position, dim=dim))
            except CannotFuse:
                if dim == len(node.type.shape) - 1:
                    raise
                continue
            if source is not None and source.dim == position.dim:
                word = node.op.split(".")[1]
                if word == "slice" and self._number(node, 1, 0) % len(kind.shape) == position.dim:
                    raise CannotFuse("an operation reads some rows of the loop")
                if word == "flip" and dim in self._dims(node, 1):
                    return Position(dim, kind.shape[position.dim] - 1 - position.first, -position.step)
                return replace(position, dim=dim)
        raise CannotFuse(f"{node.word} has no time dimension")
