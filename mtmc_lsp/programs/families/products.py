"""Matrix products with epilogues."""

from __future__ import annotations

from mtmc_lsp.programs import sizes
from mtmc_lsp.programs.draft import Draft, Tensor
from mtmc_lsp.programs.families.inputs import image, rows, tokens
from mtmc_lsp.programs.family import Outputs, family
from mtmc_lsp.programs.pieces.elementwise import GATES, activation, chain, dropout, like_input, scaled, to_float, unary
from mtmc_lsp.programs.pieces.norms import l2_normalized, layer_norm, rms_norm
from mtmc_lsp.programs.pieces.products import linear


def _matrix(draft: Draft, name: str, *dims: str) -> Tensor:
    return draft.input(name, *dims)


@family()
def linear_epilogue(draft: Draft) -> Outputs:
    """A linear layer and a chain of elementwise operations."""
    x = draft.choose(rows, tokens)(draft)
    draft.sizes["D"] = draft.choose(*sizes.WIDTH)
    h = linear(draft, x, draft.size("M", sizes.WIDTH), draft.choose("proj", "fc", "linear"))
    extra = [draft.input("residual", *h.dims)] if draft.chance(0.4) else []
    return chain(draft, h, extra, draft.choose(1, 2, 3, 4))


@family()
def linear_reduction(draft: Draft) -> Outputs:
    """A linear layer whose results are reduced or normalised."""
    x = draft.choose(rows, tokens)(draft)
    draft.sizes["D"] = draft.choose(*sizes.WIDTH)
    h = linear(draft, x, draft.size("M", sizes.CLASSES), draft.choose("head", "classifier", "score"))
    if draft.chance(0.5):
        h = draft.apply(h, scaled, activation)
    kind = draft.choose("softmax", "log_softmax", "amax", "logsumexp", "argmax", "sum")
    if kind in ("softmax", "log_softmax"):
        return draft.then(h, f"F.{kind}({h}, dim=-1)")
    h = draft.then(h, draft.call(h, kind, "dim=-1"))
    return h if kind == "argmax" else scaled(draft, h)


@family("function")
def matmul_chain(draft: Draft) -> Outputs:
    """A product of two matrices, also transposed, with scales, a bias or a residual."""
    m, k, n = draft.size("M", sizes.ROWS[:8]), draft.size("K", sizes.WIDTH), draft.size("N", sizes.WIDTH)
    a = _matrix(draft, "a", *((k, m) if (is_left := draft.chance(0.25)) else (m, k)))
    b = _matrix(draft, "b", *((n, k) if (is_right := draft.chance(0.5)) else (k, n)))
    left, right = f"{a}.t()" if is_left else f"{a}", f"{b}.t()" if is_right else f"{b}"
    h = draft.then(
        a,
        draft.choose(f"{left} @ {right}", f"torch.mm({left}, {right})", f"torch.matmul({left}, {right})"),
        "c",
        dims=(m, n),
    )
    if draft.chance(0.3):
        h = draft.then(
            h, f"{draft.number('alpha', 0.5)} * {h} + {draft.number('beta', 2.0)} * {draft.input('c_in', m, n)}"
        )
    elif draft.chance(0.4):
        h = draft.then(h, f"{h} + {draft.input('bias', n)}")
    for _ in range(draft.choose(0, 1, 2)):
        h = draft.apply(h, activation, scaled, unary)
    return h


@family("function")
def batched_matmul(draft: Draft) -> Outputs:
    """Products of batches of matrices with scale, bias or softmax."""
    b, m, n, k = (
        draft.size("B", (8, 16, 32, 64, 96)),
        draft.size("M", sizes.SEQUENCE[:8]),
        draft.size("N", sizes.SEQUENCE[:8]),
        draft.size("K", (32, 64, 80, 128, 256)),
    )
    x = _matrix(draft, "x", b, m, k)
    is_transposed = draft.chance(0.5)
    y = _matrix(draft, "y", *((b, n, k) if is_transposed else (b, k, n)))
    right = f"{y}.transpose(1, 2)" if is_transposed else f"{y}"
    h = draft.then(
        x,
        draft.choose(f"torch.bmm({x}, {right})", f"{x} @ {right}", f"torch.matmul({x}, {right})"),
        "scores",
        dims=(b, m, n),
    )
    kind = draft.choose("scale", "bias", "softmax", "mask", "chain")
    if kind == "bias":
        h = draft.then(h, f"{h} + {draft.input('bias', m, n)}")
    elif kind == "softmax":
        h = draft.then(h, f"torch.softmax({h} * {draft.number('scale', 0.125)}, dim=-1)")
    elif kind == "mask":
        h = draft.then(h, f"{h}.masked_fill({draft.input('mask', b, m, n, dtype='bool')}, 0.0)")
    elif kind == "chain":
        h = activation(draft, h)
    return scaled(draft, h)


