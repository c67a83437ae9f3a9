"""Numbers that were measured on an H200 hold for it exactly, and follow the resource of other devices."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from mtmc_lsp.actions.base import region_of
from mtmc_lsp.codegen.coder import BuiltinCoder
from mtmc_lsp.core.action import ActionKind, MacroAction
from mtmc_lsp.core.device_model import DeviceModel
from mtmc_lsp.core.json_codec import to_json
from mtmc_lsp.core.run import Candidate, KernelLaunch
from mtmc_lsp.core.workload import Capture
from mtmc_lsp.device.choice import model_of_arch
from mtmc_lsp.rewrites import ir_of
from mtmc_lsp.schedule import device_limits as limits
from mtmc_lsp.schedule.column_tiles import column_block
from mtmc_lsp.schedule.configs import MatmulConfig, PrecisionMode, SplitOnLoad, TileConfig
from mtmc_lsp.schedule.matmul_configs import holds_sums_apart, product_variants
from mtmc_lsp.schedule.schedule import Schedule
from mtmc_lsp.schedule.split_on_load import rows_held, split_elements, strided_rows
from mtmc_lsp.schedule.tile_configs import tile_config
from mtmc_lsp.tuning.kernel_cost import kernel_cost
from mtmc_lsp.tuning.torch_cost import torch_cost
from tests.planning.situations import act, proposed, region_and_program, schedule_of, start

A10, H200, MI300X = (model_of_arch(arch) for arch in ("sm_86", "sm_90", "gfx942"))
MEASURED: dict[Callable[[DeviceModel], int], tuple[int, int, int]] = {
    limits.min_tiles: (69, 128, 294),
    limits.min_programs: (54, 100, 231),
    limits.min_reduction_programs: (139, 256, 589),
    limits.resident_programs: (279, 512, 1179),
    limits.min_recurrent_programs: (49, 90, 208),
    limits.max_row_elements: (16384, 16384, 32768),
    limits.max_looped_elements: (8192, 8192, 16384),
    limits.max_shared_row_elements: (4096, 4096, 8192),
    limits.max_strided_columns: (256, 256, 512),
    limits.min_split_elements: (2**16, 2**18, 2**17),
    limits.max_accumulators: (64, 64, 128),
    limits.max_promoted_elements: (16384, 16384, 32768),
    limits.default_elements: (1024, 1024, 2048),
    limits.short_row: (64, 64, 128),
    limits.transaction_columns: (16, 16, 32),
    split_elements: (8192, 8192, 16384),
}
FULL = "# mtmc: a=f32[M,K] b=f32[N,K] M=1536 K=512 N=1536\ndef f(a, b):\n    return a @ b.t()\n"
DROPPED = """import torch
# mtmc: x=f32[64,4096]
def f(x):
    y = torch.relu(x)
    return torch.nn.functional.dropout(y.sum(1), 0.5)
"""
SUMS = """import torch
# mtmc: x=f32[4096,4096]
def f(x):
    y = torch.tanh(x) * 0.5
    return y.sum(0), y.sum(1)
"""
WINDOWS = (
    "import torch\n# mtmc: x=f32[64,64,128,128]\ndef f(x):\n    return torch.nn.functional.max_pool2d(x, 4, 1, 1)\n"
)
LAYERS = """import torch
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.LSTM(64, 64, 2)
    # mtmc: x=f32[16,4,64]
    def forward(self, x):
        return self.layers(x)[0]
