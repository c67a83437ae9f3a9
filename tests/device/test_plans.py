"""Plans depend on the hardware of the GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mtmc_lsp.core.device_model import DeviceModel
from mtmc_lsp.device.choice import model_of_arch
from mtmc_lsp.fusion.search import Fusion, FusionSearch
from mtmc_lsp.rewrites import ir_of
from mtmc_lsp.schedule.attention_configs import attention_config, attention_variants
from mtmc_lsp.schedule.configs import AttentionConfig, MatmulConfig, PrecisionMode, TileConfig
from mtmc_lsp.schedule.matmul_configs import product_config, product_variants, stage_bytes
from mtmc_lsp.schedule.precision_modes import Precisions
from mtmc_lsp.schedule.schedule import Schedule
from mtmc_lsp.schedule.tile_configs import tile_config
from mtmc_lsp.tuning.kernel_cost import kernel_cost
from mtmc_lsp.tuning.waves import stream_programs
from tests.planning.situations import region_and_program

A10, H200, MI300X, RTX5090 = (model_of_arch(arch) for arch in ("sm_86", "sm_90", "gfx942", "sm_120"))
DEVICES = pytest.mark.parametrize("device", [A10, H200, MI300X], ids=["A10", "H200", "MI300X"])
PRODUCT = "import torch\n# mtmc: a=f16[4096,4096] b=f16[4096,4096]\ndef f(a, b):\n    return a @ b\n"
FULL = "# mtmc: a=f32[M,K] b=f32[K,N] M=3072 K=3072 N=3072\ndef f(a, b):\n    return a @ b\n"
CHAIN = "import torch\n# mtmc: x=f32[8192,8192]\ndef f(x):\n    return torch.relu(x * 2 + 1)\n"
TRANSPOSED = "# mtmc: a=f32[8192,8192] b=f32[8192,8192]\ndef f(a, b):\n    return a.t() + b\n"
ATTENTION = """import torch
# mtmc: q=bf16[2,8,4096,128] k=bf16[2,8,4096,128] v=bf16[2,8,4096,128]
def f(q, k, v):
    return torch.nn.functional.scaled_dot_product_attention(q, k, v)
