"""*Autotune* of kernels that have an autotuner: further configurations near those of the author."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from tree_sitter import Node

from mtmc_lsp.kernels.actions.base import Facts, Proposal
from mtmc_lsp.kernels.actions.signatures import module_prefix
from mtmc_lsp.kernels.actions.tuning.blocks import ORDERED
from mtmc_lsp.kernels.actions.tuning.computed import computed_configurations
from mtmc_lsp.kernels.actions.tuning.configuration import EXPECTED, OPTIONS, Configuration
from mtmc_lsp.kernels.actions.tuning.pruning import is_spread, stages_matter
from mtmc_lsp.kernels.repairs.site import Edit
from mtmc_lsp.source.lint.kernel import argument
from mtmc_lsp.source.syntax import field, line_of, line_start, text_of, walk

MOST_FURTHER = 8
LEAST_BLOCK, MOST_WARPS, MOST_STAGES = 16, 16, 6


@dataclass(frozen=True)
class _Tuner:
    """The configurations in a decorator."""

    node: Node
    """The expression with all of them."""
    known: tuple[Configuration, ...]
    """All of them; empty if the text does not tell them."""


def more_configurations(facts: Facts) -> Iterator[Proposal]:
    """Configurations with other warps and stages, and on a GPU other block sizes, in the author's autotuner.

    Legal if the present ones are written out or computed as a list. A block size may change if the author's configurations
    differ in it: then the grid and the masks fit several sizes. New sizes are proposed only where a GPU runs each of them.
    """
    prefix, tuner = module_prefix(facts), _tuner(facts)
    if tuner is None or not prefix or not facts.launches:
        return
    added = _further(facts, tuner.known or (_launched(facts),))
    if not added:
        return
    yield Proposal(
        "autotune",
        facts.name,
        "Tune further configurations",
        (_appended(facts, tuner, [item.text(prefix) for item in added]),),
        line_of(facts.site.kernel.node),
        "the author's configurations were chosen for other sizes, or another GPU",
        EXPECTED * facts.bound_us,
        needs_timing=True,
    )


def _tuner(facts: Facts) -> _Tuner | None:
    """The list of configurations; None if no decorator has one."""
    for decorator in facts.site.kernel.decorators:
        call = next((node for node in walk(decorator) if node.type == "call"), None)
        if call is None or not text_of(field(call, "function")).endswith("autotune"):
            continue
        node = argument(call, 0, "configs")
        if node is None or node.type not in ("list", "list_comprehension", "call", "identifier"):
            return None
        if node.type != "list":
            return _Tuner(node, computed_configurations(text_of(node), facts.site.text))
        items = [item for item in node.named_children if item.type != "comment"]
        known = [_written(item) for item in items]
        if any(item is None for item in known):
            return None
        return _Tuner(node, tuple(item for item in known if item is not None))
    return None


def _written(node: Node) -> Configuration | None:
    """A configuration that the text writes out, without hooks."""
    if node.type != "call" or not text_of(field(node, "function")).endswith("Config"):
        return None
    arguments = field(node, "arguments")
    items = [item for item in arguments.named_children if item.type != "comment"] if arguments is not None else []
    values = {text_of(field(i, "name")): field(i, "value") for i in items if i.type == "keyword_argument"}
    positional = [item for item in items if item.type != "keyword_argument"]
    blocks = positional[0] if len(positional) == 1 else values.pop("kwargs", None)
    if blocks is None or values.keys() - OPTIONS.keys():
        return None
    try:
        constants = ast.literal_eval(text_of(blocks))
        options = {name: int(ast.literal_eval(text_of(value))) for name, value in values.items()}
    except (ValueError, SyntaxError, TypeError):
        return None
    if not isinstance(constants, dict):
        return None
    return Configuration(tuple(constants.items()), *({**OPTIONS, **options}[name] for name in OPTIONS))


def _launched(facts: Facts) -> Configuration:
    """The present warps and stages, where the text computes the configurations; the constants stay unknown."""
    launch = facts.launches[0].launch
    return Configuration((), launch.num_warps, launch.num_stages)


def _further(facts: Facts, known: Sequence[Configuration]) -> list[Configuration]:
    """New configurations, those near the one in use first."""
    launch = facts.launches[0].launch
    if not known[0].blocks and len(known) == 1 and _needs_constants(facts):
        return []
    present = next((item for item in known if _is_launched(item, facts)), known[0])
    present = replace(present, warps=launch.num_warps, stages=launch.num_stages) if present in known else present
    centres = [present, *(item for item in known if item.blocks != present.blocks)]
    has_stages = stages_matter(facts)
    found: list[Configuration] = []
    for centre in centres[:3]:
        warps = [2 * centre.warps, centre.warps // 2]
        blocks = dict(centre.blocks)
        found += [replace(centre, warps=n) for n in warps if is_spread(facts, blocks, n, centre.warps)]
        if has_stages:
            found += [replace(centre, stages=stages) for stages in (centre.stages + 1, centre.stages - 1)]
        if facts.has_gpu:
            found += _other_blocks(facts, centre, known)
    allowed = [item for item in found if 1 <= item.warps <= MOST_WARPS and 1 <= item.stages <= MOST_STAGES]
    unique = [item for item in dict.fromkeys(allowed) if item not in known]
    most = min(MOST_FURTHER, facts.most_configs)
    if len(unique) > most:
        # Every kind of change stays represented.
        step = (len(unique) - 1) / (most - 1)
        unique = [unique[round(i * step)] for i in range(most)]
    return unique


def _needs_constants(facts: Facts) -> bool:
    """Whether the computed configurations set constants that no launch passes."""
    parameters = facts.site.kernel.parameters
    constants = [name for name, parameter in parameters.items() if parameter.is_constexpr]
    return not all(name in launch.passed(facts.site.kernel) for launch in facts.site.launches for name in constants)


def _is_launched(item: Configuration, facts: Facts) -> bool:
    return all(facts.constants.get(name) == value for name, value in item.blocks)


def _other_blocks(facts: Facts, centre: Configuration, known: Sequence[Configuration]) -> Iterator[Configuration]:
    """Configurations with one block size halved or doubled, up to twice the author's range."""
    if any(name in ORDERED for name, _ in facts.site.kernel.calls):
        return
    for name, value in centre.blocks:
        sizes = {dict(item.blocks).get(name) for item in known}
        numbers = [size for size in sizes if type(size) is int and size >= LEAST_BLOCK and not size & (size - 1)]
        if len(numbers) < 2 or len(numbers) != len(sizes) or type(value) is not int:
            continue
        for other in (2 * value, value // 2):
            if max(LEAST_BLOCK, min(numbers) // 2) <= other <= 2 * max(numbers):
                blocks = tuple((key, other if key == name else old) for key, old in centre.blocks)
                yield replace(centre, blocks=blocks)


def _appended(facts: Facts, tuner: _Tuner, texts: Sequence[str]) -> Edit:
    """The edit that adds configurations in the author's layout."""
    node, source = tuner.node, facts.site.text
    items = [item for item in node.named_children if item.type != "comment"]
    if node.type != "list" or not items:
        end = node.end_byte
        return Edit(end, end, " + [" + ", ".join(texts) + "]")
    last = items[-1]
    start = line_start(source, last.start_byte)
    lead = source[start : last.start_byte].decode()
    separator = f",\n{lead}" if not lead.strip() else ", "
    return Edit(last.end_byte, last.end_byte, "".join(separator + text for text in texts))
