"""Pieces of language and diffusion transformers."""

from __future__ import annotations

from mtmc_lsp.programs import sizes
from mtmc_lsp.programs.draft import Draft, Tensor
from mtmc_lsp.programs.families.inputs import heads, rows, tokens
from mtmc_lsp.programs.family import Outputs, family
from mtmc_lsp.programs.pieces.elementwise import activation, like_input, scaled, to_float
from mtmc_lsp.programs.pieces.norms import l2_normalized, layer_norm, rms_norm
from mtmc_lsp.programs.pieces.products import linear


@family("function")
def rotary(draft: Draft) -> Outputs:
    """Rotary position embeddings: halves or pairs, whole or partial, one or two tensors, tables or angles."""
    head = draft.choose(32, 64, 96, 128)
    draft.size("B", (1, 2, 4, 8))
    draft.size("H", sizes.HEADS)
    x = draft.keep(draft.input("q", "B", "H", draft.size("S", sizes.SEQUENCE), str(head)))
    half = draft.choose("halves", "pairs")
    if draft.chance(0.4):
        freqs = draft.input("freqs", "S", str(head // 2), dtype="f32")
        cos, sin = draft.let("cos", f"{freqs}.cos()", freqs), draft.let("sin", f"{freqs}.sin()", freqs)
    else:
        typed = draft.choose("f32", draft.dtype)
        cos, sin = (draft.input(name, "S", str(head // 2), dtype=typed) for name in ("cos", "sin"))
    outputs = [_rotated(draft, x, cos, sin, half)]
    if draft.chance(0.3):
        k = draft.keep(draft.input("k", *x.dims))
        outputs.append(_rotated(draft, k, cos, sin, half))
    return tuple(outputs)


def _rotated(draft: Draft, x: Tensor, cos: Tensor, sin: Tensor, half: str) -> Tensor:
    h = draft.keep(to_float(draft, x)) if cos.dtype == "f32" else x
    if half == "halves":
        a, b = draft.unpack(("a", "b"), f"{h}.chunk(2, dim=-1)", h, x.dims)
        joined = f"torch.cat([{a} * {cos} - {b} * {sin}, {b} * {cos} + {a} * {sin}], dim=-1)"
    else:
        a, b = draft.let("even", f"{h}[..., 0::2]", h), draft.let("odd", f"{h}[..., 1::2]", h)
        joined = f"torch.stack([{a} * {cos} - {b} * {sin}, {a} * {sin} + {b} * {cos}], dim=-1).flatten(-2)"
    return like_input(draft, draft.let("rotated", joined, h), x)


@family("function")
def positions(draft: Draft) -> Outputs:
    """Sinusoidal embeddings of steps, frequencies of coordinates, distances as a bias."""
    kind = draft.choose("steps", "fourier", "distance", "relative", "grid")
    if kind in ("steps", "grid"):
        n, half = draft.size("N", (64, 256, 1024, 4096, 8192)), draft.choose(64, 128, 256, 192)
        t = draft.input("t", n, dtype="f32", values="0..1000")
        base = draft.choose("10000.0", "500.0", "1000.0")
        freqs = draft.let(
            "freqs", f"{base} ** (-torch.arange({half}, device={t}.device, dtype=torch.float32) / {half})", t
        )
        angles = draft.let("angles", f"{t}.unsqueeze(-1) * {freqs}", t)
        if kind == "steps":
            return scaled(draft, draft.let("out", f"torch.cat([{angles}.sin(), {angles}.cos()], dim=-1)", t))
        return draft.let("out", f"torch.stack([{angles}.sin(), {angles}.cos()], dim=-1).flatten(-2) * 0.5", t)
    if kind == "fourier":
        x = draft.input("coordinates", draft.size("N", sizes.ROWS), "3", dtype="f32")
        bands = draft.choose(4, 6, 10)
        scales = draft.let("scales", f"2.0 ** torch.arange({bands}, device={x}.device)", x)
        h = draft.let("h", f"({x}.unsqueeze(-1) * {scales}).flatten(1)", x)
        return draft.let("out", f"torch.cat([{x}, torch.sin({h}), torch.cos({h})], dim=-1)", x)
    draft.size("B", (1, 2, 4))
    scores = draft.keep(draft.input("scores", "B", draft.size("H", sizes.HEADS), draft.size("S", sizes.SEQUENCE), "S"))
    place = draft.let("place", f"torch.arange({scores}.shape[-1], device={scores}.device)", scores)
    offset = draft.let("offset", f"{place}[None, :] - {place}[:, None]", scores)
    if kind == "distance":
        slope = draft.input("slope", "H")
        h = draft.let("h", f"{scores} - {slope}[:, None, None] * {offset}.abs().to({scores}.dtype)", scores)
        return draft.then(h, f"torch.softmax({h}, dim=-1)") if draft.chance(0.6) else h
    window = draft.number("window", draft.choose(64, 128, 256))
    return draft.let("out", f"{scores}.masked_fill({offset}.abs() > {window}, -1e4)", scores)


@family()
def modulation(draft: Draft) -> Outputs:
    """Adaptive normalisation: scale, shift and gate computed from a condition."""
    x = draft.keep(tokens(draft))
    condition = draft.input(draft.choose("c", "cond", "temb"), "B", "D")
    parts = draft.choose(2, 3)
    if draft.chance(0.6):
        h = linear(draft, activation(draft, condition, ("silu", "gelu"), "e"), f"{parts}*D", "modulation", to="m")
    else:
        h = draft.input("m", "B", f"{parts}*D")
        draft.arguments.pop(condition.text)
    names = ("shift", "scale", "gate")[:parts]
    values = draft.unpack(names, f"{h}.unsqueeze(1).chunk({parts}, dim=-1)", h, ("B", "1", "D"))
    normed = (
        draft.choose(layer_norm, rms_norm)(draft, x, affine=draft.chance(0.3))
        if not draft.is_module
        else rms_norm(draft, x, affine=False)
    )
    out = draft.let("out", f"{normed} * (1.0 + {values[1]}) + {values[0]}", x)
    if parts == 3:
        return draft.let("gated", f"{x} + {values[2]} * {activation(draft, out)}", x)
    return out


@family("function")
def query_key_norm(draft: Draft) -> Outputs:
    """Heads of queries and keys, normalised and scaled."""
    q = heads(draft, "q")
    k = draft.input("k", *q.dims)
    kind = draft.choose("rms", "l2", "layer")
    outputs = []
    for x, name in ((q, "q"), (k, "k")):
        if kind == "l2":
            h = l2_normalized(draft, x)
            h = (
                draft.then(h, f"{h} * {draft.input(f'{name}_scale', 'H', '1', '1')}")
                if draft.chance(0.5)
                else scaled(draft, h)
            )
        else:
            h = (rms_norm if kind == "rms" else layer_norm)(draft, x, f"{name}_norm")
        outputs.append(h)
    return tuple(outputs)


@family()
def expert_router(draft: Draft) -> Outputs:
    """Gates of mixtures of experts: probabilities, balance losses, biases, weighted sums of experts."""
    kind = draft.choose("scores", "balance", "combine", "noisy", "sigmoid", "norm_weights")
    n, e = draft.size("N", sizes.ROWS), draft.size("E", sizes.EXPERTS)
    if kind == "combine":
        draft.sizes["N"], draft.sizes["E"] = draft.choose(512, 1024, 2048), draft.choose(2, 4, 8)
        outputs = draft.input("expert_outputs", n, e, draft.size("D", sizes.WIDTH[:10]))
        weights = draft.input("logits", n, e)
        h = draft.let("weights", f"torch.softmax({weights}, dim=-1)", weights)
        return draft.let(
            "out",
            draft.choose(f"({outputs} * {h}.unsqueeze(-1)).sum(dim=1)", f'torch.einsum("ned,ne->nd", {outputs}, {h})'),
            outputs,
        )
    if draft.chance(0.5):
        x = draft.input("x", n, draft.size("D", sizes.WIDTH))
        logits = linear(draft, x, e, "router", bias=False, to="logits")
    else:
        logits = draft.input("logits", n, e)
    logits = draft.keep(to_float(draft, logits))
    if kind == "scores":
        h = draft.let("probs", f"torch.softmax({logits}, dim=-1)", logits)
        return h, draft.let("top", f"{h}.amax(dim=-1)", h)
    if kind == "balance":
        h = draft.let("probs", f"torch.softmax({logits}, dim=-1)", logits)
        usage = draft.let("usage", f"{h}.mean(dim=0)", h)
        return draft.let(
            "loss",
            draft.choose(
                f"({usage} * {usage}).sum() * {logits}.shape[-1]", f"{usage}.var() / ({usage}.mean().square() + 1e-6)"
            ),
            usage,
        )
    if kind == "noisy":
        noise = draft.input("noise", n, e, dtype="f32")
        spread = draft.input("spread", n, e, dtype="f32")
        return draft.let("out", f"torch.softmax({logits} + {noise} * F.softplus({spread}), dim=-1)", logits)
    if kind == "sigmoid":
        bias = draft.input("bias", e, dtype="f32")
        h = draft.let("gates", f"torch.sigmoid({logits})", logits)
        return h, draft.let("choice", f"{h} + {bias}", h)
    h = draft.let("gates", f"torch.sigmoid({logits})", logits)
    return draft.let("out", f"{draft.number('scale', 2.5)} * {h} / ({h}.sum(dim=-1, keepdim=True) + 1e-20)", h)


@family("function")
def state_update(draft: Draft) -> Outputs:
    """One step of recurrent cells and state space models."""
    kind = draft.choose("gru", "lstm", "rnn", "minimal", "leaky", "ssm", "rwkv", "peephole")
    b, d = draft.size("B", (16, 64, 256, 1024, 4096)), draft.size("D", sizes.WIDTH[:12])
    if kind == "ssm":
        n = draft.size("N", (8, 16, 32, 64))
        h, x, dt = draft.input("state", b, d, n), draft.input("x", b, d), draft.input("dt", b, d)
        a, bm, cm = draft.input("A", d, n, values="-2..-0.1"), draft.input("Bm", b, n), draft.input("Cm", b, n)
        step = draft.let("step", f"F.softplus({dt})", dt)
        state = draft.let(
            "new_state",
            f"{h} * torch.exp({step}.unsqueeze(-1) * {a}) + ({step} * {x}).unsqueeze(-1) * {bm}.unsqueeze(1)",
            h,
        )
        return draft.let("y", f"({state} * {cm}.unsqueeze(1)).sum(dim=-1)", x), state
    h = draft.keep(draft.input("h", b, d))
    if kind in ("lstm", "peephole"):
        gates = draft.input("gates", b, f"4*{d}")
        i, f, g, o = draft.unpack(("i", "f", "g", "o"), f"{gates}.chunk(4, dim=-1)", gates, (b, d))
        forget = f"{f} + 1.0" if kind == "lstm" else f"{f} + {draft.input('peep', d)} * {h}"
        c = draft.let("c", f"torch.sigmoid({forget}) * {h} + torch.sigmoid({i}) * torch.tanh({g})", h)
        return c, draft.let("y", f"torch.sigmoid({o}) * {draft.choose(f'torch.tanh({c})', f'F.relu({c})')}", c)
    if kind == "gru":
        x, z = draft.input("gx", b, f"3*{d}"), draft.input("gh", b, f"3*{d}")
        xs = draft.unpack(("xr", "xz", "xn"), f"{x}.chunk(3, dim=-1)", x, (b, d))
        hs = draft.unpack(("hr", "hz", "hn"), f"{z}.chunk(3, dim=-1)", z, (b, d))
        r = draft.let("r", f"torch.sigmoid({xs[0]} + {hs[0]})", h)
        u = draft.let("u", f"torch.sigmoid({xs[1]} + {hs[1]})", h)
        new = draft.let("n", f"torch.tanh({xs[2]} + {r} * {hs[2]})", h)
        return draft.let("out", draft.choose(f"(1.0 - {u}) * {new} + {u} * {h}", f"{new} + {u} * ({h} - {new})"), h)
    x = draft.input("x", b, d)
    if kind == "rnn":
        y = linear(draft, x, d, "wx", to="a")
        z = linear(draft, h, d, "wh", bias=False, to="b")
        return draft.let("out", f"torch.tanh({y} + {z})", h)
    if kind == "minimal":
        gate = draft.let("z", f"torch.sigmoid({draft.input('gate', b, d)})", x)
        return draft.let(
            "out", f"(1.0 - {gate}) * {h} + {gate} * {activation(draft, x, ('tanh', 'silu', 'gelu'), 'a')}", h
        )
    if kind == "leaky":
        v = draft.let("v", f"{h} + ({x} - {h}) / {draft.number('tau', 2.0)}", h)
        spike = draft.let("spike", f"({v} >= 1.0).to({v}.dtype)", v)
        return spike, draft.let("reset", f"{v} * (1.0 - {spike})", v)
    decay, bonus = draft.input("decay", d, values="0.1..2"), draft.input("bonus", d)
    k = draft.let("k", f"torch.exp({draft.input('key', b, d)}.clamp(max=5.0))", x)
    return draft.let("new", f"torch.exp(-{decay}) * {h} + {k} * {x}", h), draft.let(
        "y", f"({h} + torch.exp({bonus}) * {k} * {x}) / ({k} + 1.0)", x
    )


@family()
def tied_head(draft: Draft) -> Outputs:
    """The end of a language model: norm, logits, cap, loss or probabilities."""
    x = rows(draft, "hidden")
    draft.sizes["N"], draft.sizes["D"] = draft.choose(32, 128, 512, 1000), draft.choose(*sizes.WIDTH[:10])
    h = draft.apply(x, layer_norm, rms_norm)
    h = linear(draft, h, draft.size("V", sizes.VOCABULARY[:6]), "lm_head", bias=False)
    if draft.chance(0.5):
        h = draft.keep(to_float(draft, h))
    if draft.chance(0.4):
        h = draft.then(h, f"30.0 * torch.tanh({h} / 30.0)")
    end = draft.choose("logits", "softmax", "log_softmax", "argmax", "scaled")
    if end == "scaled":
        return scaled(draft, h)
    return h if end == "logits" else draft.then(h, draft.call(h, end, "dim=-1"))
