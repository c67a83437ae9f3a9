"""Masked-out elements beyond the end of K are zero after the operand's function too, so they do not change a product."""

from __future__ import annotations

import pytest

from mtmc_lsp.verify.cases import Case
from tests.codegen.checker import Checker
from tests.codegen.harness import compile_errors, fused

TEXT = """import torch

# mtmc: a=F[40,K]@{a} b=F[K,33]@{b} row=F[1,K] column=F[40,1] one=F[1,1] K=203
def f(a, b, row, column, one):
    {body}
"""
SMALL = "-18..-16"
"""Inputs whose sigmoid is 10 million times smaller than the 0.5 of a zero."""
BODIES = {
    "of both": TEXT.format(a=SMALL, b=SMALL, body="return torch.sigmoid(a) @ torch.sigmoid(b)"),
    "with names": TEXT.format(a=SMALL, b=SMALL, body="y, z = torch.sigmoid(a), torch.sigmoid(b)\n    return y @ z"),
    "of the left one": TEXT.format(a=SMALL, b="-1..1", body="y = torch.sigmoid(a)\n    return y @ b"),
    "of the right one": TEXT.format(a="-1..1", b=SMALL, body="z = torch.sigmoid(b)\n    return a @ z"),
    "infinite": TEXT.format(a="1..2", b="1..2", body="return (1 / a) @ torch.log(b)"),
    "one row for all": TEXT.format(a="1..2", b=SMALL, body="return row.expand(40, -1) @ torch.sigmoid(b)"),
    "one column for all": TEXT.format(a="1..2", b="1..2", body="return column.expand(-1, row.shape[1]) @ b"),
    "one number for all": TEXT.format(a="1..2", b=SMALL, body="return one.expand_as(a) @ torch.sigmoid(b)"),
}
TILE = {"block_m": 32, "block_n": 32, "block_k": 32, "group_m": 8, "warps": 4, "stages": 2}
FORMS = {
    "whole": {"precision": "ieee"},
    "halves before": {"precision": "fp16x3"},
    "halves before, in short pieces": {"precision": "fp16x3-short"},
    "halves before, tiles moved by hardware": {"precision": "fp16x3", "tma": True},
    "left one as it is read": {"precision": "fp16x3-promoted", "split_on_load": "left"},
    "right one as it is read": {"precision": "fp16x3-promoted", "split_on_load": "right"},
    "both as they are read": {"precision": "fp16x3-promoted", "split_on_load": "both", "split_k": 4},
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", BODIES)
def test_elements_beyond_k_do_not_contribute(checker: Checker, name: str, form: str) -> None:
    text = BODIES[name].replace("F[", "f32[")
    capture = checker.capture(text)
    candidate = fused(capture, text, {**TILE, **FORMS[form]})
    assert checker.failures(capture, [candidate], Case({"K": 203}, "normal", 1)) == [""]


ATTENTION = """import torch

# mtmc: q=F[2,40,7]{q} k=F[2,N,7]{k} v=F[2,N,7]{v} N=50
def f(q, k, v):
    return torch.softmax({scores}, -1) @ {values}
"""
HEADS = {
    "small queries and keys": ATTENTION.format(
        q="@-18..-16", k="@-18..-16", v="", scores="torch.sigmoid(q) @ torch.sigmoid(k).mT * 1e13", values="v"
    ),
    "infinite keys": ATTENTION.format(q="", k="@1..2", v="", scores="q @ (1 / k).mT", values="v"),
    "infinite values": ATTENTION.format(q="", k="", v="@1..2", scores="q @ k.mT", values="(1 / v)"),
    "one key for all": ATTENTION.format(q="", k="", v="", scores="q @ k[:, :1].expand_as(k).mT", values="v"),
}


@pytest.mark.parametrize("name", HEADS)
def test_elements_beyond_the_head_or_the_keys_do_not_contribute_to_attention(checker: Checker, name: str) -> None:
    text = HEADS[name].replace("F[", "f32[")
    capture = checker.capture(text)
    candidate = fused(capture, text)
    assert "row_max" in candidate.source
    assert checker.failures(capture, [candidate], Case({"N": 50}, "normal", 1)) == [""]


@pytest.mark.parametrize("dtype", ["f16", "f64"])
def test_elements_beyond_k_do_not_contribute_in_other_precisions(checker: Checker, dtype: str) -> None:
    text = BODIES["of both"].replace(SMALL, "-8..-6").replace("F[", f"{dtype}[")
    capture = checker.capture(text)
    candidate = fused(capture, text)
    assert checker.failures(capture, [candidate], Case({"K": 203}, "normal", 1)) == [""]


@pytest.mark.parametrize("form", FORMS)
def test_the_masked_kernels_compile_for_gpus(checker: Checker, form: str) -> None:
    text = BODIES["one column for all"].replace("F[", "f32[")
    capture = checker.capture(text)
    assert not compile_errors(capture, fused(capture, text, {**TILE, **FORMS[form]}), ("sm_90",))


def test_functions_that_map_zero_to_zero_need_no_second_mask(checker: Checker) -> None:
    text = TEXT.format(a="-1..1", b="-1..1", body="return torch.abs(a * 2) @ b").replace("F[", "f32[")
    capture = checker.capture(text)
    assert "tl.where(" not in fused(capture, text, {**TILE, "precision": "ieee"}).source