@family("function")
def einsum(draft: Draft) -> Outputs:
    """Contractions written with einsum."""
    b, s, d, h = (
        draft.size("B", (2, 4, 8, 16)),
        draft.size("S", sizes.SEQUENCE),
        draft.size("D", (32, 64, 96, 128)),
        draft.size("H", sizes.HEADS),
    )
    kind = draft.choose("weights", "pair", "mix", "outer", "bilinear")
    x = draft.input("x", b, s, h, d)
    if kind == "weights":
        text, dims = f'torch.einsum("bshd,hde->bshe", {x}, {draft.input("w", h, d, d)})', x.dims
    elif kind == "pair":
        text, dims = f'torch.einsum("bshd,bthd->bhst", {x}, {draft.input("y", *x.dims)})', (b, h, s, s)
    elif kind == "mix":
        text, dims = f'torch.einsum("bshd,hg->bsgd", {x}, {draft.input("w", h, h)})', x.dims
    elif kind == "outer":
        text, dims = f'torch.einsum("bshd,bshe->bhde", {x}, {draft.input("y", *x.dims)})', (b, h, d, d)
    else:
        text, dims = f'torch.einsum("bshd,bshd->bsh", {x}, {draft.input("y", *x.dims)})', (b, s, h)
    out = draft.then(x, text, "out", dims=dims)
    for _ in range(draft.choose(1, 2)):
        out = draft.apply(out, scaled, activation)
    return out


@family()
def low_rank(draft: Draft) -> Outputs:
    """Adapters: LoRA, bottlenecks and factorised layers."""
    x = draft.keep(draft.choose(rows, tokens)(draft))
    draft.sizes["D"] = draft.choose(*sizes.WIDTH)
    rank = draft.size("R", (4, 8, 16, 32, 64))
    kind = draft.choose("lora", "adapter", "factorised", "scaled_adapter")
    down = linear(draft, x, rank, "down", bias=False if kind == "lora" else None)
    if kind in ("adapter", "scaled_adapter"):
        down = activation(draft, down, ("relu", "gelu", "silu"))
    if kind == "lora":
        out = draft.size("M", sizes.WIDTH)
        up = linear(draft, down, out, "up", bias=False, to="delta")
        base = linear(draft, x, out, "base", to="out")
        return scaled(draft, draft.then(base, f"{base} + {draft.number('scaling', draft.choose(2.0, 0.5))} * {up}"))
    up = linear(draft, down, "D", "up", to="delta")
    return (
        draft.let("out", f"{x} + {0.1 if kind == 'scaled_adapter' else draft.number('scale', 1.0)} * {up}", x)
        if kind != "factorised"
        else activation(draft, up)
    )


@family()
def gated_mlp(draft: Draft) -> Outputs:
    """GLU variants: a gate times a value, with or without the projections around."""
    width = draft.size("I", (512, 1024, 1376, 2048, 2816, 4096, 5504))
    packed = draft.chance(0.4)
    if packed and draft.chance(0.5):
        x = draft.input("x", draft.size("N", sizes.ROWS), f"2*{width}")
        a, b = draft.unpack(("a", "b"), f"{x}.chunk(2, dim=-1)", x, ("N", width))
        gate, value = draft.choose((a, b), (b, a))
        g = activation(draft, gate, GATES, "g")
        h = draft.let("out", f"{g} * {value}", g)
        return draft.apply(h, dropout, scaled, layer_norm) if draft.chance(0.7) else h
    x = draft.keep(tokens(draft))
    if packed:
        h = linear(draft, x, f"2*{width}", "gate_up", to="h")
        gate, value = draft.unpack(("gate", "up"), f"{h}.chunk(2, dim=-1)", h, ("B", "S", width))
    else:
        gate, value = linear(draft, x, width, "w1", to="gate"), linear(draft, x, width, "w3", to="up")
    g = activation(draft, gate, GATES, "g")
    h = draft.let("h", draft.choose(f"{g} * {value}", f"{value} * {g}"), value)
    if draft.chance(0.25):
        h = rms_norm(draft, h)
    if draft.chance(0.65):
        h = linear(draft, h, "D", "w2")
    return draft.then(h, f"{x} + {h}") if h.dims == x.dims and draft.chance(0.4) else h


