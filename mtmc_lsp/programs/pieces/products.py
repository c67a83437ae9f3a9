"""Linear layers, matrix products, heads and attention."""

from __future__ import annotations

from mtmc_lsp.programs.draft import Draft, Tensor
from mtmc_lsp.programs.pieces.elementwise import to_float


def linear(
    draft: Draft, x: Tensor, width: str, name: str = "proj", *, bias: bool | None = None, to: str = ""
) -> Tensor:
    """A linear layer on the last dimension.

    Args:
        width: its number of outputs.
        to: name of the variable; by default chosen by the style.
    """
    has_bias = draft.chance(0.6) if bias is None else bias
    dims = (*x.dims[:-1], width)
    if draft.is_module:
        sizes = f"{draft.constructed(x.dims[-1])}, {draft.constructed(width)}"
        layer = draft.layer(name, f"nn.Linear({sizes}{'' if has_bias else ', bias=False'})")
        text = f"{layer}({x})"
    else:
        is_transposed = draft.chance(0.25)
        weight = draft.parameter(f"{name}_weight", *((x.dims[-1], width) if is_transposed else (width, x.dims[-1])))
        offset = f"{draft.parameter(f'{name}_bias', width)}" if has_bias else ""
        text = f"{x} @ {weight}{f' + {offset}' if offset else ''}"
        if not is_transposed:
            text = f"F.linear({x}, {weight}{f', {offset}' if offset else ''})"
    return draft.let(to, text, x, dims=dims) if to else draft.then(x, text, dims=dims)


def split_heads(draft: Draft, x: Tensor, heads: str, name: str) -> Tensor:
    """``[B, S, D]`` as ``[B, heads, S, D / heads]``."""
    text = f"{x}.view({x}.shape[0], -1, {heads}, {x}.shape[-1] // {heads}).transpose(1, 2)"
    return draft.let(name, text, x, dims=(x.dims[0], heads, x.dims[1], "?"))


def merged_heads(draft: Draft, x: Tensor, width: str) -> Tensor:
    """The inverse of :func:`split_heads`."""
    text = draft.choose(f"{x}.transpose(1, 2).flatten(2)", f"{x}.transpose(1, 2).contiguous().flatten(-2)")
    return draft.then(x, text, "merged", dims=(x.dims[0], x.dims[2], width))


def attention(draft: Draft, q: Tensor, k: Tensor, v: Tensor, mask: str = "") -> Tensor:
    """Attention of heads.

    Args:
        mask: ``causal``, ``additive`` or ``padding`` with an argument of its own, or empty.
    """
    kind = draft.choose("library", "written", "written") if mask in ("", "causal") else "written"
    if kind == "library":
        return draft.let("out", f"F.scaled_dot_product_attention({q}, {k}, {v}{', is_causal=True' if mask else ''})", q)
    root = draft.choose(f"{q}.shape[-1] ** -0.5", f"(1.0 / math.sqrt({q}.shape[-1]))")
    transposed = draft.choose("transpose(-2, -1)", "transpose(-1, -2)", "mT")
    dims = (*q.dims[:-1], k.dims[-2])
    product = f"torch.einsum('bhqd,bhkd->bhqk', {q}, {k})".replace("'", '"')
    scores = draft.let(
        "scores", draft.choose(f"{q} @ {k}.{transposed}", f"torch.matmul({q}, {k}.{transposed})", product), q, dims=dims
    )
    scores = draft.then(scores, f"{scores} * {root}", "scores")
    scores = _masked(draft, scores, q, k, mask)
    if draft.chance(0.4):
        scores = to_float(draft, scores)
    weights = draft.let("weights", f"torch.softmax({scores}, dim=-1)", scores)
    if weights.dtype != v.dtype:
        weights = draft.then(weights, f"{weights}.to({v}.dtype)", dtype=v.dtype)
    return draft.let("out", draft.choose(f"{weights} @ {v}", f"torch.matmul({weights}, {v})"), v, dims=q.dims)


def _masked(draft: Draft, scores: Tensor, q: Tensor, k: Tensor, mask: str) -> Tensor:
    if mask == "causal":
        scores = draft.keep(scores, "scores")
        size = f"{q}.shape[-2], {k}.shape[-2], dtype=torch.bool, device={q}.device"
        allowed = draft.let("causal", f"torch.ones({size}).tril()", scores)
        return draft.let("masked", f'{scores}.masked_fill(~{allowed}, float("-inf"))', scores)
    if mask == "additive":
        bias = draft.input("mask", q.dims[-2], k.dims[-2])
        return draft.then(scores, f"{scores} + {bias}", "scores")
    if mask == "padding":
        keep = draft.input("keep", k.dims[0], k.dims[-2], dtype="bool")
        fill = draft.choose("-1e4", 'float("-inf")') if scores.dtype == "f32" else "-1e4"
        return draft.then(scores, f"{scores}.masked_fill(~{keep}[:, None, None, :], {fill})", "scores")
    return scores
