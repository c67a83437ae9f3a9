"""Loops over time steps that are in no kernel: a loop of torch calls in the launcher, as in the user's code."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from mtmc_lsp.codegen.kernel.snippets import tuple_text
from mtmc_lsp.codegen.module.naming import Names
from mtmc_lsp.codegen.module.torch_calls import torch_call
from mtmc_lsp.core.graph import Node, Ref, TensorType
from mtmc_lsp.core.loop import Loop, LoopInput, LoopOutput, Position
from mtmc_lsp.core.sizes import Size

INDENT = "    "


def loop_statements(
    node: Node,
    variables: Mapping[Ref, str],
    results: Sequence[str],
    names: Names,
    size: Callable[[Size], str],
    size_names: dict[str, str],
    first: str,
) -> list[str]:
    """The statements of a loop.

    Args:
        variables: of the values that the launcher has.
        results: the variables that get the results.
        names: of the launcher's variables.
        size: a size as Python.
        size_names: Python for each named size and run-time number.
        first: the variable of an input; new tensors are created on its device.
    """
    loop = node.loop
    assert loop is not None
    writer = _Writer(loop, node, variables, names, size, first)
    before = [*writer.initial_states(), *writer.empty_results(results)]
    inside = writer.rows()
    for inner in loop.nodes:
        texts = [names.unique(inner.variable or inner.word) for _ in inner.outputs]
        inside.append(f"{', '.join(texts)} = {torch_call(inner, writer.local, size_names, first)}")
        writer.local |= {Ref(inner.name, i): text for i, text in enumerate(texts)}
    inside += [*writer.stores(results), *writer.next_states()]
    return [
        *before,
        f"for {writer.step} in range({size(loop.count)}):",
        *(f"{INDENT}{line}" for line in inside),
        *writer.last_values(results),
    ]


class _Writer:
    """The variables of one loop, and the statements around its torch calls."""

    def __init__(
        self,
        loop: Loop,
        node: Node,
        variables: Mapping[Ref, str],
        names: Names,
        size: Callable[[Size], str],
        first: str,
    ) -> None:
        self.loop, self.node, self.size, self.first = loop, node, size, first
        self.step = names.unique("step")
        self.arguments = [variables[ref] for ref in node.args if isinstance(ref, Ref)]
        self.local: dict[Ref, str] = {}
        """The variables of the values of an iteration."""
        for item in loop.inputs:
            is_whole = item.argument is not None and item.position is None and not item.is_state
            name = self.arguments[item.argument] if is_whole and item.argument is not None else names.unique(item.name)
            self.local[Ref(item.name)] = name

    def initial_states(self) -> list[str]:
        """The states before the first iteration."""
        return [f"{self.local[Ref(item.name)]} = {self._initial(item)}" for item in self.loop.states]

    def _initial(self, item: LoopInput) -> str:
        if item.argument is not None:
            return self.arguments[item.argument]
        value = f'float("{item.initial}")' if item.initial in (float("inf"), -float("inf")) else repr(item.initial)
        return f"torch.full({self._shape(item.type.shape)}, {value}, {self._options(item.type)})"

    def empty_results(self, results: Sequence[str]) -> list[str]:
        """The tensors to which iterations write rows."""
        lines = []
        for output, kind, name in zip(self.loop.outputs, self.node.outputs, results, strict=True):
            if output.position is not None and output.base is not None:
                lines.append(f"{name} = {self.arguments[output.base]}.clone()")
            elif output.position is not None:
                sizes = f"{self._shape(kind.shape)}, {self._shape(kind.stride)}"
                lines.append(f"{name} = torch.empty_strided({sizes}, {self._options(kind)})")
        return lines

    def rows(self) -> list[str]:
        """What an iteration reads."""
        lines = []
        for item in self.loop.inputs:
            if item.position is not None:
                at = self._at(item.position)
                if item.argument is None:
                    text = f"torch.full((), {at}, {self._options(item.type)})"
                else:
                    text = f"{self.arguments[item.argument]}.narrow({item.position.dim}, {at}, 1)"
                lines.append(f"{self.local[Ref(item.name)]} = {text}")
        return lines

    def stores(self, results: Sequence[str]) -> list[str]:
        """The stores of the rows of an iteration."""
        pairs = zip(self.loop.outputs, results, strict=True)
        return [
            f"{self._row(name, output, output.position)}.copy_({self.local[output.value]})"
            for output, name in pairs
            if output.position is not None
        ]

    def _row(self, name: str, output: LoopOutput, position: Position) -> str:
        kinds = dict(zip(self.loop.outputs, self.node.outputs, strict=True))
        has_dim = len(self._type(output.value).shape) == len(kinds[output].shape)
        at = self._at(position)
        return f"{name}.narrow({position.dim}, {at}, 1)" if has_dim else f"{name}.select({position.dim}, {at})"

    def next_states(self) -> list[str]:
        """The states after an iteration, all at once."""
        targets = [self.local[Ref(item.name)] for item in self.loop.states]
        values = [self.local[item.next] for item in self.loop.states if item.next is not None]
        return [f"{', '.join(targets)} = {', '.join(values)}"] if targets else []

    def last_values(self, results: Sequence[str]) -> list[str]:
        """The results that are states after the last iteration."""
        states = {item.next: self.local[Ref(item.name)] for item in self.loop.states}
        lines = []
        for output, kind, name in zip(self.loop.outputs, self.node.outputs, results, strict=True):
            if output.position is None:
                # A state may be a view of a row.
                order = ".contiguous()" if kind.is_contiguous else ""
                lines.append(f"{name} = {states[output.value]}{order}")
        return lines

    def _type(self, ref: Ref) -> TensorType:
        return next(node for node in self.loop.nodes if node.name == ref.name).outputs[ref.index]

    def _at(self, position: Position) -> str:
        """The position of the iteration as Python."""
        text = self.step if position.step == 1 else f"{position.step} * {self.step}"
        if not position.first.terms:
            return text
        first = self.size(position.first)
        return f"{first} - {self.step}" if position.step == -1 else f"{first} + {text}"

    def _shape(self, sizes: Sequence[Size]) -> str:
        return tuple_text([self.size(size) for size in sizes])

    def _options(self, kind: TensorType) -> str:
        return f"dtype=torch.{kind.dtype}, device={self.first}.device"
