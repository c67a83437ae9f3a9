"""Attention of one or few queries to a long cache: keys split among programs, grouped heads, lengths and pages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache

import pytest

from mtmc_lsp.core.protocols import CannotCode
from mtmc_lsp.core.workload import Capture
from mtmc_lsp.schedule.attention_configs import attention_config
from mtmc_lsp.tuning.kernel_cost import kernel_cost
from tests.codegen.checker import Checker
from tests.codegen.harness import compile_errors, fused, verified
from tests.planning.situations import H200, region_and_program

CONFIG = {"block_m": 16, "block_n": 16, "warps": 4, "stages": 2}
HEAD = "import torch\nimport torch.nn.functional as F\n\n\n"
PLAIN = """# mtmc: q=f16[B,3,1,16] k=f16[B,3,T,16] v=f16[B,3,T,16] B=2 T=100
def f(q, k, v):
    return torch.softmax((q @ k.transpose(-1, -2) * 0.25).float(), -1).to(q.dtype) @ v
"""
FORMS = {
    "products": PLAIN,
    "float32": PLAIN.replace("f16", "f32"),
    "an operation after it": PLAIN.replace("@ v\n", "@ v * 2\n"),
    "lengths": """# mtmc: q=f16[B,3,1,16] k=f16[B,3,T,16] v=f16[B,3,T,16] lengths=i64[B]@1..100 B=2 T=100
def f(q, k, v, lengths):
    mask = torch.arange(k.shape[2], device=q.device)[None, :] < lengths[:, None]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None, None, :])
""",
    "repeated heads": """# mtmc: q=f16[B,6,1,16] k=f16[B,2,T,16] v=f16[B,2,T,16] lengths=i64[B]@1..100 B=2 T=100
def f(q, k, v, lengths):
    k, v = k.repeat_interleave(3, dim=1), v.repeat_interleave(3, dim=1)
    mask = torch.arange(k.shape[2], device=q.device)[None, :] < lengths[:, None]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None, None, :])
""",
    "grouped heads of the library": """# mtmc: q=f16[B,6,1,16] k=f16[B,2,T,16] v=f16[B,2,T,16] B=2 T=100
def f(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
""",
    "expanded heads": """# mtmc: q=f16[B,6,1,16] k=f16[B,2,T,16] v=f16[B,2,T,16] B=2 T=100
def f(q, k, v):
    b, h, t, d = k.shape
    k = k[:, :, None].expand(b, h, 3, t, d).reshape(b, h * 3, t, d)
    v = v[:, :, None].expand(b, h, 3, t, d).reshape(b, h * 3, t, d)
    s = torch.matmul(q, k.transpose(2, 3)) / 4
    return torch.matmul(F.softmax(s, dim=-1, dtype=torch.float32).to(q.dtype), v)
""",
    "a few queries": """# mtmc: q=f16[B,6,4,16] k=f16[B,2,T,16] v=f16[B,2,T,16] lengths=i64[B]@1..100 B=2 T=100
def f(q, k, v, lengths):
    k, v = k.repeat_interleave(3, dim=1), v.repeat_interleave(3, dim=1)
    last = lengths[:, None] - 4 + torch.arange(4, device=q.device)
    mask = torch.arange(k.shape[2], device=q.device)[None, None, :] <= last[:, :, None]
    s = (q @ k.mT * 0.25).masked_fill(~mask[:, None], -1e4)
    return s.softmax(-1) @ v
""",
    "rows of heads": """# mtmc: q=f16[B,2,3,16] k=f16[B,2,T,16] v=f16[B,2,T,16] lengths=i64[B]@1..100 B=2 T=100
def f(q, k, v, lengths):
    s = torch.einsum("bhgd,bhtd->bhgt", q, k) * 0.25
    s = s.masked_fill(torch.arange(k.shape[2], device=q.device) >= lengths[:, None, None, None], float("-inf"))
    return torch.einsum("bhgt,bhtd->bhgd", s.softmax(-1), v)
""",
    "a part of the cache": """# mtmc: q=f16[B,3,1,16] k=f16[B,3,200,16] v=f16[B,3,200,16] bias=f16[T] B=2 T=100
def f(q, k, v, bias):
    n = bias.shape[0]
    s = q @ k[:, :, :n].transpose(-1, -2) * 0.25 + bias
    return torch.softmax(s, -1) @ v[:, :, :n]
""",
    "a sink of each head": """# mtmc: q=f16[B,6,1,16] k=f16[B,2,T,16] v=f16[B,2,T,16] sinks=f16[6] B=2 T=100
def f(q, k, v, sinks):
    k, v = k.repeat_interleave(3, dim=1), v.repeat_interleave(3, dim=1)
    s = torch.cat([q @ k.mT * 0.25, sinks.view(1, 6, 1, 1).expand(q.shape[0], 6, 1, 1)], -1)
    return s.softmax(-1)[..., :-1] @ v
""",
    "pages": """# mtmc: q=f16[B,6,1,16] k=f16[20,8,2,16] v=f16[20,8,2,16] table=i64[B,12]@0..19 lengths=i64[B]@1..96 B=2
def f(q, k, v, table, lengths):
    k = k[table].reshape(q.shape[0], -1, 2, 16).transpose(1, 2).repeat_interleave(3, dim=1)
    v = v[table].reshape(q.shape[0], -1, 2, 16).transpose(1, 2).repeat_interleave(3, dim=1)
    mask = torch.arange(k.shape[2], device=q.device)[None, :] < lengths[:, None]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None, None, :])
