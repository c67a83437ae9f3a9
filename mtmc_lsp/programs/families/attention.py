"""Attention in several forms."""

from __future__ import annotations

from mtmc_lsp.programs import sizes
from mtmc_lsp.programs.draft import Draft
from mtmc_lsp.programs.families.inputs import heads
from mtmc_lsp.programs.family import Outputs, family
from mtmc_lsp.programs.pieces.elementwise import activation, like_input
from mtmc_lsp.programs.pieces.norms import l2_normalized, token_norm
from mtmc_lsp.programs.pieces.products import attention, linear, merged_heads, split_heads


@family("function")
def head_attention(draft: Draft) -> Outputs:
    """Attention of projected heads with a mask."""
    q = draft.keep(heads(draft, "q"))
    length = draft.choose("S", draft.size("T", sizes.SEQUENCE))
    k, v = draft.keep(draft.input("k", "B", "H", length, "E")), draft.keep(draft.input("v", "B", "H", length, "E"))
    mask = (
        draft.choose("", "causal", "additive", "padding") if length == "S" else draft.choose("", "additive", "padding")
    )
    out = attention(draft, q, k, v, mask)
    if draft.chance(0.4):
        return draft.then(out, f"{out}.transpose(1, 2).flatten(2)")
    if draft.chance(0.3):
        gate = draft.input("gate", *q.dims)
        return draft.then(out, f"{out} * torch.sigmoid({gate})")
    return out


@family("function")
def grouped_attention(draft: Draft) -> Outputs:
    """Attention whose queries share keys and values."""
    draft.size("B", (1, 2, 4))
    draft.size("S", sizes.SEQUENCE)
    groups, shared, width = draft.choose(2, 4, 8), draft.size("G", (2, 4, 8)), str(draft.choose(*sizes.HEAD_WIDTH))
    q = draft.keep(draft.input("q", "B", f"{groups}*{shared}", "S", width))
    k, v = draft.input("k", "B", shared, "S", width), draft.input("v", "B", shared, "S", width)
    repeat = draft.choose(
        f"repeat_interleave({groups}, dim=1)", f"unsqueeze(2).expand(-1, -1, {groups}, -1, -1).flatten(1, 2)"
    )
    keys, values = (
        draft.let("keys", f"{k}.{repeat}", k, dims=q.dims),
        draft.let("values", f"{v}.{repeat}", v, dims=q.dims),
    )
    return attention(draft, q, keys, values, draft.choose("", "causal", "additive", "padding"))


@family("module")
def self_attention(draft: Draft) -> Outputs:
    """Self attention with its projections, as a module."""
    draft.size("B", (1, 2, 4, 8))
    draft.size("S", sizes.SEQUENCE)
    count = draft.choose(4, 8, 12, 16)
    draft.sizes["D"] = count * draft.choose(*sizes.HEAD_WIDTH)
    x = draft.keep(draft.input(draft.choose("x", "hidden_states"), "B", "S", "D"))
    h = draft.keep(token_norm(draft, x)) if draft.chance(0.3) else x
    number = draft.setting("num_heads", count)
    has_bias = draft.chance(0.5)
    if draft.chance(0.5):
        qkv = linear(draft, h, "3*D", "qkv", bias=has_bias, to="qkv")
        parts = draft.unpack(("q", "k", "v"), f"{qkv}.chunk(3, dim=-1)", qkv, x.dims)
    else:
        parts = tuple(linear(draft, h, "D", f"{name}_proj", bias=has_bias, to=name) for name in ("q", "k", "v"))
    q, k, v = (
        split_heads(draft, part, number, f"{name}_heads") for part, name in zip(parts, ("q", "k", "v"), strict=True)
    )
    if draft.chance(0.25):
        q, k = draft.keep(l2_normalized(draft, q)), draft.keep(l2_normalized(draft, k))
    out = attention(draft, q, k, v, draft.choose("", "", "causal", "additive"))
    out = linear(draft, merged_heads(draft, out, "D"), "D", "out_proj", bias=has_bias)
    # Without norm, residual and gate it would be the attention of every benchmark.
    if h is x or draft.chance(0.4):
        out = draft.keep(out, "out")
        gate = linear(draft, h, "D", "gate", bias=False, to="gate") if draft.chance(0.3) else None
        return draft.then(out, f"{out} * torch.sigmoid({gate})" if gate is not None else f"{x} + {out}")
    return out


