"""*Fuse* two elementwise launches: statements of the second kernel follow those of the first, without a tensor between them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from tree_sitter import Node

from mtmc_lsp.kernels.actions.base import Facts, Proposal, indent_at
from mtmc_lsp.kernels.actions.fusion.launcher import (
    LAUNCH_US,
    OneLaunch,
    assignment_in,
    is_created,
    is_description,
    is_label,
    occurrences,
    one_launch,
)
from mtmc_lsp.kernels.repairs.site import Edit, Site, replaced, sites_of
from mtmc_lsp.source.lint.kernel import argument
from mtmc_lsp.source.syntax import field as child
from mtmc_lsp.source.syntax import line_end, line_of, line_start, text_of, walk

LANES = frozenset(
    "load store program_id num_programs arange cdiv where maximum minimum abs exp exp2 log log2 sqrt sqrt_rn rsqrt sin cos erf "
    "sigmoid floor ceil fma div_rn fdiv clamp multiple_of max_contiguous cast".split()
)
"""Functions of Triton that compute each lane from the same lane, or scalars."""
NARROW = {"*fp16": "float16", "*bf16": "bfloat16"}


@dataclass
class _Merged:
    """The statements of the second kernel in the names of the first one."""

    names: dict[str, str]
    """Names of the second kernel to expressions of the first one."""
    lines: list[str] = field(default_factory=list)


def fuse_launches(facts: Facts) -> Iterator[Proposal]:
    """A kernel whose result only the next launch reads, element by element.

    Legal if both kernels consist of assignments and stores, run on the same grid with the same block sizes, and the second one
    loads with the pointer and mask of the first one's only store; if the tensor in between is new and used by nothing else;
    and if the second kernel writes to no tensor that the first one reads.
    """
    first = one_launch(facts)
    if first is None or not _is_plain(facts.site):
        return
    for position in range(first.position + 1, len(first.statements)):
        statement = first.statements[position]
        second = _launch_in(facts, statement)
        if second is not None:
            yield from _fused(facts, first, second, position)
            return
        pair = assignment_in(statement)
        if pair is None or not is_created(pair[1]) or text_of(pair[0]) in _names_of(first.launch.call):
            return


def _launch_in(facts: Facts, statement: Node) -> Site | None:
    """The kernel that a statement launches, if that is its only launch."""
    for site in sites_of("", facts.site.text):
        if len(site.launches) == 1 and site.kernel.name != facts.name and statement.type == "expression_statement":
            call = site.launches[0].call
            if text_of(statement) == text_of(call) and statement.start_byte == call.start_byte:
                return site if _is_plain(site) else None
    return None


def _is_plain(site: Site) -> bool:
    """Whether a kernel is a list of assignments and stores, without an autotuner or heuristics."""
    statements = [item for item in site.kernel.body.named_children if item.type != "comment"]
    if statements and text_of(statements[0]).startswith(('"', "'")):
        # A docstring
        statements = statements[1:]
    is_plain = all(_assigned(item) is not None or _store(site, item) is not None for item in statements)
    calls = [child(node, "function") for node in walk(site.kernel.body) if node.type == "call"]
    by_lanes = all(site.kernel.triton_name(each) in LANES or text_of(each).endswith(".to") for each in calls)
    return is_plain and by_lanes and bool(statements) and len(site.kernel.decorators) == 1


def _assigned(statement: Node) -> tuple[Node, Node] | None:
    pair = assignment_in(statement)
    return pair if pair is not None and pair[0].type == "identifier" else None


def _store(site: Site, statement: Node) -> Node | None:
    call = statement.named_children[0] if statement.type == "expression_statement" else None
    is_store = call is not None and call.type == "call" and site.kernel.triton_name(child(call, "function")) == "store"
    return call if is_store else None


def _fused(facts: Facts, first: OneLaunch, other: Site, position: int) -> Iterator[Proposal]:
    site, launch = facts.site, other.launches[0]
    stores = [(item, call) for item in site.kernel.body.named_children if (call := _store(site, item)) is not None]
    pointer = argument(stores[0][1], 0, "pointer") if len(stores) == 1 else None
    bases = site.bases(pointer) if pointer is not None else []
    if pointer is None or len(bases) != 1 or not _have_equal_grids(first, launch.call):
        return
    parameter = bases[0]
    between = first.passed.get(parameter)
    if between is None or between.type != "identifier" or first.is_shared(parameter):
        return
    passed = launch.passed(other.kernel)
    reading = [name for name, node in passed.items() if text_of(between) in _names_of(node)]
    tensor = text_of(between)
    if len(reading) != 1 or text_of(passed[reading[0]]) != tensor or not _is_between(first, position, tensor):
        return
    written = {
        name for name, call in other.accesses if name == "store" for name in other.bases(argument(call, 0, "") or call)
    }
    if any(_names_of(passed[name]) & _names_of(first.launch.call) for name in written if name in passed):
        return
    merged = _merged(facts, first, other, stores[0][1], reading[0])
    new = _parameters(facts, first, other, merged, reading[0]) if merged is not None else None
    edits = _edits(first, position, parameter, new) if new is not None else None
    if merged is None or edits is None:
        return
    indent = indent_at(site.text, stores[0][0])
    body = f"\n{indent}".join(merged.lines)
    moved = float(max((access.tensor_bytes for access in facts.accesses if access.tensor == parameter), default=0))
    yield Proposal(
        "fuse",
        facts.name,
        f"Compute {other.kernel.name} in the same launch",
        (replaced(stores[0][0], body), *edits),
        line_of(stores[0][0]),
        f"{tensor} is written and read again only to pass it from one kernel to the next",
        facts.memory_us(2.0 * moved) + LAUNCH_US,
        facts.moved + moved,
        max(0.0, facts.moved - moved),
    )


def _have_equal_grids(first: OneLaunch, call: Node) -> bool:
    grids = [child(child(each, "function"), "subscript") for each in (first.launch.call, call)]
    return " ".join(text_of(grids[0]).split()) == " ".join(text_of(grids[1]).split())


def _is_between(first: OneLaunch, position: int, tensor: str) -> bool:
    """Whether a tensor is new, and its elements are used by the two launches alone."""
    made = [pair for s in first.before if (pair := assignment_in(s)) is not None and text_of(pair[0]) == tensor]
    if len(made) != 1 or not is_created(made[0][1]):
        return False
    uses = [
        (i, item)
        for i, statement in enumerate(first.statements)
        for item in occurrences(statement, tensor)
        if not is_description(item) and item != made[0][0]
    ]
    return [i for i, _ in uses] == [first.position, position]


def _merged(facts: Facts, first: OneLaunch, other: Site, store: Node, reading: str) -> _Merged | None:
    """The statements of the second kernel after those of the first one; None if they do not fit."""
    site = facts.site
    passed = other.launches[0].passed(other.kernel)
    same = {text_of(node): name for name, node in first.passed.items()}
    merged = _Merged(
        {name: same[text_of(node)] for name, node in passed.items() if text_of(node) in same and name != reading}
    )
    values = {
        " ".join(text_of(nodes[0]).split()): name for name, nodes in site.kernel.values.items() if len(nodes) == 1
    }
    taken = {*site.kernel.parameters, *site.kernel.values}
    result = _result_lines(facts, store, taken)
    merged.lines += result[1]
    for statement in other.kernel.body.named_children:
        pair = _assigned(statement)
        if pair is None:
            call = _store(other, statement)
            if call is not None and _mask(call, 2, merged.names) != _mask(store, 2, {}):
                # Lanes outside the mask have other values now.
                return None
            if call is not None:
                merged.lines.append(renamed(statement, merged.names))
            continue
        name, value = text_of(pair[0]), renamed(pair[1], merged.names)
        loaded = argument(pair[1], 0, "pointer") if pair[1].type == "call" else None
        if loaded is not None and other.bases(loaded) == [reading]:
            if not _is_load_of(store, pair[1], reading, merged.names, site) or name in merged.names:
                return None
            merged.names[name] = result[0]
        elif " ".join(value.split()) in values and name not in merged.names:
            merged.names[name] = values[" ".join(value.split())]
        else:
            new = name if name not in taken or name in merged.names else _free(name, taken)
            merged.names[name] = new
            taken.add(new)
            merged.lines.append(f"{new} = {value}")
    uses_tensor = any(reading in _names_of(value) for values_ in other.kernel.values.values() for value in values_)
    is_loaded = any(name == result[0] for name in merged.names.values())
    pointers = [call for name, call in other.accesses if reading in other.bases(argument(call, 0, "pointer") or call)]
    return merged if is_loaded and len(pointers) == 1 and uses_tensor else None


def _result_lines(facts: Facts, store: Node, taken: set[str]) -> tuple[str, list[str]]:
    """The name of what the first kernel stores, and the lines that it needs: values are rounded as in memory."""
    value = argument(store, 1, "value")
    bases = facts.site.bases(argument(store, 0, "pointer") or store)
    kinds = {work.launch.signature.get(bases[0], "") for work in facts.launches}
    kind = NARROW.get(next(iter(kinds)), "") if len(kinds) == 1 else ""
    if value is not None and value.type == "identifier" and not kind:
        return text_of(value), []
    name = _free("result", taken)
    taken.add(name)
    language = text_of(child(store, "function")).rpartition(".")[0]
    text = f"({text_of(value)}).to({language}.{kind})" if kind else text_of(value)
    return name, [f"{name} = {text}"]


def _is_load_of(store: Node, load: Node, reading: str, names: Mapping[str, str], site: Site) -> bool:
    """Whether a load reads exactly the elements that a store wrote."""
    bases = site.bases(argument(store, 0, "pointer") or store)
    written, read = argument(store, 0, "pointer"), argument(load, 0, "pointer")
    if written is None or read is None:
        return False
    same_place = _flat(renamed(read, {**names, reading: bases[0]})) == _flat(text_of(written))
    return same_place and _mask(load, 1, names) == _mask(store, 2, {})


def _mask(call: Node, position: int, names: Mapping[str, str]) -> str:
    mask = argument(call, position, "mask")
    return _flat(renamed(mask, names)) if mask is not None else ""


def _parameters(
    facts: Facts, first: OneLaunch, other: Site, merged: _Merged, reading: str
) -> list[tuple[str, str, str]] | None:
    """New parameters of the first kernel: name, declaration, argument; None if one cannot be added."""
    taken = {*facts.site.kernel.parameters, *facts.site.kernel.values}
    passed, new = other.launches[0].passed(other.kernel), []
    for name, parameter in other.kernel.parameters.items():
        if name == reading or name in merged.names:
            continue
        if parameter.is_constexpr or parameter.default or name in taken or name not in passed:
            return None
        new.append((name, text_of(parameter.node), text_of(passed[name])))
    return new or None


def _edits(first: OneLaunch, position: int, parameter: str, new: list[tuple[str, str, str]]) -> list[Edit] | None:
    """The edits of the parameters and of the launches: new arguments take the place of the tensor in between."""
    text, node = first.facts.site.text, first.facts.site.kernel.parameters[parameter].node
    given = first.passed[parameter]
    parent = given.parent
    is_keyword = parent is not None and parent.type == "keyword_argument"
    arguments = ", ".join(f"{name}={value}" if is_keyword else value for name, _, value in new)
    place = parent if is_keyword and parent is not None else given
    launch, second = first.statements[first.position], first.statements[position]
    for statement in (launch, second):
        line = text[line_start(text, statement.start_byte) : line_end(text, statement.end_byte)].decode()
        if line.strip() != text_of(statement).strip():
            return None
    call = text_of(launch)
    start = place.start_byte - launch.start_byte
    moved = call.encode()[:start] + arguments.encode() + call.encode()[start + place.end_byte - place.start_byte :]
    return [
        replaced(node, ", ".join(declaration for _, declaration, _ in new)),
        Edit(line_start(text, launch.start_byte), line_end(text, launch.end_byte), ""),
        replaced(second, moved.decode()),
    ]


def renamed(node: Node, names: Mapping[str, str]) -> str:
    """The text of a node with other names of variables."""
    source, pieces, at = (node.text or b""), list[bytes](), 0
    for item in walk(node):
        new = names.get(text_of(item)) if item.type == "identifier" and not is_label(item) else None
        if new is not None:
            start = item.start_byte - node.start_byte
            pieces += [source[at:start], new.encode()]
            at = item.end_byte - node.start_byte
    return b"".join([*pieces, source[at:]]).decode()


def _flat(text: str) -> str:
    return "".join(text.split())


def _free(name: str, taken: set[str]) -> str:
    return next(each for each in (name, *(f"{name}_{i}" for i in range(1, 100))) if each not in taken)


def _names_of(node: Node) -> set[str]:
    return {text_of(item) for item in walk(node) if item.type == "identifier" and not is_label(item)}
