"""Large tiles store the leading bits of their sums separately, since registers hold no second accumulator."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch

from mtmc_lsp.core.workload import Capture
from mtmc_lsp.fusion.search import FusionSearch
from mtmc_lsp.rewrites import ir_of
from mtmc_lsp.schedule.configs import PrecisionMode
from mtmc_lsp.schedule.schedule import Schedule
from mtmc_lsp.verify.cases import Case
from tests.codegen.checker import Checker
from tests.codegen.harness import fused, verified
from tests.planning.situations import H200

TEXT = """import torch
# mtmc: a=f32[{a}] b=f32[{b}]{sizes}
def f(a, b):
    return {result}
"""
TILE = {"block_m": 64, "block_n": 64, "block_k": 64, "group_m": 4, "warps": 1, "stages": 2, "precision": "fp16x3"}
"""Each thread has as many sums as with a tile of 128 x 256 and eight warps."""


def product(a: str, b: str, result: str = "a @ b", sizes: str = "") -> str:
    return TEXT.format(a=a, b=b, result=result, sizes=sizes and f" {sizes}")


ANY = product("M,K", "K,N", sizes="M=40 K=600 N=70")
FORMS = {
    "sizes of each call": (ANY, {}),
    "fixed sizes": (product("X", "Y", "a.reshape(40, 600) @ b.reshape(600, 70)", "X=24000 Y=42000"), {}),
    "an epilogue": (product("M,K", "N,K", "torch.relu(a @ b.mT * 0.1) + 1", "M=40 K=600 N=70"), {}),
    "tiles moved by hardware": (ANY, {"tma": True}),
    "shorter pieces": (ANY, {"precision": "fp16x3-short"}),
    "a batch": (product("B,M,K", "B,K,N", sizes="B=2 M=34 K=530 N=40"), {}),
    "persistent programs": (product("M,K", "K,N", sizes="M=70 K=530 N=130"), {"tma": True, "persist": 2}),
    "parts of K": (ANY, {"split_k": 2}),
    "stream-K": (product("M,K", "K,N", sizes="M=130 K=530 N=70"), {"stream_k": 3}),
    "one piece in the workload alone": (product("M,K", "K,N", sizes="M=40 K=200 N=70"), {}),
}


@pytest.mark.parametrize("name", FORMS)
def test_matmuls_equal_the_users_code(name: str, captured) -> None:
    text, changes = FORMS[name]
    capture = captured(text, "f")
    candidate = fused(capture, text, {**TILE, **changes})
    assert "acc, leading = _split_leading_bits(acc, leading)" in candidate.source
    verdict = verified(capture, candidate)
    assert verdict.is_correct, verdict.reason


@pytest.mark.parametrize("distribution", ["mixed", "constant"])
def test_sums_of_many_pieces_lose_no_leading_bits(checker: Checker, distribution: str) -> None:
    """2300 terms make five pieces, and 1500 six: the piece length depends on the call's sizes."""
    capture = checker.capture(ANY)
    candidate = fused(capture, ANY, TILE)
    for terms in (2300, 1500):
        case = Case({"M": 40, "K": terms, "N": 12}, distribution, 3)
        assert checker.failures(capture, [candidate], case) == [""]


def test_sums_of_any_sign_and_magnitude_are_restored_exactly(checker: Checker) -> None:
    """Splitting and joining loses no bit: ten pieces cancel except for their last bits."""
    text = product("32,2560", "2560,32")
    capture = checker.capture(text)
    candidate = fused(capture, text, {**TILE, "block_n": 128})
    signs = torch.tensor([1.0, -1.0]).repeat_interleave(512).repeat(3)[:2560]
    a = torch.ones(32, 2560) * (1 + torch.arange(32)[:, None] * 2.0**-10) * signs
    b = torch.ones(2560, 32) * torch.pow(2.0, torch.arange(32) - 16)
    (own,) = checker.results(capture, candidate, {"a": a, "b": b})
    assert torch.equal(own, (a.double() @ b.double()).float())


def test_the_piece_length_depends_on_the_length_of_the_sum(captured) -> None:
    """The library's error grows with the sum, so long sums may have longer pieces."""
    assert "PIECE=8 if k_pad >= 2048 else 4" in fused(captured(ANY, "f"), ANY, TILE).source
    for terms, piece in ((600, 4), (2100, 8)):
        text = product("X", "Y", f"a.reshape(40, {terms}) @ b.reshape({terms}, 70)", f"X={40 * terms} Y={70 * terms}")
        assert f"PIECE={piece}, " in fused(captured(text, "f"), text, TILE).source


def chosen(checker: Checker, rows: int) -> tuple[Capture, str, Mapping[str, int | str | bool]]:
    """A matmul of square matrices, and its configuration on an H200."""
    text = product("M,K", "K,N", "torch.relu(a @ b)", f"M={rows} K=2048 N={rows}")
    capture = checker.capture(text)
    search = FusionSearch(
        ir_of(capture.graph, Schedule()), Schedule(), H200, precision=lambda node: PrecisionMode.FP16X3
    )
    fusion = search.least_uncertain()
    assert fusion is not None
    return capture, text, fusion.config


def test_the_larger_tile_is_chosen_if_it_fills_the_device_and_its_sums_fit_in_registers(
    checker: Checker,
) -> None:
    *_, config = chosen(checker, 1024)
    assert config.elements < 128 * 128
    capture, text, config = chosen(checker, 2048)
    assert (config.block_m, config.block_n) == (128, 256)
    *_, own = checker.reports(capture, fused(capture, text, config))
    assert not own.error
    assert own.spills == 0