@family("module")
def cross_attention(draft: Draft) -> Outputs:
    """Attention to a context, as a module."""
    draft.size("B", (1, 2, 4, 8))
    draft.size("S", sizes.SEQUENCE)
    draft.size("T", (77, 128, 256, 257))
    count = draft.choose(4, 8, 12)
    draft.sizes["D"] = count * draft.choose(*sizes.HEAD_WIDTH)
    draft.size("K", (512, 768, 1024))
    x, context = draft.keep(draft.input("x", "B", "S", "D")), draft.keep(draft.input("context", "B", "T", "K"))
    number = draft.setting("heads", count)
    q = split_heads(draft, linear(draft, x, "D", "to_q", bias=False, to="q"), number, "qh")
    if draft.chance(0.5):
        kv = linear(draft, context, "2*D", "to_kv", bias=False, to="kv")
        k, v = draft.unpack(("k", "v"), f"{kv}.chunk(2, dim=-1)", kv, ("B", "T", "D"))
    else:
        k, v = (linear(draft, context, "D", f"to_{name}", bias=False, to=name) for name in ("k", "v"))
    out = attention(
        draft, q, split_heads(draft, k, number, "kh"), split_heads(draft, v, number, "vh"), draft.choose("", "padding")
    )
    out = linear(draft, merged_heads(draft, out, "D"), "D", "to_out")
    return draft.then(out, f"{x} + {out}") if draft.chance(0.5) else out


@family("function")
def linear_attention(draft: Draft) -> Outputs:
    """Attention without softmax over positions: kernels of features, retention, channel attention."""
    q = draft.keep(heads(draft, "q"))
    k, v = draft.keep(draft.input("k", *q.dims)), draft.keep(draft.input("v", *q.dims))
    kind = draft.choose("features", "softmax", "channel", "retention")
    if kind == "channel":
        a, b = draft.keep(l2_normalized(draft, q)), draft.keep(l2_normalized(draft, k))
        scores = draft.let("scores", f"{a}.transpose(-2, -1) @ {b} * {draft.number('temperature', 1.5)}", q)
        weights = draft.let("weights", f"torch.softmax({scores}, dim=-1)", scores)
        return draft.let("out", f"({weights} @ {v}.transpose(-2, -1)).transpose(-2, -1)", v)
    if kind == "retention":
        place = draft.let("place", f"torch.arange({q}.shape[-2], device={q}.device)", q)
        gap = draft.let("gap", f"({place}[:, None] - {place}[None, :]).float()", q, dtype="f32")
        decay = draft.let("decay", f"torch.where({gap} >= 0, {draft.number('gamma', 0.97)} ** {gap}, 0.0)", gap)
        scores = draft.let("scores", f"({q} @ {k}.transpose(-2, -1)).float() * {decay}", gap)
        return like_input(draft, draft.let("out", f"{scores} @ {v}.float()", scores), v)
    if kind == "softmax":
        a = draft.let("a", f"torch.softmax({q}, dim=-1) * {q}.shape[-1] ** -0.5", q)
        b = draft.let("b", f"torch.softmax({k}, dim=-2)", k)
        context = draft.let("context", f"{b}.transpose(-2, -1) @ {v}", v)
        return draft.let("out", f"{a} @ {context}", v)
    feature = draft.choose("relu", "squared_relu", "softplus")
    a, b = (
        draft.keep(activation(draft, q, (feature,), "a"), "a"),
        draft.keep(activation(draft, k, (feature,), "b"), "b"),
    )
    context = draft.let("context", f"{b}.transpose(-2, -1) @ {v}", v)
    total = draft.let("total", f"({a} * {b}.sum(dim=-2, keepdim=True)).sum(dim=-1, keepdim=True) + 1e-3", a)
    return draft.let("out", f"({a} @ {context}) / {total}", v)


@family("function")
def decoding_attention(draft: Draft) -> Outputs:
    """One new token attends to a cache."""
    b, h, t, e = (
        draft.size("B", (1, 4, 16, 32)),
        draft.size("H", (8, 12, 16, 32)),
        draft.size("T", (512, 1000, 1024, 2048)),
        draft.size("E", (64, 80, 128)),
    )
    q = draft.keep(draft.input("q", b, h, e))
    k, v = draft.input("k_cache", b, h, t, e), draft.input("v_cache", b, h, t, e)
    scores = draft.let(
        "scores",
        draft.choose(f"({k} @ {q}.unsqueeze(-1)).squeeze(-1)", f'torch.einsum("bhd,bhtd->bht", {q}, {k})'),
        q,
        dims=(b, h, t),
    )
    scores = draft.then(scores, f"{scores}.float() * {draft.number('scale', 0.0884)}", dtype="f32")
    if draft.chance(0.6):
        lengths = draft.input("lengths", b, dtype="i64", values=f"1..{t}")
        scores = draft.keep(scores, "s")
        valid = draft.let("valid", f"torch.arange({k}.shape[2], device={q}.device) < {lengths}[:, None]", lengths)
        scores = draft.let("masked", f'{scores}.masked_fill(~{valid}[:, None, :], float("-inf"))', scores)
    weights = draft.let("weights", f"torch.softmax({scores}, dim=-1).to({v}.dtype)", scores)
    return draft.let(
        "out",
        draft.choose(f"({weights}.unsqueeze(-2) @ {v}).squeeze(-2)", f'torch.einsum("bht,bhtd->bhd", {weights}, {v})'),
        v,
    )
