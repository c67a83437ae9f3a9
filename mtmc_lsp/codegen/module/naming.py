"""Names in generated code, derived from the user's variables and operations."""

from __future__ import annotations

import keyword
import re
import unicodedata
from collections.abc import Sequence

from mtmc_lsp.core.graph import Ref
from mtmc_lsp.core.workload import Target
from mtmc_lsp.ir.primitives import KernelIR
from mtmc_lsp.schedule.launch_units import Unit

RESERVED = frozenset(
    "tl triton torch row rows group cols start first back offsets pid part parts piece outer PARTS grid "
    "BLOCK ROWS n_rows n_cols n_outer row_mask col_mask seed_ptr range self".split()
)
"""Names that every kernel may use for its own variables."""

NOUNS = {
    "sum": "total", "max": "maximum", "min": "minimum", "abs": "magnitude", "pow": "power", "round": "rounded",
    "all": "all_true", "any": "any_true",
}  # fmt: skip
"""Operations whose names would shadow Python builtins, and the names of their results."""

PRODUCT_NAMES = RESERVED | frozenset(
    "m n k m_mask n_mask k_mask batch acc acc_2 acc_3 blocks_m blocks_n first_m group_m step steps BLOCK_M BLOCK_N BLOCK_K "
    "GROUP_M kernel_position blocks_k in_crop largest factor inverse scaled high low address inside stored part leading "
    "PIECE ONE_PIECE packed_k packed_n DEPTH m_start n_start".split()
)
"""Names that matmul kernels use for their own variables."""

ATTENTION_NAMES = RESERVED | frozenset(
    "m n m_mask n_mask EVEN_M EVEN_N batch head width scores logits weights shrink acc row_max row_total new_max "
    "BLOCK_M BLOCK_N HEAD WIDTH first_query first_key end_key end_query edge_key at_edge largest log_total start "
    "PARTS part part_keys part_max row parts_ptr maxima_ptr totals_ptr".split()
)
"""Names that attention kernels use for their own variables."""
GRADIENT_NAMES = RESERVED | frozenset(
    "m n m_mask n_mask EVEN_M EVEN_N batch head width scores BLOCK_M BLOCK_N HEAD WIDTH first_query first_key end_key end_query "
    "start".split()
)
"""Names that kernels for gradients of an attention use for their own variables."""


class Names:
    """Generates names that are unique in their scope."""

    def __init__(self, used: frozenset[str] = RESERVED) -> None:
        self._used = set(used)
        self._last_suffix: dict[str, int] = {}
        """The last suffix number of each requested name; all smaller numbers are in use."""

    def unique(self, preferred: str) -> str:
        """Return ``preferred``, with a numeric suffix if it is in use."""
        base = identifier(preferred)
        name, number = base, self._last_suffix.get(base, 1)
        while name in self._used or keyword.iskeyword(name):
            number += 1
            name = f"{base}_{number}"
        self._last_suffix[base] = number
        self._used.add(name)
        return name


def identifier(text: str) -> str:
    """Convert ``text`` to an ASCII identifier: Triton's compiler fails on other letters."""
    name = re.sub(r"\W+", "_", "".join(_in_ascii(letter) for letter in text)).strip("_")
    return name if name and not name[0].isdigit() else f"v{name}"


def _in_ascii(letter: str) -> str:
    """The letter without accents; if that leaves nothing, its Unicode name, such as ``alpha``."""
    if letter.isascii():
        return letter
    plain = unicodedata.normalize("NFKD", letter).encode("ascii", "ignore").decode()
    return plain or unicodedata.name(letter, "_").rpartition(" ")[2].lower()


def value_name(ir: KernelIR, ref: Ref) -> str:
    """A name for a value: the user's variable if there is one, else derived from its role or its operation."""
    for item in ir.graph.sources:
        if item.name == ref.name:
            return item.name
    node = ir.graph.node(ref.name)
    if node.row_loop is not None:
        inner = node.row_loop.body.node(node.row_loop.body.outputs[ref.index].name)
        return inner.variable or NOUNS.get(inner.word, inner.word)
    if node.variable:
        return node.variable if len(node.outputs) == 1 else f"{node.variable}_{ref.index}"
    graph = ir.graph
    if ref in graph.results:
        return "out" if len(graph.results) == 1 else f"out_{graph.results.index(ref)}"
    if graph.backward is not None and ref in graph.gradients:
        return f"grad_{graph.backward.gradients[graph.gradients.index(ref)]}"
    if ref in graph.outputs:
        return f"new_{re.findall(r'[a-zA-Z_]+', graph.state_attributes[graph.outputs.index(ref) - len(graph.results)])[-1]}"
    if ref in ir.graph.written_inputs:
        return f"new_{ir.graph.written_inputs[ref]}"
    name = NOUNS.get(node.word, node.word)
    return name if len(node.outputs) == 1 else f"{name}_{ref.index}"


def base_name(target: Target, source: str) -> str:
    """Snake-case prefix of the generated names, chosen so that none of them exists in the user's file."""
    parts = [part for part in target.qualname.split(".") if part != "forward"]
    if target.region is not None:
        parts.append(f"region_{target.region.number}")
    snake_case = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", "_".join(parts)).lower()
    base = identifier(snake_case)
    while any(
        re.search(rf"\b{base}_{suffix}\b", source)
        for suffix in ("fits", "launch", "triton", "kernel", "cuda_graph", "tensors", "tables", "results", "up_to_date")
    ):
        base += "_mtmc"
    return base


def kernel_name(ir: KernelIR, unit: Unit, base: str, is_one_of_several: bool) -> str:
    """The preferred name of a kernel: after its last result, unless it computes the whole target."""
    assert unit.region is not None
    return (
        f"{base}_{identifier(value_name(ir, unit.region.outputs[-1]))}_kernel"
        if is_one_of_several
        else f"{base}_kernel"
    )


def launch_key(launch: Sequence[Unit]) -> str:
    """Identifies the kernel of a launch that several units share."""
    return "+".join(unit.nodes[-1] for unit in launch)