"""
LONG_K = "import torch\n# mtmc: a=f16[128,65536] b=f16[65536,256]\ndef f(a, b):\n    return a @ b\n"
LONG_ROWS = "import torch\n# mtmc: x=f32[16,4194304]\ndef f(x):\n    return x.sum(dim=1)\n"
ROWS = "import torch\n# mtmc: x=f32[4096,8192]\ndef f(x):\n    return torch.softmax(x, dim=1)\n"
TWO_ROWS = (
    "import torch\n# mtmc: x=f32[4096,32768] y=f32[4096,32768]\ndef f(x, y):\n    return torch.softmax(x + y, dim=1)\n"
)
TILE = MatmulConfig(128, 256, 64, 8, 8, 3, PrecisionMode.IEEE)


def planned(captured, text: str, device: DeviceModel) -> Fusion:
    """The fusion with the largest predicted gain, or the smallest predicted loss."""
    ir = ir_of(captured(text, "f").graph, Schedule())
    fusion = FusionSearch(ir, Schedule(), device).least_uncertain()
    assert fusion is not None
    return fusion


def test_products_use_tma_only_if_the_device_has_it(captured) -> None:
    uses = {device.arch: planned(captured, PRODUCT, device).config.tma for device in (A10, H200, MI300X)}
    assert uses == {"sm_86": False, "sm_90": True, "gfx942": False}


@DEVICES
def test_the_stages_of_a_product_fit_the_shared_memory_of_the_device(captured, device: DeviceModel) -> None:
    config = planned(captured, PRODUCT, device).config
    assert stage_bytes(config) * config.stages <= device.shared_bytes


def test_less_shared_memory_means_fewer_or_smaller_stages(captured) -> None:
    bytes_in_use = [
        stage_bytes(config) * config.stages
        for config in (planned(captured, PRODUCT, device).config for device in (MI300X, A10, H200))
    ]
    assert bytes_in_use[0] < bytes_in_use[1] < bytes_in_use[2]


@DEVICES
def test_a_badly_filled_last_wave_is_shared_among_all_multiprocessors(captured, device: DeviceModel) -> None:
    ir, region = region_and_program(captured(FULL, "f"))
    assert device.sm_count in stream_programs(ir, region, TILE, device)


@pytest.mark.parametrize("kind", ["bf16", "f32"])
@DEVICES
def test_the_operands_of_an_attention_fit_the_shared_memory_of_the_device(
    captured, device: DeviceModel, kind: str
) -> None:
    ir, region = region_and_program(captured(ATTENTION.replace("bf16", kind), "f"))
    first = attention_config(ir, region, device)
    for config in (first, *attention_variants(ir, region, device)):
        elements = config.block_m * 128 + config.block_n * config.stages * (128 + 128)
        assert elements * (4 if kind == "f32" else 2) <= device.shared_bytes
        assert config.stages <= 2 or device.vendor == "nvidia"


def test_attention_tiles_are_smaller_where_there_is_less_shared_memory(captured) -> None:
    ir, region = region_and_program(captured(ATTENTION, "f"))
    tiles = {device.arch: attention_config(ir, region, device) for device in (A10, H200, MI300X)}
    assert tiles["sm_90"] == AttentionConfig(256, 64, 8, 4)
    assert tiles["sm_86"] == AttentionConfig(128, 64, 8, 2)
    assert tiles["gfx942"].elements < tiles["sm_86"].elements


@pytest.mark.parametrize("mode", [PrecisionMode.IEEE, PrecisionMode.FP16X3, PrecisionMode.FP16X3_PROMOTED])
@DEVICES
def test_no_variant_of_a_product_needs_more_than_the_device_has(device: DeviceModel, mode: PrecisionMode) -> None:
    configs = product_variants(replace(TILE, precision=mode), device, of_windows=False, short=False)
    assert configs
    for config in configs:
        assert stage_bytes(config) * config.stages <= device.shared_bytes
        assert config.warps * device.warp_size <= 1024


def test_float32_operands_fit_the_shared_memory_of_the_device(captured) -> None:
    ir, region = region_and_program(captured(FULL, "f"))
    stages = {
        device.arch: product_config(ir, region, device, PrecisionMode.IEEE).stages for device in (A10, H200, MI300X)
    }
    assert stages == {"sm_86": 3, "sm_90": 3, "gfx942": 2}


def test_the_largest_tile_is_that_of_the_tensor_cores(captured) -> None:
    ir, region = region_and_program(captured(PRODUCT, "f"))
    tiles = {
        device.arch: (config.block_m, config.block_n)
        for device in (A10, H200, MI300X)
        for config in (product_config(ir, region, device),)
    }
    assert tiles == {"sm_86": (128, 128), "sm_90": (128, 256), "gfx942": (256, 256)}


def test_k_is_split_into_more_parts_where_there_are_more_multiprocessors(captured) -> None:
    ir, region = region_and_program(captured(LONG_K, "f"))
    parts = {device.arch: product_config(ir, region, device).split_k for device in (A10, H200, MI300X)}
    assert parts["sm_86"] < parts["sm_90"] < parts["gfx942"]


def test_long_rows_are_shared_by_more_programs_where_there_are_more_multiprocessors(captured) -> None:
    ir, region = region_and_program(captured(LONG_ROWS, "f"))
    parts = {device.arch: tile_config(ir, region, device).split for device in (A10, H200, MI300X)}
    assert parts["sm_86"] < parts["sm_90"] < parts["gfx942"]


def test_wavefronts_of_64_lanes_need_half_the_warps(captured) -> None:
    ir, region = region_and_program(captured(ROWS, "f"))
    nvidia, amd = (tile_config(ir, region, device) for device in (H200, MI300X))
    assert nvidia.elements == amd.elements == 8192
    assert nvidia.warps == 2 * amd.warps == 16


def test_a_device_with_more_registers_holds_longer_rows(captured) -> None:
    ir, region = region_and_program(captured(TWO_ROWS, "f"))
    assert [tile_config(ir, region, device).loop for device in (A10, H200, MI300X)] == [True, True, False]


def test_operands_are_split_only_where_that_is_faster_than_fp32_units(captured) -> None:
    ir, _ = region_and_program(captured(FULL, "f"))
    modes = {
        device.arch: next(iter(Precisions.of(ir, device, []).modes.values()))[0] for device in (A10, H200, RTX5090)
    }
    assert modes == {"sm_86": PrecisionMode.FP16X3, "sm_90": PrecisionMode.FP16X3, "sm_120": PrecisionMode.IEEE}


def test_a_fusion_saves_as_many_times_more_as_the_memory_is_slower(captured) -> None:
    ir = ir_of(captured(CHAIN, "f").graph, Schedule())
    slow, fast = (FusionSearch(ir, Schedule(), device).best()[0].saved_us for device in (A10, H200))
    assert slow / fast == pytest.approx(H200.bandwidth / A10.bandwidth, rel=0.05)


def test_tf32_products_pass_through_registers_only_if_tensor_cores_read_shared_memory(captured) -> None:
    ir, region = region_and_program(captured(FULL, "f"))
    config = replace(TILE, precision=PrecisionMode.TF32)
    reached = {
        device.arch: 2 * 3072**3 / (kernel_cost(ir, region, config, device).us * 1e-6) / device.flops["tf32"]
        for device in (A10, H200)
    }
    assert reached["sm_90"] < 0.25
    assert reached["sm_86"] > 0.6


def test_single_elements_load_whole_sectors_which_are_larger_on_amd(captured) -> None:
    ir, region = region_and_program(captured(TRANSPOSED, "f"))
    config = TileConfig(1, 1024)
    words = 8192 * 8192 * 4
    assert kernel_cost(ir, region, config, A10).bytes == pytest.approx((8 + 2) * words)
    assert kernel_cost(ir, region, config, MI300X).bytes > 10 * words
