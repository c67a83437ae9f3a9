"""The cost model takes memory layouts into account: its estimates decide what is tried first."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mtmc_lsp.core.action import ActionKind
from mtmc_lsp.fusion.search import FusionSearch
from mtmc_lsp.ir.primitives import PrimOp
from mtmc_lsp.ir.region_values import is_in_memory
from mtmc_lsp.ir.regions import RegionKind, analyse
from mtmc_lsp.rewrites import ir_of
from mtmc_lsp.schedule.attention_configs import attention_config
from mtmc_lsp.schedule.column_tiles import column_block, next_power_of_two
from mtmc_lsp.schedule.configs import MatmulConfig, PrecisionMode, TileConfig
from mtmc_lsp.schedule.matmul_configs import fitted, product_config
from mtmc_lsp.schedule.schedule import Rewrite, Schedule
from mtmc_lsp.schedule.tile_configs import default_config
from mtmc_lsp.tuning.kernel_cost import kernel_cost
from mtmc_lsp.tuning.load_cost import loads_apart_us
from mtmc_lsp.tuning.torch_cost import torch_cost
from tests.codegen.families import source
from tests.planning.situations import H200, proposed, region_and_program, start

ACROSS = "# mtmc: a=f32[N,M] b=f32[M,N] N=8192 M=8192\ndef across(a, b):\n    return a.t() + b\n"
ALONG = "# mtmc: a=f32[M,N] b=f32[M,N] N=8192 M=8192\ndef across(a, b):\n    return a + b\n"
DOWN = "# mtmc: x=f32[N,M] N=8192 M=8192\ndef down(x):\n    return torch.softmax(x.t(), dim=1)\n"


@pytest.mark.parametrize("shared", [49_152, 101_376, 166_912, 232_448])
@pytest.mark.parametrize(
    ("head", "dtype", "queries"),
    [(64, "f16", 4096), (128, "bf16", 4096), (256, "f16", 100), (128, "f32", 33), (80, "f16", 512), (136, "bf16", 512)],
)
def test_keys_and_values_of_an_attention_fit_into_shared_memory(
    shared: int, head: int, dtype: str, queries: int, captured
) -> None:
    text = source(
        f"q=F[2,{queries},{head}], k=F[2,4096,{head}], v=F[2,4096,{head}]: F.scaled_dot_product_attention(q, k, v)",
        dtype,
    )
    config = attention_config(*region_and_program(captured(text, "f")), replace(H200, shared_bytes=shared))
    m, n, stages = config.block_m, config.block_n, config.stages
    padded_head = next_power_of_two(head)
    elements = m * padded_head + n * stages * 2 * padded_head
    assert elements * (4 if dtype == "f32" else 2) <= shared or (m, n, stages) == (32, 32, 1)
    assert m <= max(64, queries)


def test_a_transposed_tensor_is_read_in_square_tiles(captured) -> None:
    ir, region = region_and_program(captured(f"import torch\n{ACROSS}", "across"))
    config = default_config(ir, region, H200)
    assert config == TileConfig(64, 64, warps=8)
    other = region_and_program(captured(f"import torch\n{ALONG}", "across"))
    assert default_config(*other, H200).rows == 1


def test_single_elements_load_whole_sectors_which_makes_long_tiles_slow(captured) -> None:
    ir, region = region_and_program(captured(f"import torch\n{ACROSS}", "across"))
    square, long = (kernel_cost(ir, region, c, H200) for c in (TileConfig(64, 64), TileConfig(1, 1024)))
    words = 8192 * 8192 * 4
    assert square.bytes == pytest.approx(3 * words)
    assert long.bytes == pytest.approx((8 + 2) * words), "a sector of 32 bytes holds eight floats"
    assert long.us > 3 * square.us


def test_a_reduction_down_the_columns_is_expensive_row_by_row(captured) -> None:
    ir, region = region_and_program(captured(f"import torch\n{DOWN}", "down"))
    by_rows = kernel_cost(ir, region, TileConfig(1, 8192), H200)
    assert by_rows.us > 2 * kernel_cost(ir, region, default_config(ir, region, H200), H200).us


def test_windows_before_a_norm_are_reduced_in_each_of_its_passes(captured) -> None:
    """Once for the statistics and once for the normalisation, by as many program instances as there are rows."""
    pooled = "F.max_pool2d(x, 7, 1)"
    expressions = {"sum": f"{pooled}.sum((2, 3))", "norm": f"F.instance_norm({pooled})"}
    config = TileConfig(1, 2048, loop=True, warps=8)

    def microseconds(name: str, channels: int) -> float:
        ir, region = region_and_program(captured(source(f"x=F[8,{channels},128,128]: {expressions[name]}", "f32"), "f"))
        return kernel_cost(ir, region, config, H200).us - H200.launch_us

    assert microseconds("norm", 64) == pytest.approx(2.0 * microseconds("sum", 64), rel=0.01)
    # A quarter of the work on 16 of 132 multiprocessors.
    assert microseconds("sum", 2) > microseconds("sum", 8) * 0.9


@pytest.mark.parametrize("columns", [1, 3, 17, 64, 100, 300, 1000, 1024, 1025, 1152, 4096, 100_003])
def test_a_tile_of_columns_leaves_little_unused(columns: int) -> None:
    block = column_block(columns, H200)
    read = -(-columns // block) * block
    assert block & (block - 1) == 0
    assert read < 1.29 * columns + 16


WIDE = "x=F[64,64,128,128], w=F[64,64,3,3]: F.conv2d(x, w, padding=1)"
PHASES = "x=F[64,64,128,128], w=F[64,64,3,3]: F.conv_transpose2d(x, w, stride=2, padding=1, output_padding=1)"


def test_a_product_waits_for_operands_that_are_loaded_element_by_element(captured) -> None:
    """Weights of several phases are strided along the columns of a tile in every layout, weights of plain convolutions along K."""
    waits = {}
    for name, case in (("plain", WIDE), ("phases", PHASES)):
        text = source(case, "f32")
        graph = captured(text, "f").graph
        node = next(node.name for node in graph.nodes if "conv" in node.op)
        for packed in (False, True):
            ir = ir_of(graph, Schedule(rewrites=(Rewrite("channels-last", node),) if packed else ()))
            own = next(n.name for n in ir.graph.nodes if ".conv" in n.op)
            region = analyse(ir, (own,))
            waits[name, packed] = loads_apart_us(ir, region, default_config(ir, region, H200), H200)
    assert waits["plain", True] == 0.0
    assert waits["plain", False] > 1000.0
    assert waits["phases", True] > 1000.0


def test_operands_that_are_split_in_advance_are_loaded_contiguously(captured) -> None:
    text = source("x=F[64,128], w=F[64,128]: torch.mm(x.t(), w)", "f32")
    ir, region = region_and_program(captured(text, "f"))
    assert loads_apart_us(ir, region, product_config(ir, region, H200, PrecisionMode.FP16X3), H200) == 0.0


@pytest.mark.parametrize(
    ("stages", "shared", "expected"), [(1, 232448, (64, 1)), (5, 232448, (64, 5)), (5, 101376, (64, 3))]
)
def test_a_configuration_keeps_as_many_stages_as_fit_and_gets_no_more(
    stages: int, shared: int, expected: tuple[int, int]
) -> None:
    config = MatmulConfig(128, 128, 64, 8, 8, stages, PrecisionMode.FP16X3)
    fit = fitted(config, shared)
    assert (fit.block_k, fit.stages) == expected


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_the_first_step_on_masked_attention_of_the_library_computes_the_mask_in_its_kernel(
    dtype: str, captured
) -> None:
    text = source(
        "q=F[2,8,2048,64], k=F[2,8,2048,64], v=F[2,8,2048,64], b=F[1,8,1,2048]: "
        "F.scaled_dot_product_attention(q, k, v, attn_mask=(b > 0) & (b < 2))",
        dtype,
    )
    ir = ir_of(captured(text, "f").graph, Schedule())
    first = FusionSearch(ir, Schedule(), H200).best()[0]
    assert first.region.kind is RegionKind.ATTENTION
    assert len(first.region.nodes) == len(ir.graph.nodes)


def test_causal_attention_of_the_library_takes_half_the_time_and_a_mask_more(captured) -> None:
    def cost(arguments: str) -> float:
        text = source(f"q=F[4,16,4096,64]: F.scaled_dot_product_attention(q, q, q{arguments})", "f16")
        ir = ir_of(captured(text, "f").graph, Schedule())
        return torch_cost(ir, ir.graph.nodes[-1], H200).us

    full, causal = cost(""), cost(", is_causal=True")
    masked = cost(", attn_mask=q[:1, :1, :, :1].mT > 0")
    assert causal < 0.6 * full < 0.5 * masked


def test_rotary_embeddings_of_keys_are_a_kernel_before_an_attention_of_many_queries(captured) -> None:
    """Each block of queries would compute them again."""
    text = """import torch
