"""The dispatch statement of a region: it assigns the results where that of a whole target returns them."""

from __future__ import annotations

from mtmc_lsp.core.workload import CodeRegion

RETURN = "    return "


def region_dispatch(dispatch: str, region: CodeRegion | None) -> str:
    """The dispatch statement for a region, from the one for a target that returns the region's outputs."""
    if region is None or region.returns:
        return dispatch
    before, _, returned = dispatch.rpartition(RETURN)
    return f"{before}    {', '.join(region.outputs)} = {returned}" if region.outputs else before
