"""Triton's interpreter, with its differences from a GPU corrected, and made faster."""

from __future__ import annotations

from typing import Any

from mtmc_lsp.verify.worker.interpreter.bfloat16 import patch_bfloat16
from mtmc_lsp.verify.worker.interpreter.grids import patch_grids
from mtmc_lsp.verify.worker.interpreter.lane_operations import patch_lanes
from mtmc_lsp.verify.worker.interpreter.patches import patch_interpreter
from mtmc_lsp.verify.worker.interpreter.speedups import speed_up_interpreter


def prepare_interpreter(replace: Any = setattr) -> None:
    """Correct and speed up the interpreter of this process; call it before modules with kernels are imported.

    Args:
        replace: sets an attribute of a module or class to another function.
    """
    patch_interpreter(replace)
    patch_bfloat16(replace)
    speed_up_interpreter()
    # The faster functions also take the arrays of several programs.
    patch_lanes(replace)
    patch_grids(replace)