import torch.nn.functional as F

def rotated(x):
    return torch.cat([-x[..., 32:], x[..., :32]], -1)

# mtmc: q=bf16[B,16,T,64] k=bf16[B,16,T,64] v=bf16[B,16,T,64] cos=bf16[T,64] sin=bf16[T,64] B=4 T=1024
def f(q, k, v, cos, sin):
    q = q * cos + rotated(q) * sin
    k = k * cos + rotated(k) * sin
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)
"""
    ir = ir_of(captured(text, "f").graph, Schedule())
    fusions = FusionSearch(ir, Schedule(), H200).best()
    (attention,) = (fusion.region for fusion in fusions if fusion.region.kind is RegionKind.ATTENTION)
    products = [ir.prims[name] for name in attention.prims if ir.prims[name].op is PrimOp.MATMUL]
    assert all(is_in_memory(ir.prims, product.inputs[1], attention.inputs) for product in products)
    assert len(fusions) == 2 and fusions[1].region.kind is RegionKind.MAP


def test_under_a_causal_mask_a_program_has_few_queries(captured) -> None:
    for head, causal, expected in ((64, True, 64), (128, True, 64), (128, False, 256), (256, True, 128)):
        text = source(
            f"q=F[2,4096,{head}], k=F[2,4096,{head}], v=F[2,4096,{head}]: "
            f"F.scaled_dot_product_attention(q, k, v, is_causal={causal})",
            "bf16",
        )
        assert attention_config(*region_and_program(captured(text, "f")), H200).block_m == expected


EMPTY = """
import torch


# mtmc: x=f32[N,512] w=f32[512,128] v=f32[128,64] N=64
def parts(x, w, v):
    outs = []
    for rows in torch.split(x, [0, 24, 40]):
        outs.append(torch.softmax(torch.relu(rows @ w) @ v, 1))
    return torch.cat(outs), outs[0].sum(1)
"""


def test_parts_without_elements_are_planned_with_the_others(captured) -> None:
    capture = captured(EMPTY, "parts")
    graph = capture.graph
    empty = {node.name for node in graph.nodes if node.type.numel.value(graph.sizes) == 0}
    assert {"matmul", "softmax"} <= {graph.node(name).word for name in empty}
    actions = proposed(capture, start(capture, EMPTY), ActionKind.FUSE)
    assert actions
    assert not any(set(action.region) <= empty for action in actions)