""",
}


WHOLE = ("products", "repeated heads", "a few queries", "rows of heads", "a sink of each head", "pages")
"""Forms that the fast suite runs without a split as well; those of the others only load or mask in another way."""


@pytest.fixture(scope="module")
def form(checker: Checker) -> Callable[[str], tuple[Capture, str]]:
    """The capture of a form, made once, and its text."""
    return lru_cache(lambda name: (checker.capture(HEAD + FORMS[name]), HEAD + FORMS[name]))


@pytest.mark.parametrize(
    ("name", "split"),
    [
        *((name, 4) for name in FORMS),
        *((name, 1) if name in WHOLE else pytest.param(name, 1, marks=pytest.mark.slow) for name in FORMS),
    ],
)
def test_a_query_reads_a_cache_in_one_pass(name: str, split: int, form) -> None:
    capture, text = form(name)
    candidate = fused(capture, text, {**CONFIG, "split": split})
    assert len(candidate.launches) == (2 if split > 1 else 1)
    verdict = verified(capture, candidate)
    assert verdict.is_correct, verdict.reason


def test_its_kernels_compile(form) -> None:
    for name in ("lengths", "repeated heads", "pages"):
        capture, text = form(name)
        assert not compile_errors(capture, fused(capture, text, {**CONFIG, "split": 4}), ("sm_80", "sm_90"))


@pytest.mark.parametrize("name", ["repeated heads", "grouped heads of the library", "expanded heads", "pages"])
def test_heads_of_a_group_share_the_loads_of_their_keys(name: str, form) -> None:
    candidate = fused(*form(name), CONFIG)
    assert "n_batch = 2 * B" in candidate.source, "two heads of keys for each sequence"


def test_keys_are_split_among_as_many_programs_as_fill_the_device(captured) -> None:
    for sequences, keys, split in ((1, 32768, 64), (4, 4096, 16), (64, 4096, 1), (1, 512, 2)):
        text = HEAD + FORMS["repeated heads"].replace("B=2 T=100", f"B={sequences} T={keys}")
        text = text.replace("6,1,16", "16,1,128").replace("2,T,16", "4,T,128").replace("(3, dim", "(4, dim")
        ir, region = region_and_program(captured(text, "f"))
        config = attention_config(ir, region, H200)
        assert (config.block_m, config.split) == (16, split)
        if split > 2:
            alone = kernel_cost(ir, region, replace(config, split=1), H200)
            assert alone.us > 1.2 * kernel_cost(ir, region, config, H200).us


def test_calls_with_many_queries_run_the_users_code_where_parts_would_need_much_memory(captured) -> None:
    text = HEAD + PLAIN.replace("B,3,1,16", "B,3,S,16").replace("B=2", "B=2 S=4")
    capture = captured(text, "f")
    assert "q.shape[2] <= 256" in fused(capture, text, {**CONFIG, "split": 4}).source
    assert "q.shape[2] <= 256" not in fused(capture, text, CONFIG).source


def test_keys_are_not_split_where_a_mask_limits_those_of_each_query(captured) -> None:
    text = (
        HEAD
        + """# mtmc: q=f16[B,3,T,16] k=f16[B,3,T,16] v=f16[B,3,T,16] B=2 T=50
def f(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)
"""
    )
    capture = captured(text, "f")
    with pytest.raises(CannotCode, match="split cannot be 2: a mask limits the keys of each query"):
        fused(capture, text, {**CONFIG, "split": 2})
