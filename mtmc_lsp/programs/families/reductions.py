"""Reductions, softmax variants and cumulative operations."""

from __future__ import annotations

from mtmc_lsp.programs import sizes
from mtmc_lsp.programs.draft import Draft, Tensor
from mtmc_lsp.programs.families.inputs import anything, rows, tokens
from mtmc_lsp.programs.family import Outputs, family
from mtmc_lsp.programs.pieces.elementwise import activation, binary, like_input, scaled, to_float, unary


@family("function")
def reduction(draft: Draft) -> Outputs:
    """A reduction over some dimensions, after and before elementwise operations."""
    x = anything(draft)
    for _ in range(draft.choose(0, 1, 2)):
        x = draft.apply(x, unary, scaled, activation)
    keeps = draft.chance(0.3)
    function = draft.choose("sum", "mean", "amax", "amin", "var", "std", "norm", "square_mean", "abs_max", "rms")
    dim = draft.choose(-1, -1, 0, 1) if x.rank > 2 else draft.choose(-1, -1, 0)
    dims = f"dim={dim}{', keepdim=True' if keeps else ''}"
    left = [size for index, size in enumerate(x.dims) if index != dim % x.rank]
    text = {
        "square_mean": f"{x}.square().mean({dims})",
        "abs_max": f"{x}.abs().amax({dims})",
        "rms": f"torch.sqrt({x}.float().pow(2).mean({dims}) + 1e-6)",
        "norm": f"torch.linalg.vector_norm({x}, ord={draft.choose(1, 2)}, {dims})",
    }.get(function, draft.call(x, function, dims))
    h = draft.then(x, text, "total", dims=left, dtype="f32" if function == "rms" else "")
    for _ in range(draft.choose(0, 1, 2)):
        h = draft.apply(h, unary, scaled)
    return h


@family("function")
def full_reduction(draft: Draft) -> Outputs:
    """One number of a whole tensor, or of two."""
    x = to_float(draft, anything(draft))
    if draft.chance(0.5):
        x = binary(draft, x, draft.input("y", *x.dims, dtype="f32"))
    for _ in range(draft.choose(0, 1, 2)):
        x = draft.apply(x, unary, scaled)
    h = draft.then(x, draft.call(x, draft.choose("sum", "mean", "amax", "norm", "std")), "total", dims=())
    return draft.apply(h, unary, scaled) if draft.chance(0.5) else h


@family("function")
def statistics(draft: Draft) -> Outputs:
    """Several statistics of the same tensor."""
    x = draft.keep(draft.choose(rows, tokens)(draft))
    names = draft.random.sample(("mean", "std", "low", "high", "energy", "spread"), draft.choose(2, 3))
    texts = {
        "mean": draft.call(x, "mean", "dim=-1"),
        "std": draft.call(x, "std", "dim=-1"),
        "low": draft.call(x, "amin", "dim=-1"),
        "high": draft.call(x, "amax", "dim=-1"),
        "energy": f"{x}.float().square().sum(dim=-1)",
        "spread": f"{x}.amax(dim=-1) - {x}.amin(dim=-1)",
    }
    values = [draft.let(name, texts[name], x, dims=x.dims[:-1]) for name in names]
    if draft.chance(0.4):
        return draft.let("out", f"torch.stack([{', '.join(value.text for value in values)}], dim=-1)", x)
    return tuple(values)


@family("function")
def standardize(draft: Draft) -> Outputs:
    """Rows or columns with zero mean, unit variance or range 0 to 1."""
    x = draft.keep(draft.choose(rows, tokens)(draft))
    h = draft.keep(to_float(draft, x))
    dim = draft.choose(-1, 0, 1) if x.rank > 2 else draft.choose(-1, 0)
    dims = f"dim={dim}, keepdim=True"
    kind = draft.choose("score", "range", "sum", "median_free", "peak")
    if kind == "score":
        mean, std = draft.let("mean", f"{h}.mean({dims})", h), draft.let("std", f"{h}.std({dims})", h)
        h = draft.let("out", f"({h} - {mean}) / ({std} + {draft.number('eps', 1e-6)})", h)
    elif kind == "range":
        low, high = draft.let("low", f"{h}.amin({dims})", h), draft.let("high", f"{h}.amax({dims})", h)
        h = draft.let("out", f"({h} - {low}) / ({high} - {low}).clamp(min=1e-6)", h)
    elif kind == "sum":
        h = draft.let("out", f"{h}.abs() / {h}.abs().sum({dims}).clamp(min=1e-6)", h)
    elif kind == "median_free":
        h = draft.let("centered", f"{h} - {h}.mean({dims})", h)
        h = draft.let("out", f"{h} / {h}.abs().mean({dims}).clamp(min=1e-6)", h)
    else:
        h = draft.let("out", f"{h} / {h}.abs().amax({dims}).clamp(min=1e-6)", h)
    h = activation(draft, h) if draft.chance(0.4) else scaled(draft, h)
    return like_input(draft, h, x)


