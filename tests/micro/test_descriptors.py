"""Products whose operands' tiles are moved by hardware, and what that asks of them."""

from __future__ import annotations

import pytest
import torch

from mtmc_lsp.micro.builtin.descriptors import MAKE
from mtmc_lsp.micro.builtin.guard import ALIGNED, GUARD_HELPERS
from tests.micro.harness import compile_errors, fused, verified

TEXT = """import torch
import torch.nn.functional as F
# mtmc: {arguments}
def f({names}):
    return {result}
"""
TILE = {"block_m": 32, "block_n": 32, "block_k": 32, "group_m": 4, "warps": 4, "stages": 2, "tma": True}


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
def test_tiles_are_moved_wherever_a_descriptor_can_say_how_they_lie(name: str, captured) -> None:
    text, moved = MOVED[name]
    capture = captured(text, "f")
    candidate = fused(capture, text, TILE)
    assert candidate.source.count(f"{MAKE}(") == moved
    verdict = verified(capture, candidate)
    assert verdict.is_correct, verdict.reason


def test_sizes_that_differ_from_call_to_call_are_asked_for_whole_units(captured) -> None:
    text = product("x @ y", x="M,K", y="K,N").replace("y=f16[K,N]", "y=f16[K,N] M=40 K=72 N=56")
    capture = captured(text, "f")
    candidate = fused(capture, text, TILE)
    assert "x.shape[1] % 8 == 0" in candidate.source
    assert "y.shape[1] % 8 == 0" in candidate.source
    assert f"{ALIGNED}((x, y))" in candidate.source
    assert not compile_errors(capture, candidate, ("sm_80", "sm_90"))


def test_a_launcher_whose_kernels_make_descriptors_lends_them_memory(captured) -> None:
    moved, plain = (product("x @ y", x="40,72", y="72,56"), product("x @ y", x="40,30", y="30,50"))
    for text, lends in ((moved, 1), (plain, 0)):
        candidate = fused(captured(text, "f"), text, TILE)
        assert candidate.source.count("    triton.set_allocator(_descriptor_memory)\n") == lends
        assert candidate.source.count("def _descriptor_memory(") == lends


def test_only_tensors_that_begin_at_whole_units_are_moved() -> None:
    space: dict[str, object] = {"torch": torch}
    exec(GUARD_HELPERS[ALIGNED], space)
    are_aligned = space[ALIGNED]
    numbers = torch.zeros(100, dtype=torch.float16)
    assert callable(are_aligned)
    assert are_aligned((numbers, numbers[8:], numbers[16:]))
    assert not are_aligned((numbers, numbers[3:]))
