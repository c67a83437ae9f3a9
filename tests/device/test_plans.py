"""Plans depend on the hardware of the GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mtmc_lsp.core.device_model import DeviceModel
from mtmc_lsp.device.choice import model_of_arch
from mtmc_lsp.fusion.search import Fusion, FusionSearch
from mtmc_lsp.rewrites import ir_of
from mtmc_lsp.schedule.configs import MatmulConfig, PrecisionMode, TileConfig
from mtmc_lsp.schedule.matmul_configs import stage_bytes
from mtmc_lsp.schedule.schedule import Schedule
from mtmc_lsp.tuning.cost import kernel_cost
from mtmc_lsp.tuning.waves import stream_programs
from tests.planning.situations import region_and_program

A10, H200, MI300X = (model_of_arch(arch) for arch in ("sm_86", "sm_90", "gfx942"))
DEVICES = pytest.mark.parametrize("device", [A10, H200, MI300X], ids=["A10", "H200", "MI300X"])
PRODUCT = "import torch\n# mtmc: a=f16[4096,4096] b=f16[4096,4096]\ndef f(a, b):\n    return a @ b\n"
FULL = "# mtmc: a=f32[M,K] b=f32[K,N] M=3072 K=3072 N=3072\ndef f(a, b):\n    return a @ b\n"
CHAIN = "import torch\n# mtmc: x=f32[8192,8192]\ndef f(x):\n    return torch.relu(x * 2 + 1)\n"
TRANSPOSED = "# mtmc: a=f32[8192,8192] b=f32[8192,8192]\ndef f(a, b):\n    return a.t() + b\n"
TILE = MatmulConfig(128, 256, 64, 8, 8, 3, PrecisionMode.IEEE)


def planned(captured, text: str, device: DeviceModel) -> Fusion:
    """The fusion with the largest predicted gain, or the smallest predicted loss."""
    ir = ir_of(captured(text, "f").graph, Schedule())
    fusion = FusionSearch(ir, Schedule(), device).least_doubted()
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


def test_a_fusion_saves_more_time_on_slower_memory(captured) -> None:
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