@family("function")
def arg_reduction(draft: Draft) -> Outputs:
    """Positions of the largest or smallest values, and the values."""
    x = draft.keep(rows(draft))
    for _ in range(draft.choose(0, 1)):
        x = draft.keep(draft.apply(x, unary, scaled), "h")
    index = draft.let("index", draft.call(x, draft.choose("argmax", "argmin"), "dim=-1"), x, dims=x.dims[:1])
    kind = draft.choose("values", "agreement", "one_hot", "margin")
    if kind == "values":
        return index, draft.let("value", f"{x}.gather(-1, {index}.unsqueeze(-1)).squeeze(-1)", x, dims=x.dims[:1])
    if kind == "agreement":
        label = draft.input("label", x.dims[0], dtype="i64", values=f"0..{x.dims[1]}-1")
        return draft.let("accuracy", f"({index} == {label}).float().mean()", x)
    if kind == "one_hot":
        hot = draft.let("hot", f"torch.arange({x}.shape[-1], device={x}.device) == {index}[:, None]", x)
        return draft.let("picked", f"torch.where({hot}, {x}, torch.zeros_like({x}))", x)
    return index, draft.let("margin", f"{x}.amax(dim=-1) - {x}.mean(dim=-1)", x, dims=x.dims[:1])


@family()
def softmax(draft: Draft) -> Outputs:
    """Softmax and its relatives, with what comes before and after."""
    x = draft.choose(rows, rows, tokens)(draft, draft.choose("x", "logits", "scores"))
    for _ in range(draft.choose(0, 1, 1, 2)):
        x = draft.apply(x, scaled, unary)
    dim = -1 if draft.chance(0.75) else 1 if x.rank > 2 else 0
    kind = draft.choose("softmax", "log_softmax", "softmin", "written", "power", "relative")
    if kind in ("softmax", "log_softmax"):
        typed = ", dtype=torch.float32" if x.dtype != "f32" and draft.chance(0.4) else ""
        text, changed = (
            draft.choose(f"F.{kind}({x}, dim={dim}{typed})", f"torch.{kind}({x}, dim={dim}{typed})"),
            "f32" if typed else "",
        )
        h = draft.then(x, text, "probs", dtype=changed)
    elif kind == "softmin":
        h = draft.then(x, f"torch.softmax(-{x}, dim={dim})", "probs")
    elif kind == "written":
        h = _written_softmax(draft, draft.keep(to_float(draft, x)), dim)
    elif kind == "power":
        h = draft.keep(draft.then(x, f"torch.relu({x}) + {draft.number('floor', 0.01)}", "weights"), "weights")
        h = draft.let("probs", f"{h} / {h}.sum(dim={dim}, keepdim=True)", h)
    else:
        h = draft.then(
            x,
            f"torch.softmax({x}, dim={dim}) * {x}.shape[{dim}]"
            if x.text.isidentifier()
            else f"torch.softmax({x}, dim={dim})",
            "probs",
        )
    return draft.apply(h, scaled, unary) if draft.chance(0.4) else h


def _written_softmax(draft: Draft, x: Tensor, dim: int) -> Tensor:
    top = draft.let(
        "top", draft.choose(f"{x}.amax(dim={dim}, keepdim=True)", f"{x}.max(dim={dim}, keepdim=True).values"), x
    )
    e = draft.let("e", f"torch.exp({x} - {top})", x)
    below = draft.choose(f"{e}.sum(dim={dim}, keepdim=True)", f"(1.0 + {e}.sum(dim={dim}, keepdim=True))")
    return draft.let("probs", f"{e} / {below}", x)


