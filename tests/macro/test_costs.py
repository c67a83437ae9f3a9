"""What the model makes of how tensors lie in memory: estimates decide what is tried first."""

from __future__ import annotations

import pytest

from mtmc_lsp.macro.configs import _column_block, default_config
from mtmc_lsp.macro.cost import kernel_cost
from tests.macro.situations import SHEET, region_and_program

ACROSS = "# mtmc: a=f32[N,M] b=f32[M,N] N=8192 M=8192\ndef across(a, b):\n    return a.t() + b\n"
ALONG = "# mtmc: a=f32[M,N] b=f32[M,N] N=8192 M=8192\ndef across(a, b):\n    return a + b\n"
DOWN = "# mtmc: x=f32[N,M] N=8192 M=8192\ndef down(x):\n    return torch.softmax(x.t(), dim=1)\n"


def test_a_transposed_tensor_is_read_in_square_tiles(captured) -> None:
    program, region = region_and_program(captured(f"import torch\n{ACROSS}", "across"))
    config = default_config(program, region)
    assert (config["rows"], config["block"]) == (64, 64)
    other = region_and_program(captured(f"import torch\n{ALONG}", "across"))
    assert default_config(*other)["rows"] == 1


def test_whole_sectors_are_read_for_single_elements_and_long_tiles_pay_for_it(captured) -> None:
    program, region = region_and_program(captured(f"import torch\n{ACROSS}", "across"))
    square, long = (
        kernel_cost(program, region, c, SHEET) for c in ({"rows": 64, "block": 64}, {"rows": 1, "block": 1024})
    )
    words = 8192 * 8192 * 4
    assert square.bytes == pytest.approx(3 * words)
    assert long.bytes == pytest.approx((8 + 2) * words), "a sector of 32 bytes holds eight floats"
    assert long.us > 3 * square.us


def test_a_reduction_down_the_columns_is_dear_row_by_row(captured) -> None:
    program, region = region_and_program(captured(f"import torch\n{DOWN}", "down"))
    by_rows = kernel_cost(program, region, {"rows": 1, "block": 8192, "loop": False}, SHEET)
    assert by_rows.us > 2 * kernel_cost(program, region, default_config(program, region), SHEET).us


@pytest.mark.parametrize("columns", [1, 3, 17, 64, 100, 300, 1000, 1024, 1025, 1152, 4096, 100_003])
def test_a_tile_of_columns_leaves_little_unused(columns: int) -> None:
    block = _column_block(columns)
    read = -(-columns // block) * block
    assert block & (block - 1) == 0
    assert read < 1.29 * columns + 16
