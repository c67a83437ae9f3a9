"""All repairs of a kernel, in the order in which they are tried."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from mtmc_lsp.kernels.messages import Fault
from mtmc_lsp.kernels.repairs.computations import (
    axis_repairs,
    divisor_repairs,
    exponential_repairs,
    magnitude_repairs,
    program_step_repairs,
    shifted_offset_repairs,
)
from mtmc_lsp.kernels.repairs.counterparts import (
    advance_repairs,
    function_repairs,
    operator_repairs,
    row_repairs,
)
from mtmc_lsp.kernels.repairs.launches import (
    allocation_repairs,
    argument_repairs,
    block_repairs,
    dimension_repairs,
    grid_repairs,
)
from mtmc_lsp.kernels.repairs.masks import comparison_repairs, loop_repairs, mask_repairs, swapped_bounds
from mtmc_lsp.kernels.repairs.site import Repair, Site
from mtmc_lsp.kernels.repairs.stores import offset_repairs, race_repairs
from mtmc_lsp.kernels.repairs.values import (
    accumulation_repairs,
    accumulator_repairs,
    initial_value_repairs,
    padding_repairs,
    reduction_repairs,
)

GENERATORS: tuple[Callable[[Site], Iterator[Repair]], ...] = (
    mask_repairs,
    comparison_repairs,
    swapped_bounds,
    loop_repairs,
    padding_repairs,
    reduction_repairs,
    accumulation_repairs,
    accumulator_repairs,
    initial_value_repairs,
    axis_repairs,
    divisor_repairs,
    exponential_repairs,
    magnitude_repairs,
    program_step_repairs,
    shifted_offset_repairs,
    grid_repairs,
    block_repairs,
    argument_repairs,
    dimension_repairs,
    allocation_repairs,
    race_repairs,
    offset_repairs,
    function_repairs,
    row_repairs,
    advance_repairs,
    operator_repairs,
)


def repairs_for(sites: Sequence[Site], faults: Sequence[Fault]) -> list[Repair]:
    """The repairs that may remove one of the faults: those on its line first, then by rank and size."""
    kinds, lines = {fault.kind for fault in faults}, {fault.line for fault in faults}
    possible = [item for site in sites for generate in GENERATORS for item in generate(site) if item.kinds & kinds]
    return sorted(possible, key=lambda item: (item.line not in lines, item.rank, len(item.edits), item.line))