@family("function")
def masked_softmax(draft: Draft) -> Outputs:
    """Softmax over the allowed positions of attention scores."""
    batch, heads, length = draft.size("B", (1, 2, 4, 8)), draft.size("H", sizes.HEADS), draft.size("S", sizes.SEQUENCE)
    scores = draft.input(draft.choose("scores", "attn"), batch, heads, length, length)
    h = (
        draft.then(scores, f"{scores} * {draft.number('scale', draft.choose(0.125, 0.0884))}")
        if draft.chance(0.6)
        else scores
    )
    kind = draft.choose("causal", "padding", "additive", "bias", "where")
    low = draft.choose(f"torch.finfo({scores}.dtype).min", "-1e4")
    if kind == "causal":
        h = draft.keep(h)
        allowed = draft.let(
            "allowed", f"torch.ones({scores}.shape[-2:], dtype=torch.bool, device={scores}.device).tril()", h
        )
        h = draft.let("h", f"{h}.masked_fill(~{allowed}, {low})", h)
    elif kind == "padding":
        mask = draft.input("mask", batch, length, dtype="bool")
        h = draft.then(h, f"{h}.masked_fill({mask}[:, None, None, :], {low})")
    elif kind == "additive":
        mask = draft.input("mask", batch, "1", length, length)
        h = draft.then(h, f"{h} + {mask}")
    elif kind == "bias":
        h = draft.then(h, f"{h} + {draft.input('bias', heads, length, length)}")
    else:
        mask = draft.input("mask", length, length, dtype="bool")
        h = draft.then(h, f"torch.where({mask}, {h}, {low})")
    if draft.chance(0.3):
        cap = draft.choose(30.0, 50.0)
        h = draft.then(h, f"torch.tanh({h} / {cap}) * {cap}")
    typed = scores.dtype != "f32" and draft.chance(0.6)
    h = draft.then(
        h,
        f"torch.softmax({h}, dim=-1{', dtype=torch.float32' if typed else ''})",
        "probs",
        dtype="f32" if typed else "",
    )
    h = like_input(draft, h, scores)
    return draft.then(h, f"{h}.nan_to_num(0.0)") if draft.chance(0.2) else h


@family("function")
def log_sum_exp(draft: Draft) -> Outputs:
    """Stable logarithms of sums, and what is computed from them."""
    x = to_float(draft, draft.choose(rows, tokens)(draft, "logits"))
    if draft.chance(0.5):
        x = scaled(draft, x)
    x = draft.keep(x, "z")
    dim = draft.choose(-1, -1, 1, 0)
    if draft.chance(0.5):
        lse = draft.let("lse", f"torch.logsumexp({x}, dim={dim})", x)
    else:
        top = draft.let("top", f"{x}.amax(dim={dim}, keepdim=True)", x)
        lse = draft.let("lse", f"({x} - {top}).exp().sum(dim={dim}).log() + {top}.squeeze({dim})", x)
    kind = draft.choose("soft_max", "z_loss", "normalised", "energy", "chain", "entropy")
    if kind == "z_loss":
        return draft.let("loss", f"{draft.number('weight', 1e-4)} * {lse}.square().{draft.choose('mean', 'sum')}()", x)
    if kind == "normalised":
        return draft.let("out", f"{x} - {lse}.unsqueeze({dim})", x)
    if kind == "energy":
        return draft.let("out", f"-{draft.number('temperature', 2.0)} * {lse}", x)
    if kind == "entropy":
        return draft.let("out", f"{lse} - (torch.softmax({x}, dim={dim}) * {x}).sum(dim={dim})", x)
    if kind == "chain":
        return unary(draft, scaled(draft, lse))
    return lse, draft.let("gap", f"{lse} - {x}.mean(dim={dim})", x)


@family("function")
def cumulative(draft: Draft) -> Outputs:
    """Running sums and products along a dimension."""
    x = draft.choose(rows, tokens)(draft)
    for _ in range(draft.choose(0, 1, 1)):
        x = draft.apply(x, scaled, activation, unary)
    dim = draft.choose(-1, 1, 0) if x.rank > 2 else draft.choose(-1, -1, 0)
    kind = draft.choose("sum", "exclusive", "reverse", "product", "logsum", "mean", "masked", "decay")
    x = draft.keep(to_float(draft, x), "h")
    if kind == "sum":
        h = draft.let("h", draft.call(x, "cumsum", f"dim={dim}"), x)
    elif kind == "exclusive":
        h = draft.let("h", f"{x}.cumsum(dim={dim}) - {x}", x)
    elif kind == "reverse":
        h = draft.let("h", f"{x}.flip({dim}).cumsum({dim}).flip({dim})", x)
    elif kind == "product":
        h = draft.let("h", f"torch.cumprod(torch.sigmoid({x}), dim={dim})", x)
    elif kind == "logsum":
        h = draft.let("h", f"torch.log(torch.cumsum(torch.exp({x}.clamp(max=10.0)), dim={dim}) + 1e-6)", x)
    elif kind == "mean":
        count = draft.let("count", f"torch.arange(1, {x}.shape[-1] + 1, device={x}.device)", x)
        h = draft.let("h", f"{x}.cumsum(-1) / {count}", x)
    elif kind == "masked":
        mask = draft.input("mask", *x.dims, dtype="bool")
        h = draft.let("h", f"({x} * {mask}).cumsum(dim={dim})", x)
    else:
        h = draft.let("h", f"torch.exp(-torch.cumsum(F.softplus({x}), dim={dim}))", x)
    return draft.apply(h, scaled, unary) if draft.chance(0.5) else h
