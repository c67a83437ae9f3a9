"""The function that creates tables: tensors that depend only on sizes, computed once for each device and size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mtmc_lsp.codegen.kernel.snippets import call_text, def_lines
from mtmc_lsp.ir.constant_tables import may_be_kept
from mtmc_lsp.ir.primitives import KernelIR
from mtmc_lsp.ir.regions import VIEWS
from mtmc_lsp.schedule.launch_units import Unit

LEAST_KEPT = 2
"""The fewest operations for which a launcher gets a function that keeps their results, if it has none for other tables."""
MOST_TABLES = 4
"""Number of devices and sizes for which a target's tables are kept. They are never freed, since a CUDA graph may read them."""


@dataclass(frozen=True)
class TableFunction:
    """A function that returns tables."""

    source: str
    call: str
    results: Sequence[str]
    """Variables of the launcher that hold the tables."""


def kept_by_launcher(ir: KernelIR, units: Sequence[Sequence[Unit]]) -> frozenset[str]:
    """The cheap operations without inputs from outside that no kernel computes: as launches, they take longer than a lookup."""
    kept = may_be_kept(ir.graph) & {unit.nodes[-1] for launch in units for unit in launch if unit.plan is None}
    operations = sum(ir.graph.node(name).op.split(".")[1] not in VIEWS for name in kept)
    return kept if ir.tables.nodes or operations >= LEAST_KEPT else frozenset()


def table_function(
    base: str,
    like: str,
    sizes: Sequence[str],
    numbers: Sequence[str],
    statements: Sequence[str],
    results: Sequence[str],
) -> TableFunction:
    """Write the function.

    Args:
        base: prefix of the target's generated names.
        like: variable of a tensor on the device of the tables.
        sizes: variables of the sizes on which the tables depend.
        numbers: variables of the run-time numbers on which they depend.
        statements: assign the tables to their variables.
        results: variables of the tables that the launcher reads.
    """
    cache = f"_{base.upper()}_TABLES"
    # The text of a number tells 0.0 from -0.0 and 1 from 1.0.
    key = [f"{like}.device", *sizes, *(f"repr({number})" for number in numbers)]
    key_text = key[0] if len(key) == 1 else f"({', '.join(key)})"
    returned = f"{', '.join(results)}{',' * (len(results) == 1)}"
    parameters = [like, *sizes, *numbers]
    lines = [
        f"{cache} = {{}}",
        "",
        "",
        *def_lines(f"{base}_tables", parameters),
        '    """Tensors that depend only on sizes; computed once for each device and size."""',
        f"    key = {key_text}",
        f"    tables = {cache}.get(key)",
        f"    is_traced = torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() or {like}.is_meta",
        "    if tables is None or is_traced:",
        "        with torch.inference_mode(False), torch.no_grad():",
        *(f"            {line}" for statement in statements for line in statement.split("\n")),
        f"        tables = {returned if len(results) > 1 else f'({returned})'}",
        f"        if not is_traced and len({cache}) < {MOST_TABLES}:",
        "            # Tensors that a CUDA graph computes exist only after its replay.",
        "            if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():",
        "                return tables",
        "            torch.cuda.synchronize()  # other streams may read the tables as well",
        f"            {cache}[key] = tables",
        "    return tables",
        "",
        "",
    ]
    return TableFunction("\n".join(lines), call_text(f"{base}_tables", parameters, "    "), results)
