"""Matmuls with tensor descriptors (TMA), and their requirements."""

from __future__ import annotations

import pytest
import torch

from mtmc_lsp.codegen.coder import render
from mtmc_lsp.codegen.matmul.descriptors import ALLOCATOR, MAKE_DESCRIPTOR
from mtmc_lsp.codegen.module.guard_helpers import ALIGNED, GUARD_HELPERS
from mtmc_lsp.core.json_codec import from_json
from mtmc_lsp.core.workload import Capture
from mtmc_lsp.fusion.search import FusionSearch
from mtmc_lsp.llm.coder.code_policy import InvalidAnswer, check_policy
from mtmc_lsp.llm.coder.editable_text import split_code
from mtmc_lsp.rewrites import ir_of
from mtmc_lsp.schedule.configs import MatmulConfig, PrecisionMode, TileConfig
from mtmc_lsp.schedule.schedule import KernelPlan, Schedule
from tests.codegen.harness import compile_errors, fused, verified
from tests.planning.situations import H200

TEXT = """import torch
import torch.nn.functional as F
# mtmc: {arguments}
def f({names}):
    return {result}
"""
TILE = {
    "block_m": 32,
    "block_n": 32,
    "block_k": 32,
    "group_m": 4,
    "warps": 4,
    "stages": 2,
    "precision": "native",
    "tma": True,
}


def product(result: str, **shapes: str) -> str:
    arguments = " ".join(f"{name}=f16[{shape}]" for name, shape in shapes.items())
    return TEXT.format(arguments=arguments, names=", ".join(shapes), result=result)


MOVED = {
    "both as they are stored": (product("torch.relu(x @ y)", x="40,72", y="72,56"), 2),
    "weights by rows": (product("F.linear(x, w, b)", x="4,10,72", w="56,72", b="56"), 2),
    "left one transposed": (product("x.mT @ y", x="72,40", y="72,56"), 2),
    "both transposed": (product("x.mT @ y.mT", x="72,40", y="56,72"), 2),
    "matrices of a batch": (product("x @ y.mT", x="3,40,72", y="3,56,72"), 2),
    "one for a whole batch": (product("torch.matmul(x, y)", x="3,40,72", y="72,56"), 2),
    "heads of one tensor, which lie apart": (
        product("x.view(2, 40, 4, 24).transpose(1, 2) @ y", x="2,40,96", y="2,4,24,56"), 1,
    ),
    "the right one is computed": (product("x @ torch.sin(y)", x="40,72", y="72,56"), 1),
    "the left one's rows are too short": (product("x @ y", x="40,30", y="30,56"), 1),
    "a part of a tensor": (product("x[:, 8:] @ y", x="40,80", y="72,56"), 1),
    "a row for all": (product("x.expand(40, -1) @ y", x="1,72", y="72,56"), 1),
}  # fmt: skip


@pytest.mark.parametrize("name", MOVED)
def test_descriptors_are_used_for_all_supported_layouts(name: str, captured) -> None:
    text, moved = MOVED[name]
    capture = captured(text, "f")
    candidate = fused(capture, text, TILE)
    assert candidate.source.count(f"{MAKE_DESCRIPTOR}(") == moved
    verdict = verified(capture, candidate)
    assert verdict.is_correct, verdict.reason


def test_the_guard_checks_the_alignment_of_dynamic_strides(captured) -> None:
    text = product("x @ y", x="M,K", y="K,N").replace("y=f16[K,N]", "y=f16[K,N] M=40 K=72 N=56")
    capture = captured(text, "f")
    candidate = fused(capture, text, TILE)
    assert "x.shape[1] % 8 == 0" in candidate.source
    assert "y.shape[1] % 8 == 0" in candidate.source
    assert f"{ALIGNED}((x, y))" in candidate.source
    assert not compile_errors(capture, candidate, ("sm_80", "sm_90"))


def test_a_launcher_with_descriptors_sets_an_allocator(captured) -> None:
    moved, plain = (product("x @ y", x="40,72", y="72,56"), product("x @ y", x="40,30", y="30,50"))
    for text, lends in ((moved, 1), (plain, 0)):
        candidate = fused(captured(text, "f"), text, TILE)
        assert candidate.source.count("    triton.set_allocator(_descriptor_memory)\n") == lends
        assert candidate.source.count("def _descriptor_memory(") == lends