@family()
def mlp(draft: Draft) -> Outputs:
    """Two or three linear layers with activations."""
    x = draft.keep(draft.choose(rows, tokens)(draft))
    draft.sizes["D"] = draft.choose(*sizes.WIDTH)
    h: Tensor = x
    if draft.chance(0.3):
        h = draft.apply(h, layer_norm, rms_norm)
    kind = draft.choose("relu", "gelu", "silu", "tanh", "gelu_tanh", "squared_relu", "mish", "elu")
    for number in range(1, draft.choose(2, 2, 3)):
        h = linear(draft, h, draft.size(f"I{number}" if number > 1 else "I", sizes.WIDTH), f"fc{number}")
        h = activation(draft, h, (kind,))
        if draft.chance(0.2):
            h = dropout(draft, h)
    h = linear(draft, h, draft.choose("D", draft.size("M", sizes.WIDTH)), "out")
    return draft.then(h, f"{x} + {h}") if h.dims == x.dims and draft.chance(0.4) else h


@family("function")
def similarity(draft: Draft) -> Outputs:
    """Scores and distances between all pairs of two sets of vectors."""
    m, n, d = draft.size("M", sizes.ROWS[:8]), draft.size("N", sizes.ROWS[:6]), draft.size("D", sizes.WIDTH[:10])
    a, b = draft.keep(draft.input("queries", m, d)), draft.keep(draft.input("keys", n, d))
    kind = draft.choose("cosine", "euclidean", "rbf", "dot", "assign", "cauchy")
    if kind == "cosine":
        a, b = draft.keep(l2_normalized(draft, a)), draft.keep(l2_normalized(draft, b))
    product = draft.let("products", f"{a} @ {b}.t()", a, dims=(m, n))
    if kind in ("euclidean", "rbf", "assign", "cauchy"):
        squares = f"{a}.square().sum(-1, keepdim=True) + {b}.square().sum(-1)"
        distance = draft.let("distances", f"({squares} - 2.0 * {product}).clamp(min=0.0)", product)
        if kind == "rbf":
            return draft.let("kernel", f"torch.exp(-{draft.number('gamma', 0.05)} * {distance})", distance)
        if kind == "assign":
            return draft.let("index", f"{distance}.argmin(dim=-1)", distance)
        if kind == "cauchy":
            return draft.let("kernel", f"1.0 / (1.0 + {distance} / {draft.number('sigma', 4.0)})", distance)
        return draft.let("out", f"torch.sqrt({distance} + 1e-8)", distance)
    h = scaled(draft, product)
    return draft.then(h, draft.choose(f"torch.softmax({h}, dim=-1)", f"torch.tanh({h})", f"{h}.amax(dim=-1)"))