"""
FEW_ROWS = "import torch\n# mtmc: x=f32[2,50000]\ndef f(x):\n    return x.sum(dim=1)\n"
STRIDED = "import torch\n# mtmc: x=f32[64,384,512]\ndef f(x):\n    return torch.softmax(x, dim=1)\n"
SPLIT = MatmulConfig(128, 128, 64, 8, 8, 3, PrecisionMode.FP16X3)


def written(capture: Capture, text: str, device: DeviceModel, config: MatmulConfig) -> Candidate:
    """A file with all nodes of a graph as one kernel, written for a device."""
    coder = BuiltinCoder(device)
    nodes = tuple(node.name for node in ir_of(capture.graph, Schedule()).graph.nodes)
    action = MacroAction(ActionKind.FUSE, nodes, (0, 0), {"config": to_json(config)})
    return coder.write(capture, coder.start(capture, text), action)


def launches(candidate: Candidate, word: str) -> list[KernelLaunch]:
    return [launch for launch in candidate.launches if word in launch.kernel]


@pytest.mark.parametrize("limit", MEASURED, ids=lambda limit: limit.__name__)
def test_limits_follow_the_resources_of_the_device(limit: Callable[[DeviceModel], int]) -> None:
    assert tuple(map(limit, (A10, H200, MI300X))) == MEASURED[limit]


def test_tiles_of_columns_are_wider_where_sectors_are_larger() -> None:
    assert [column_block(300, device) for device in (A10, H200, MI300X)] == [64, 64, 128]


def test_a_split_program_holds_more_rows_where_fewer_programs_fill_the_device() -> None:
    assert [rows_held(3072, 256, device) for device in (A10, H200, MI300X)] == [16, 8, 16]
    assert [rows_held(2048, 2048, device) for device in (A10, H200, MI300X)] == [4, 4, 2]
    assert [strided_rows(2048, device) for device in (A10, H200, MI300X)] == [16, 16, 8]


def test_the_kernel_that_splits_operands_is_written_for_the_device(captured) -> None:
    capture = captured(FULL, "f")
    rows = {}
    for device in (A10, H200, MI300X):
        (launch,) = launches(written(capture, FULL, device, SPLIT), "split")
        rows[device.arch] = [value for name, value in launch.constexprs.items() if "ROWS" in name]
    assert rows == {"sm_86": [8], "sm_90": [4], "gfx942": [8]}


def test_a_second_accumulator_fits_larger_tiles_where_threads_have_more_registers(captured) -> None:
    large = replace(SPLIT, block_n=256)
    assert [holds_sums_apart(large, device) for device in (A10, H200, MI300X)] == [True, True, False]
    capture = captured(FULL.replace("K=512", "K=4096"), "f")
    texts = [written(capture, FULL, device, large).source for device in (H200, MI300X)]
    assert ["_split_leading_bits" in text for text in texts] == [True, False]


def test_windows_that_are_split_on_load_have_larger_tiles_where_there_are_more_registers() -> None:
    config = replace(SPLIT, precision=PrecisionMode.FP16X3_PROMOTED)
    config = replace(config, split_on_load=SplitOnLoad.LEFT)
    largest = {
        device.arch: max(item.elements for item in product_variants(config, device, of_windows=True, short=False))
        for device in (H200, replace(MI300X, shared_bytes=H200.shared_bytes))
    }
    assert largest == {"sm_90": 128 * 128, "gfx942": 256 * 128}


def test_short_rows_are_split_where_a_launch_takes_as_long_as_fewer_bytes(captured) -> None:
    ir, region = region_and_program(captured(FEW_ROWS, "f"))
    assert [tile_config(ir, region, device).is_split for device in (A10, H200)] == [True, False]


def test_strided_columns_stay_in_registers_where_there_are_more(captured) -> None:
    ir, region = region_and_program(captured(STRIDED, "f"))
    assert [tile_config(ir, region, device).loop for device in (A10, H200, MI300X)] == [True, True, False]


def test_a_random_operation_outside_kernels_gets_a_tile_of_the_device(captured) -> None:
    capture = captured(DROPPED, "f")
    relu = capture.graph.nodes[0].name
    action = MacroAction(ActionKind.FUSE, (relu,), (0, 0), {"config": {}})
    blocks = []
    for device in (H200, MI300X):
        coder = BuiltinCoder(device)
        random = [
            each for each in coder.write(capture, start(capture, DROPPED), action).launches if "relu" not in each.kernel
        ]
        blocks.append(
            max(int(str(value)) for each in random for name, value in each.constexprs.items() if "BLOCK" in name)
        )
    assert blocks == [1024, 2048]


@pytest.mark.parametrize("device", [H200, MI300X], ids=["H200", "MI300X"])
def test_kernels_that_recompute_a_value_have_the_tiles_of_the_device(captured, device: DeviceModel) -> None:
    capture = captured(SUMS, "f")
    tanh, scaled = (node.name for node in capture.graph.nodes[:2])
    before = act(capture, start(capture, SUMS), ActionKind.FUSE, tanh, scaled, config={})
    action = next(
        each for each in proposed(capture, before, ActionKind.RECOMPUTE, device=device) if each.region == (scaled,)
    )
    assert ("kernels" in action.params) == (device is MI300X)
    schedule = schedule_of(BuiltinCoder(device).write(capture, before, action))
    ir = ir_of(capture.graph, schedule)
    assert len(schedule.kernels) == 2
    for plan in schedule.kernels:
        assert plan.config == tile_config(ir, region_of(ir, plan), device)


def test_windows_are_read_at_the_rate_of_the_first_level_cache(captured) -> None:
    ir, region = region_and_program(captured(WINDOWS, "f"))
    config = TileConfig(1, 1024)
    half = replace(H200, l1_bytes_per_clock=H200.l1_bytes_per_clock // 2)
    fast, slow = (kernel_cost(ir, region, config, device).us - device.launch_us for device in (H200, half))
    assert slow == pytest.approx(2.0 * fast, rel=0.01)
    assert MI300X.l1_bytes_per_clock < H200.l1_bytes_per_clock


def test_the_library_takes_launches_for_each_step_of_a_layer(captured) -> None:
    ir = ir_of(captured(LAYERS, "Net").graph, Schedule())
    node = next(node for node in ir.graph.nodes if "lstm" in node.op)
    assert torch_cost(ir, node, H200).us == 16 * 2 * 10.0
    assert torch_cost(ir, node, replace(H200, launch_us=2.0)).us == 16 * 2 * 5.0
