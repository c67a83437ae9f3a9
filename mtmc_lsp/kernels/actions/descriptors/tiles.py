"""Block pointers of a kernel, with all their uses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tree_sitter import Node

from mtmc_lsp.kernels.actions.base import Facts, assignment_of, loops_of
from mtmc_lsp.source.lint.kernel import argument, names_in
from mtmc_lsp.source.syntax import field, text_of, walk


@dataclass(frozen=True)
class Tile:
    """A block pointer with all its uses."""

    name: str
    pointer: str
    """The parameter that it points into."""
    creation: Node
    """The statement."""
    base: Node
    shape: tuple[Node, Node]
    strides: tuple[Node, Node]
    offsets: tuple[Node, Node]
    block: tuple[Node, Node]
    is_swapped: bool
    """Whether the first dimension is the one with contiguous elements."""
    loads: tuple[Node, ...]
    stores: tuple[Node, ...]
    """The statements."""
    advances: tuple[tuple[Node, Node, Node], ...]
    """The statements, with the steps of both dimensions."""
    types: tuple[Node, ...]
    """Places that read the type of the elements as ``name.dtype``."""

    def moves(self, dimension: int) -> bool:
        """Whether it advances along a dimension."""
        return any(text_of(step[1 + dimension]) != "0" for step in self.advances)

    def index(self, dimension: int) -> str:
        """The offset of a dimension where a tile is read or written."""
        return self.variable(dimension) if self.moves(dimension) else text_of(self.offsets[dimension])

    def variable(self, dimension: int) -> str:
        """The variable that holds the offset of a dimension."""
        return f"{self.name}_{('row', 'column')[dimension]}"

    @property
    def place(self) -> str:
        """The offsets of the tile in the order of the descriptor."""
        return f"[{self.ordered([self.index(0), self.index(1)])}]"

    def ordered(self, texts: Sequence[str]) -> str:
        """Texts of both dimensions in the order of the descriptor."""
        return ", ".join(reversed(texts) if self.is_swapped else texts)


def block_tile(facts: Facts, name: str) -> Tile | None:
    """A block pointer of two dimensions; None for other names, and if it is used otherwise."""
    kernel = facts.site.kernel
    made, advances = list[tuple[Node, Node]](), list[tuple[Node, Node, Node]]()
    for statement in walk(kernel.body):
        pair = assignment_of(statement) if statement.type == "expression_statement" else None
        if pair is None or text_of(pair[0]) != name:
            continue
        function = kernel.triton_name(field(pair[1], "function")) if pair[1].type == "call" else ""
        if function == "make_block_ptr":
            made.append((statement, pair[1]))
        elif function == "advance" and text_of(argument(pair[1], 0, "base")) == name:
            steps = _pair(argument(pair[1], 1, "offsets"))
            if steps is None:
                return None
            advances.append((statement, *steps))
        else:
            return None
    if len(made) != 1 or any(True for _ in kernel.enclosing.ancestors(made[0][0], "if_statement", "while_statement")):
        return None
    creation, call = made[0]
    base, order = argument(call, 0, "base"), _pair(argument(call, 5, "order"))
    parts = [_pair(argument(call, i, n)) for i, n in enumerate(("shape", "strides", "offsets", "block_shape"), 1)]
    shape, strides, offsets, block = parts
    if base is None or order is None or shape is None or strides is None or offsets is None or block is None:
        return None
    uses = _uses(facts, name, creation, [item[0] for item in advances])
    pointer = _pointer(facts, base)
    if uses is None or not pointer:
        return None
    is_swapped = [text_of(item) for item in order] == ["0", "1"]
    tile = Tile(
        name,
        pointer,
        creation,
        base,
        shape,
        strides,
        offsets,
        block,
        is_swapped,
        uses[0],
        uses[1],
        tuple(advances),
        uses[2],
    )
    taken = {*kernel.parameters, *kernel.values}
    variables = {tile.variable(i) for i in (0, 1) if tile.moves(i)}
    return tile if not variables & taken and _is_stable(facts, tile) else None


def _pair(node: Node | None) -> tuple[Node, Node] | None:
    """The two items of a tuple or list."""
    items = [i for i in node.named_children if i.type != "comment"] if node is not None else []
    return (items[0], items[1]) if node is not None and node.type in ("tuple", "list") and len(items) == 2 else None


def _uses(
    facts: Facts, name: str, creation: Node, advances: Sequence[Node]
) -> tuple[tuple[Node, ...], tuple[Node, ...], tuple[Node, ...]] | None:
    """The loads, the statements of stores and the places that read the type; None if there are other uses."""
    kernel, loads, stores, types = facts.site.kernel, list[Node](), list[Node](), list[Node]()
    assigned = [creation, *advances]
    for node in walk(kernel.body):
        if node.type != "identifier" or text_of(node) != name:
            continue
        if any(contains(statement, node) for statement in assigned):
            continue
        parent = node.parent
        if parent is None:
            return None
        if parent.type == "attribute" and text_of(parent) == f"{name}.dtype":
            if text_of(parent.parent) != f"{name}.dtype.element_ty":
                return None
            types.append(parent)
            continue
        call = parent.parent if parent.type == "argument_list" else None
        function = kernel.triton_name(field(call, "function")) if call is not None and call.type == "call" else ""
        if call is None or argument(call, 0, "pointer") != node or not _is_whole(call, function):
            return None
        statement = call.parent
        if function == "load":
            loads.append(call)
        elif function == "store" and statement is not None and statement.type == "expression_statement":
            stores.append(statement)
        else:
            return None
    return tuple(loads), tuple(stores), tuple(types)


def _is_whole(call: Node, function: str) -> bool:
    """Whether an access has no arguments that a descriptor lacks."""
    arguments = field(call, "arguments")
    items = [i for i in arguments.named_children if i.type != "comment"] if arguments is not None else []
    keywords = {text_of(field(i, "name")): text_of(field(i, "value")) for i in items if i.type == "keyword_argument"}
    positional = [item for item in items if item.type != "keyword_argument"]
    padding = keywords.get("padding_option", "'zero'").strip("\"'")
    return (
        len(positional) == (2 if function == "store" else 1)
        and keywords.keys() <= {"boundary_check", "padding_option"}
        and padding in ("", "zero")
    )


def _pointer(facts: Facts, base: Node) -> str:
    """The parameter at the left end of a sum, if the kernel does not assign it."""
    names = facts.site.bases(base)
    return names[0] if len(names) == 1 and names[0] not in facts.site.kernel.values else ""


def _is_stable(facts: Facts, tile: Tile) -> bool:
    """Whether the descriptor can be made above the loops, and offsets have the same values where tiles are accessed."""
    outer = outermost_loop(facts, tile)
    fixed = [tile.base, *tile.shape, *tile.strides, *tile.block]
    places = _assigned_places(facts)
    start = outer.start_byte if outer is not None else tile.creation.start_byte
    if any(place >= start for node in fixed for name in names_in(node) for place in places.get(name, ())):
        return False
    loops = [loop for loop in loops_of(facts.site) if contains(loop, tile.creation)]
    inner = loops[-1] if loops else None
    accesses = (*tile.loads, *tile.stores)
    if inner is not None and (tile.advances or not all(contains(inner, access) for access in accesses)):
        return False
    variables = {name for loop in loops for name in names_in(field(loop, "left") or loop)}
    for dimension in (0, 1):
        names = set(names_in(tile.offsets[dimension])) - variables
        later = [place for name in names for place in places.get(name, ()) if place > tile.creation.start_byte]
        if later and not tile.moves(dimension):
            return False
    return True


def _assigned_places(facts: Facts) -> dict[str, list[int]]:
    """Where each name is assigned, loop variables included."""
    places: dict[str, list[int]] = {}
    for node in walk(facts.site.kernel.body):
        left = None
        if node.type in ("assignment", "augmented_assignment", "for_statement"):
            left = field(node, "left")
        elif node.type == "named_expression":
            left = field(node, "name")
        for item in walk(left) if left is not None else ():
            if item.type == "identifier":
                places.setdefault(text_of(item), []).append(item.start_byte)
    return places


def outermost_loop(facts: Facts, tile: Tile) -> Node | None:
    """The outermost loop around the creation of a block pointer."""
    return next((loop for loop in loops_of(facts.site) if contains(loop, tile.creation)), None)


def is_read_in_loop(facts: Facts, tile: Tile) -> bool:
    """Whether a loop loads by a block pointer."""
    return any(contains(loop, load) for loop in loops_of(facts.site) for load in tile.loads)


def contains(node: Node, other: Node) -> bool:
    """Whether a node contains another one."""
    return node.start_byte <= other.start_byte and other.end_byte <= node.end_byte
