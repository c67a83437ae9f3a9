"""Replaces complex values by pairs of real values in an exported program with a kept loop that computes with them.

Kernels know no complex numbers. So before the body of a loop becomes a graph, each complex state becomes two states, and each
operation its real operations. What is left complex, such as inputs and operations without a decomposition, is split by
``view_as_real`` where a pair reads it, and joined by ``complex`` where such an operation or the result needs it.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch._guards import detect_fake_mode
from torch.fx import Node
from torch.utils._pytree import tree_leaves, tree_map

from mtmc_lsp.capture.worker.graph_reader import line_of
from mtmc_lsp.capture.worker.loops.iteration import NotKept, OutsideLoop, known
from mtmc_lsp.capture.worker.loops.markers import NAMESPACE
from mtmc_lsp.capture.worker.loops.pairs.emitter import (
    PART,
    Emitter,
    Pair,
    aten,
    is_node,
    real_dtype,
    same_strides,
    value_of,
)
from mtmc_lsp.capture.worker.loops.pairs.operations import (
    CREATING,
    OPERATIONS,
    PER_PART,
    PRODUCTS,
    SEVERAL,
    created,
    matrix_product,
    of_each,
    pair_of,
)

ENDINGS = ("re", "im")
"""Endings of the names of the parts of a variable."""


def split_complex_values(graph: torch.fx.Graph) -> None:
    """Replace the complex values of a graph by pairs if the body of a kept loop computes with such values."""
    if _has_complex_loop(graph):
        _Splitting(graph).run()


def _mark(node: Node) -> str:
    """``enter`` for a node that marks a loop; empty for other nodes."""
    namespace, _, name = str(node.target).partition(".")
    return name.split(".")[0] if namespace == NAMESPACE else ""


def _is_complex(node: Any) -> bool:
    """Whether a node is a complex tensor, or several."""
    leaves = tree_leaves(value_of(node)) if is_node(node) else ()
    return any(isinstance(leaf, torch.Tensor) and leaf.dtype.is_complex for leaf in leaves)


def _has_complex_loop(graph: torch.fx.Graph) -> bool:
    changing: set[Node] = set()
    for node in graph.nodes:
        mark = _mark(node)
        if mark in ("leave", "reverse", "stack"):
            if any(map(_is_complex, node.all_input_nodes)):
                return True
        elif mark or any(each in changing for each in node.all_input_nodes):
            if _is_complex(node):
                return True
            changing.add(node)
    return False


def _scattered(node: Node) -> Pair | None:
    """The parts of a gradient of ``x.real`` or ``x.imag``: one of them is 0."""
    if node.target is not aten.select_scatter.default:
        return None
    base, value, dim, index = node.args
    last = node.meta["val"].dim() - 1
    is_created = any(word in str(base.target) for word in ("aten.new_zeros.", "aten.zeros."))
    is_part = dim in (last, -1) and known(node.meta["val"].shape[-1] == 2) and is_created
    is_joined = all("view_as_complex" in str(user.target) for user in node.users)
    if not (is_part and is_joined):
        return None
    return Pair(value, None) if index % 2 == 0 else Pair(None, value)


class _Splitting:
    """The split of one graph."""

    def __init__(self, graph: torch.fx.Graph) -> None:
        self.graph = graph
        values = [leaf for node in graph.nodes for leaf in tree_leaves(node.meta.get("val"))]
        self.mode = detect_fake_mode([value for value in values if isinstance(value, torch.Tensor)])
        self.loops: dict[Node, int] = {}
        """The loop of each value of one iteration."""
        self.lines: dict[int, int] = {}
        self.pairs: dict[Node, Pair] = {}
        """Complex values that were replaced."""
        self.as_real: dict[Node, Pair] = {}
        """Results of ``view_as_real``. Most readers need only one of the parts."""
        self.joined: dict[Node, Node] = {}
        """Both of these in memory, where something needs them there."""
        self.strided: set[Node] = set()
        """Real values that are dense here, but views of complex values in eager code."""
        self.views: dict[Node, Any] = {}
        """The arguments of ``select`` that made them."""
        self.slots: dict[int, list[int]] = {}
        """The new number of each state of a loop."""

    def run(self) -> None:
        """Replace all complex values of the graph."""
        self._number_states()
        for node in list(self.graph.nodes):
            self._note_changing(node)
            if node.op == "output" or not self._replace(node):
                self._read_joined(node)
                self._lay_out(node)
        for node in reversed(list(self.graph.nodes)):
            if not node.users and (node in self.pairs or node in self.as_real) and node.op == "call_function":
                self.graph.erase_node(node)

    def _note_changing(self, node: Node) -> None:
        mark = _mark(node)
        if mark in ("enter", "read", "index"):
            self.loops[node] = node.args[1]
        elif not mark:
            of_inputs = [self.loops[each] for each in node.all_input_nodes if each in self.loops]
            if of_inputs:
                self.loops[node] = of_inputs[-1]

    def _number_states(self) -> None:
        for node in self.graph.nodes:
            if _mark(node) in ("leave", "reverse"):
                states, loop, numbers = node.args[0], node.args[5], list[int]()
                next_number = 0
                for state in states:
                    numbers.append(next_number)
                    next_number += 1 + _is_complex(state)
                self.slots[loop] = numbers
                self.lines[loop] = line_of(node)

    def _replace(self, node: Node) -> bool:
        """Replace a node that computes with complex values, if there is a way."""
        if node._erased or node in self.pairs or node in self.as_real:
            return True
        if node.op != "call_function":
            return False
        if _mark(node):
            self._replace_mark(node)
            return True
        if (pair := _scattered(node)) is not None:
            self.as_real[node] = pair
            return True
        if not (_is_complex(node) or any(_is_complex(item) or item in self.as_real for item in node.all_input_nodes)):
            return False
        if "_assert_tensor_metadata" in str(node.target):
            self.graph.erase_node(node)
            return True
        e = Emitter(self.mode, node)
        result = self._operation(e, node)
        if result is NotImplemented:
            if node in self.loops and any(map(_is_complex, (node, *node.all_input_nodes))):
                word, line = str(node.target).split(".")[1], self.lines.get(self.loops[node], 0)
                raise OutsideLoop(f"its body contains {word} of complex numbers, which no kernel computes", line)
            return False
        if isinstance(result, Pair) and isinstance(node.meta["val"], torch.Tensor) and _is_complex(node):
            result = e.fitted(result, node.meta["val"])
        self._set(e, node, result)
        return True

    def _set(self, e: Emitter, node: Node, result: Any) -> None:
        if isinstance(result, Pair):
            (self.pairs if _is_complex(node) else self.as_real)[node] = result
            for part, ending in zip(result, ENDINGS, strict=True):
                if is_node(part):
                    part.meta.setdefault(PART, ending)
            return
        value, like = result.meta["val"], node.meta["val"]
        if isinstance(like, torch.Tensor) and value.dtype != like.dtype:
            result = e(aten._to_copy.default, result, dtype=like.dtype)
        if isinstance(like, torch.Tensor) and not same_strides(value, like):
            if node.target is aten.select.int and node.args[0] in self.as_real:
                self.views[result] = node.args
            self._note_strides(e, node, result)
        node.replace_all_uses_with(result)
        self.graph.erase_node(node)

    def _note_strides(self, e: Emitter, node: Node, part: Node) -> None:
        """Note that a real value, which is a view of a complex one in eager code, is dense here. Results stay such views."""
        self.strided.add(node)
        self.strided.add(part)
        for user in [each for each in node.users if each.op == "output"]:
            if part not in self.views:
                raise NotKept("the target returns a view of a complex tensor")
            source, *rest = self.views[part]
            user.replace_input_with(node, e(aten.select.int, self._seen(e, source), *rest))

    def _lay_out(self, node: Node) -> None:
        """Compute the strides of a real value from those of the parts that it reads."""
        if node.op != "call_function" or not any(each in self.strided for each in node.all_input_nodes):
            return
        e = Emitter(self.mode, node)
        value, before = e.value(node), node.meta.get("val")
        if isinstance(value, torch.Tensor) and same_strides(value, before):
            return
        node.meta["val"] = value
        if node.target in (aten.detach.default, aten.alias.default) and node.args[0] in self.views:
            self.views[node] = self.views[node.args[0]]
        self._note_strides(e, node, node)

    # Operations ---------------------------------------------------------------------------------------------------

    def _operation(self, e: Emitter, node: Node) -> Any:
        target, kwargs = node.target, dict(node.kwargs)
        if target is operator.getitem:
            source = self.pairs.get(node.args[0]) or self.as_real.get(node.args[0])
            if source is None:
                return NotImplemented
            return Pair(*(None if part is None else e(operator.getitem, part, node.args[1]) for part in source))
        if not isinstance(target, torch._ops.OpOverload) or target.namespace != "aten":
            return NotImplemented
        name = target.__name__.split(".")[0]
        if name == "new_zeros":
            dtype = real_dtype(node.meta["val"].dtype)
            zeros = e(aten.zeros.default, node.args[1], dtype=dtype, device=node.meta["val"].device)
            return Pair(zeros, None) if _is_complex(node) else zeros
        if name in CREATING and _is_complex(node):
            args = tuple(self._real_part(e, item) for item in node.args)
            return created(e, target, args, kwargs, node.meta["val"].dtype)
        if name in CREATING or name.startswith("sym_"):
            if name in CREATING:
                kwargs["dtype"] = node.meta["val"].dtype
            return e(target, *(self._real_part(e, item) for item in node.args), **kwargs)
        if name == "view_as_real":
            return self._pair(e, node.args[0])
        if name == "view_as_complex":
            return self._of_pairs_in_memory(e, node.args[0])
        if node.all_input_nodes and all(item in self.as_real for item in node.all_input_nodes):
            return self._of_real_view(e, node, name)
        args = tuple(self._operand(e, item) for item in node.args)
        if name in OPERATIONS:
            return OPERATIONS[name](e, *args, **{key: self._operand(e, item) for key, item in kwargs.items()})
        if name in PRODUCTS:
            return matrix_product(e, target, *args)
        if name == "_to_copy":
            return self._converted(e, node, args[0], kwargs)
        if name in PER_PART and isinstance(args[0], Pair) and not any(isinstance(item, Pair) for item in args[1:]):
            kwargs = {key: item for key, item in kwargs.items() if key != "dtype"}
            return of_each(e, target, [args[0]], lambda number: ((args[0][number], *args[1:]), kwargs))
        if name in SEVERAL and _is_complex(node):
            return self._several(e, node, args, kwargs)
        return NotImplemented

    def _several(self, e: Emitter, node: Node, args: Any, kwargs: Any) -> Any:
        first = 1 if node.target.__name__.startswith("where") else 0

        def operands(items: Any) -> Any:
            return [self._as_pair(item, name) if i >= first else item for i, item in enumerate(items)]

        name = node.target.__name__.split(".")[0]
        if name in ("cat", "stack"):
            pairs = operands(args[0])
            return of_each(
                e, node.target, pairs, lambda n: (([self._part(e, item, n) for item in pairs], *args[1:]), kwargs)
            )
        pairs = operands(args)
        data = [item for item in pairs if isinstance(item, Pair)]
        return of_each(e, node.target, data, lambda n: (tuple(self._part(e, item, n) for item in pairs), kwargs))

    def _as_pair(self, item: Any, name: str) -> Any:
        if name == "where" and isinstance(item, (int, float)):
            return Pair(item, 0.0)
        is_data = is_node(item) and isinstance(value_of(item), torch.Tensor) and value_of(item).is_floating_point()
        return Pair(item, None) if is_data else item

    def _part(self, e: Emitter, item: Any, number: int) -> Any:
        if not isinstance(item, Pair):
            return item
        return e.both(item)[number]

    def _converted(self, e: Emitter, node: Node, x: Any, kwargs: Any) -> Any:
        dtype, pair = node.meta["val"].dtype, pair_of(x)
        rest = {key: item for key, item in kwargs.items() if key != "dtype"}
        if not dtype.is_complex:
            return e(aten._to_copy.default, e.both(pair).re, dtype=dtype, **rest)
        parts = (
            None if part is None else e(aten._to_copy.default, part, dtype=dtype.to_real(), **rest) for part in pair
        )
        return Pair(*parts)

    def _of_pairs_in_memory(self, e: Emitter, source: Node) -> Pair:
        """``view_as_complex(source)``."""
        if source in self.as_real:
            return self.as_real[source]
        last = source.meta["val"].dim() - 1
        return Pair(*(e(aten.select.int, source, last, number) for number in (0, 1)))

    def _of_real_view(self, e: Emitter, node: Node, name: str) -> Any:
        """An operation on the result of ``view_as_real``."""
        source = node.args[0]
        pair, last = self.as_real[source], source.meta["val"].dim() - 1
        if name == "select" and node.args[1] in (last, -1):
            return self._part(e, pair, node.args[2] % 2)
        keeps = name in ("clone", "detach", "alias", "_neg_view", "neg", "contiguous", "resolve_neg")
        if not keeps and (name not in ("select", "slice") or not 0 <= node.args[1] < last):
            return NotImplemented
        target = aten.neg.default if name == "_neg_view" else node.target
        return of_each(e, target, [pair], lambda number: ((pair[number], *node.args[1:]), node.kwargs))

    # Marks of loops -----------------------------------------------------------------------------------------------

    def _replace_mark(self, node: Node) -> None:
        mark, e = _mark(node), Emitter(self.mode, node)
        if mark in ("leave", "reverse"):
            self._replace_end(e, node)
            return
        source, *rest = node.args
        if mark == "enter":
            rest[1] = self.slots[rest[0]][rest[1]] if rest[0] in self.slots else rest[1]
        if mark == "index" or not (_is_complex(source) or source in self.as_real):
            node.args = (self._real_part(e, source) if _is_complex(source) else source, *rest)
            return
        if source in self.as_real and (mark != "stack" or rest[0] >= node.meta["val"].dim() - 1):
            node.args = (self._seen(e, source), *rest)
            return
        pair = e.both(self._pair(e, source) if _is_complex(source) else self.as_real[source])
        parts = []
        for number, (part, ending) in enumerate(zip(pair, ENDINGS, strict=True)):
            given = list(rest)
            if mark == "enter":
                given[1:] = [given[1] + number, f"{given[2]}_{ending}"]
            parts.append(e(node.target, part, *given))
        self._set(e, node, Pair(*parts))

    def _replace_end(self, e: Emitter, node: Node) -> None:
        """Replace the end of a loop: its results are tuples of parts."""
        states, initial, rows, bases, further, *rest = node.args
        dims, firsts, steps = rest[-3:]
        new_states, new_initial = self._lists(e, (states, initial))
        new_rows, new_bases = self._lists(e, (rows, bases))
        (new_further,) = self._lists(e, (further,))
        repeated = [
            [item for item, group in zip(items, new_rows, strict=True) for _ in group]
            for items in (dims, firsts, steps)
        ]
        results = [*new_states, *new_rows, *(new_further if _mark(node) == "leave" else ())]
        flat = [
            [item for group in part for item in group]
            for part in (new_states, new_initial, new_rows, new_bases, new_further)
        ]
        new = e(node.target, *flat, *rest[:-3], *repeated)
        groups: list[list[Node]] = []
        """The new results, by the old ones."""
        number = 0
        for group in results:
            groups.append([e(operator.getitem, new, number + i) for i in range(len(group))])
            number += len(group)
        for user in list(node.users):
            parts = groups[user.args[1]]
            if len(parts) == 1:
                user.replace_all_uses_with(parts[0])
                self.graph.erase_node(user)
            else:
                (self.pairs if _is_complex(user) else self.as_real)[user] = Pair(*parts)
        self.pairs[node] = Pair(new, None)

    def _lists(self, e: Emitter, lists: Sequence[Sequence[Node]]) -> Iterator[list[list[Node]]]:
        """Lists of nodes with the parts of each; a complex value in one list has two parts in all."""
        is_pair = [any(map(_is_complex, items)) for items in zip(*lists, strict=True)]
        for items in lists:
            result: list[list[Node]] = []
            for item, has_parts in zip(items, is_pair, strict=True):
                if has_parts:
                    result.append(list(e.both(self._pair(e, item) if _is_complex(item) else Pair(item, None))))
                elif len(lists) == 1 and item in self.as_real:
                    result.append(list(e.both(self.as_real[item])))
                else:
                    result.append([self._seen(e, item) if item in self.as_real else item])
            yield result

    # Complex values and their parts -------------------------------------------------------------------------------

    def _pair(self, e: Emitter, node: Node) -> Pair:
        """The parts of a complex value."""
        if node not in self.pairs:
            # Torch does not always know in which layout its operations return complex values.
            is_input = node.op == "placeholder"
            dense = node if is_input else e(aten.clone.default, node, memory_format=torch.contiguous_format)
            seen = e(aten.view_as_real.default, dense)
            last = seen.meta["val"].dim() - 1
            self.pairs[node] = Pair(*(e(aten.select.int, seen, last, number) for number in (0, 1)))
            self.joined[node] = node
        return self.pairs[node]

    def _operand(self, e: Emitter, item: Any) -> Any:
        if isinstance(item, (list, tuple)):
            return type(item)(self._operand(e, each) for each in item)
        if isinstance(item, complex):
            return pair_of(item)
        if not is_node(item):
            return item
        if _is_complex(item):
            return self._pair(e, item)
        return self._seen(e, item) if item in self.as_real else item

    def _real_part(self, e: Emitter, item: Any) -> Any:
        """A node with the sizes of a value."""
        if is_node(item) and _is_complex(item):
            return self._part(e, self._pair(e, item), 0)
        return self._seen(e, item) if is_node(item) and item in self.as_real else item

    def _seen(self, e: Emitter, node: Node) -> Node:
        """The result of ``view_as_real`` in memory."""
        if node not in self.joined:
            pair = e.both(self.as_real[node])
            self.joined[node] = e(aten.stack.default, list(pair), -1)
        return self.joined[node]

    def _read_joined(self, node: Node) -> None:
        """Let a node that stays read complex values in memory."""
        e = Emitter(self.mode, node)

        def in_memory(item: Any) -> Any:
            if not is_node(item):
                return item
            if item in self.as_real:
                return self._seen(e, item)
            if item not in self.pairs:
                return item
            if item not in self.joined:
                self.joined[item] = e(aten.complex.default, *e.both(self.pairs[item]))
            return self.joined[item]

        node.args = tree_map(in_memory, tuple(node.args))
        node.kwargs = tree_map(in_memory, dict(node.kwargs))