@family("function")
def quantized_linear(draft: Draft) -> Outputs:
    """Linear layers with weights of 8 bits and their scales."""
    draft.dtype = draft.choose("f16", "bf16", "f32")
    n, k, m = draft.size("N", sizes.ROWS[:7]), draft.size("K", sizes.WIDTH[6:]), draft.size("M", sizes.WIDTH[6:])
    x = draft.input("x", n, k)
    weight = draft.input("weight", m, k, dtype="i8", values="-127..127")
    scale = draft.input("scale", m)
    kind = draft.choose("rows", "after", "zero", "dynamic")
    if kind == "rows":
        w = draft.let("w", f"{weight}.to({x}.dtype) * {scale}.unsqueeze(1)", x, dims=(m, k))
        h = draft.let("out", f"F.linear({x}, {w})", x, dims=(n, m))
    elif kind == "after":
        h = draft.let("out", f"({x} @ {weight}.to({x}.dtype).t()) * {scale}", x, dims=(n, m))
    elif kind == "zero":
        zero = draft.input("zero_point", m)
        w = draft.let("w", f"({weight}.to({x}.dtype) - {zero}[:, None]) * {scale}[:, None]", x, dims=(m, k))
        h = draft.let("out", f"{x} @ {w}.t()", x, dims=(n, m))
    else:
        step = draft.let(
            "step", f"{x}.abs().amax(dim=-1, keepdim=True).float().clamp(min=1e-5) / 127.0", x, dtype="f32"
        )
        q = draft.let("q", f"torch.round({x}.float() / {step}).clamp(-128.0, 127.0)", step, dims=(n, k))
        h = draft.let("out", f"(({q} @ {weight}.float().t()) * {step} * {scale}.float()).to({x}.dtype)", x, dims=(n, m))
    if draft.chance(0.5):
        h = draft.then(h, f"{h} + {draft.input('bias', m)}")
    return activation(draft, h) if draft.chance(0.4) else h


@family("function")
def feature_interaction(draft: Draft) -> Outputs:
    """Interactions of recommender models."""
    b, f, d = (
        draft.size("B", (512, 1024, 2048, 4096)),
        draft.size("F", (8, 13, 26, 39)),
        draft.size("D", (8, 16, 32, 64)),
    )
    kind = draft.choose("machine", "cross", "dots", "product", "gate")
    if kind in ("cross", "gate"):
        draft.sizes["D"] = draft.choose(64, 128, 429, 845, 1024)
        x0, x = draft.input("x0", b, d), draft.input("x", b, d)
        weight, bias = draft.input("weight", d, d), draft.input("bias", d)
        h = draft.let("out", f"{x0} * (F.linear({x}, {weight}, {bias})) + {x}", x)
        return activation(draft, h) if kind == "gate" else scaled(draft, h)
    e = draft.keep(draft.input("embeddings", b, f, d))
    if kind == "machine":
        e = draft.keep(to_float(draft, e))
        h = draft.let("out", f"0.5 * ({e}.sum(dim=1).square() - {e}.square().sum(dim=1)).sum(dim=-1)", e, dims=(b,))
        if draft.chance(0.5):
            return unary(draft, h)
        return draft.then(h, f"torch.sigmoid({h} + {draft.input('linear', b)})")
    if kind == "dots":
        h = draft.let("dots", f"torch.bmm({e}, {e}.transpose(1, 2))", e)
        return draft.then(h, f"{h}.flatten(1) * {draft.number('scale', 0.25)}")
    h = draft.let("out", f"({e} * {draft.input('context', b, d)}.unsqueeze(1)).sum(dim=-1)", e)
    return draft.then(h, f"torch.softmax({h}, dim=-1)")


@family()
def channel_attention(draft: Draft) -> Outputs:
    """Squeeze and excitation, and gates of channels computed elsewhere."""
    x = draft.keep(image(draft))
    pooled = draft.let("s", f"{x}.mean(dim=(2, 3))", x, dims=("B", "C"))
    kind = draft.choose("bottleneck", "single", "max_too", "softmax")
    reduced = draft.size("R", (8, 12, 16, 24, 32))
    if kind == "single":
        s = linear(draft, pooled, "C", "fc", to="s2")
    else:
        s = linear(
            draft,
            activation(draft, linear(draft, pooled, reduced, "fc1", to="r"), ("relu", "silu", "gelu"), "r"),
            "C",
            "fc2",
            to="e",
        )
    if kind == "max_too":
        s = draft.let("m", f"{s} + {x}.amax(dim=(2, 3))", s)
    if kind == "softmax":
        s = draft.let("weights", f"torch.softmax({s}, dim=-1)", s)
    else:
        s = activation(draft, s, ("sigmoid", "hardsigmoid"), "weights")
    h = draft.let("out", f"{x} * {s}[:, :, None, None]", x)
    return like_input(draft, h, x)