def test_only_aligned_tensors_are_accepted() -> None:
    space: dict[str, object] = {"torch": torch}
    exec(GUARD_HELPERS[ALIGNED], space)
    are_aligned = space[ALIGNED]
    numbers = torch.zeros(100, dtype=torch.float16)
    assert callable(are_aligned)
    assert are_aligned((numbers, numbers[8:], numbers[16:]))
    assert not are_aligned((numbers, numbers[3:]))


CHANGED = """import torch
# mtmc: x=f16[40,72] w=f16[72,56] h=f16[40,72]
def f(x, w, h):
    h.add_(x)
    return h @ w
"""
PART = """import torch
# mtmc: x=f16[40,72] w=f16[64,56]
def f(x, w):
    y = torch.as_strided(x, (32, 64), (64, 1), 4)
    return y @ w
"""


def rendered(capture: Capture, text: str, *kernels: KernelPlan) -> str:
    schedule = Schedule(kernels=kernels)
    return render(capture, ir_of(capture.graph, schedule), schedule, text, H200)[0].block


def test_the_guard_checks_the_alignment_of_an_updated_input(captured) -> None:
    capture = captured(CHANGED, "f")
    add, product = (node.name for node in capture.graph.nodes if node.op.split(".")[1] in ("add", "mm", "matmul"))
    kernels = (KernelPlan((add,), TileConfig(1, 64)), KernelPlan((product,), from_json(MatmulConfig, TILE)))
    code = rendered(capture, CHANGED, *kernels)
    assert f"{ALIGNED}((h, w))" in code


def test_results_of_torch_calls_use_pointers(captured) -> None:
    capture = captured(PART, "f")
    product = next(node.name for node in capture.graph.nodes if "m" in node.op.split(".")[1][:2])
    code = rendered(capture, PART, KernelPlan((product,), from_json(MatmulConfig, TILE)))
    assert "as_strided" in code
    assert MAKE_DESCRIPTOR not in code


@pytest.mark.parametrize(
    ("text", "moved"),
    [
        (product("x @ y", x="1024,128", y="128,1024"), True),
        (product("x @ y", x="1024,130", y="130,1018"), False),
        (product("torch.sin(x) @ torch.cos(y)", x="1024,512", y="512,1024"), False),
    ],
)
def test_the_plan_uses_descriptors_only_for_supported_operands(text: str, moved: bool, captured) -> None:
    capture = captured(text, "f")
    search = FusionSearch(
        ir_of(capture.graph, Schedule()), Schedule(), H200, precision=lambda node: PrecisionMode.NATIVE
    )
    # The library's kernel of a plain product may be as fast, so no fusion may pay.
    fusion = next(each for each in [*search.best(), search.least_uncertain()] if each is not None)
    assert isinstance(fusion.config, MatmulConfig)
    assert fusion.config.tma is moved


def test_arguments_may_have_the_names_of_launcher_variables(captured) -> None:
    text = """import torch
# mtmc: k_pad=f32[n_m,64] n_m=40
def f(k_pad):
    return k_pad @ k_pad.mT
"""
    capture = captured(text, "f")
    candidate = fused(capture, text, {**TILE, "precision": "fp16x3"})
    verdict = verified(capture, candidate)
    assert verdict.is_correct, verdict.reason


def test_a_language_model_may_edit_a_launcher_with_an_allocator(captured) -> None:
    text = product("x @ y", x="40,72", y="72,56")
    sheet = split_code(fused(captured(text, "f"), text, TILE).code)
    check_policy(sheet, sheet.text, moved_calls=0)
    with pytest.raises(InvalidAnswer, match="the name _other_memory is not defined"):
        check_policy(sheet, sheet.text.replace(ALLOCATOR, "_other_memory"), moved_calls=0)


def test_a_size_may_occur_twice_in_a_stride(captured) -> None:
    text = product("x.mT @ x", x="B,M,K").replace("x=f16[B,M,K]", "x=f16[B,M,K] B=3 M=40 K=48")
    capture = captured(text, "f")
    verdict = verified(capture, fused(capture, text, TILE))
    assert verdict.is_correct, verdict.reason
