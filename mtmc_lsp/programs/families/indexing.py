"""Embeddings, gathers, scatters and changes of layout."""

from __future__ import annotations

from mtmc_lsp.programs import sizes
from mtmc_lsp.programs.draft import Draft
from mtmc_lsp.programs.families.inputs import heads, image, rows, tokens
from mtmc_lsp.programs.family import Outputs, family
from mtmc_lsp.programs.pieces.elementwise import activation, dropout, scaled, unary
from mtmc_lsp.programs.pieces.norms import token_norm


@family()
def embedding(draft: Draft) -> Outputs:
    """Token embeddings with positions, types, scales and a norm."""
    b, s, v, d = (
        draft.size("B", sizes.BATCH),
        draft.size("S", sizes.SEQUENCE),
        draft.size("V", sizes.VOCABULARY),
        draft.size("D", sizes.WIDTH[:12]),
    )
    ids = draft.input(draft.choose("input_ids", "tokens", "ids"), b, s, dtype="i64", values=f"0..{v}-1")
    if draft.is_module:
        layer = draft.layer("embed", f"nn.Embedding({draft.constructed(v)}, {draft.constructed(d)})")
        h = draft.let("h", f"{layer}({ids})", ids, dims=(b, s, d), dtype=draft.dtype)
    else:
        table = draft.input("table", v, d)
        h = draft.let("h", draft.choose(f"F.embedding({ids}, {table})", f"{table}[{ids}]"), table, dims=(b, s, d))
    for step in draft.random.sample(("position", "type", "scale", "norm", "mask", "dropout"), draft.choose(1, 2, 3)):
        if step == "position":
            h = draft.then(h, f"{h} + {draft.parameter('positions', s, d, initial='torch.zeros')}")
        elif step == "type":
            kinds = draft.input("type_ids", b, s, dtype="i64", values="0..1")
            table = draft.parameter("type_table", "2", d)
            h = draft.then(h, f"{h} + F.embedding({kinds}, {table})")
        elif step == "scale":
            h = draft.then(h, f"{h} * {draft.choose('22.627417', '27.712813', '16.0')}")
        elif step == "norm":
            h = token_norm(draft, h)
        elif step == "mask":
            h = draft.then(h, f"{h} * {draft.input('mask', b, s)}.unsqueeze(-1)")
        else:
            h = dropout(draft, h)
    return h


@family("function")
def gather(draft: Draft) -> Outputs:
    """Rows or elements picked by indices, and what is done with them."""
    x = draft.keep(rows(draft, draft.choose("x", "table", "features")))
    n, d = x.dims
    kind = draft.choose("select", "take", "pairs", "label", "edges", "sorted")
    m = draft.size("M", sizes.ROWS)
    if kind in ("select", "sorted"):
        index = draft.input("index", m, dtype="i64", values=f"0..{n}-1")
        h = draft.let("h", draft.choose(f"{x}[{index}]", f"{x}.index_select(0, {index})"), x, dims=(m, d))
        h = draft.then(h, f"{h} * {draft.input('weight', m)}.unsqueeze(-1)") if draft.chance(0.6) else h
        return draft.apply(h, activation, scaled, unary)
    if kind == "take":
        index = draft.input("index", n, "8", dtype="i64", values=f"0..{d}-1")
        h = draft.let("picked", f"{x}.gather(1, {index})", x, dims=(n, "8"))
        return draft.then(
            h, draft.choose(f"torch.softmax({h}, dim=-1)", f"{h}.mean(dim=-1)", f"{h} - {h}.amax(dim=-1, keepdim=True)")
        )
    if kind == "label":
        label = draft.input("label", n, dtype="i64", values=f"0..{d}-1")
        h = draft.let("picked", f"{x}[torch.arange({x}.shape[0], device={x}.device), {label}]", x, dims=(n,))
        return draft.then(
            h,
            draft.choose(
                f"{h} - {x}.amax(dim=-1)",
                f"({x} - {h}.unsqueeze(1) + 1.0).clamp(min=0.0).sum(dim=-1)",
                f"{h} - {x}.mean(dim=-1)",
            ),
        )
    first, second = (draft.input(name, m, dtype="i64", values=f"0..{n}-1") for name in ("source", "target"))
    a, b = draft.let("a", f"{x}[{first}]", x, dims=(m, d)), draft.let("b", f"{x}[{second}]", x, dims=(m, d))
    if kind == "pairs":
        return draft.let(
            "score",
            draft.choose(
                f"({a} * {b}).sum(dim=-1)", f"torch.sigmoid(({a} * {b}).sum(dim=-1))", f"({a} - {b}).abs().sum(dim=-1)"
            ),
            a,
            dims=(m,),
        )
    return activation(
        draft, draft.let("message", draft.choose(f"{a} - {b}", f"torch.cat([{a}, {b} - {a}], dim=-1)"), a)
    )


@family("function")
def scatter(draft: Draft) -> Outputs:
    """Sums of rows with the same index: messages of graphs, segments, histograms."""
    draft.dtype = "f32"
    e, n, d = (
        draft.size("E", (2000, 8192, 20000, 65536)),
        draft.size("N", (500, 1000, 2708, 10000)),
        draft.size("D", (16, 32, 64, 128)),
    )
    x = draft.input("x", n, d)
    target = draft.input("target", e, dtype="i64", values=f"0..{n}-1")
    kind = draft.choose("graph", "mean", "weighted", "degree")
    if kind == "degree":
        weight = draft.input("weight", e, values="0..1")
        degree = draft.let(
            "degree",
            f"torch.zeros({x}.shape[0], device={x}.device).index_add(0, {target}, {weight})",
            weight,
            dims=(n,),
        )
        return draft.let("out", f"{x} * torch.rsqrt({degree} + 1.0).unsqueeze(-1)", x)
    message = draft.input("message", e, d)
    if kind == "weighted":
        message = draft.let("weighted", f"{message} * {draft.input('alpha', e)}.unsqueeze(-1)", message)
    if kind == "graph":
        message = activation(draft, message, name="message2")
    h = draft.let("total", f"torch.zeros_like({x}).index_add(0, {target}, {message})", x)
    if kind == "mean":
        count = draft.input("count", n, values="0..9")
        h = draft.let("average", f"{h} / {count}.clamp(min=1.0).unsqueeze(-1)", h)
    return draft.then(
        h, draft.choose(f"{x} + {h}", f"torch.relu({x} + {h})", f"(1.0 + {draft.number('eps', 0.1)}) * {x} + {h}")
    )


@family("function")
def layout(draft: Draft) -> Outputs:
    """Transposes, chunks, concatenations and shifts, with a little arithmetic."""
    kind = draft.choose("heads", "merge", "shuffle", "roll", "pad", "flat", "interleave", "shift")
    if kind == "merge":
        x = heads(draft, "x")
        return scaled(draft, draft.then(x, f"{x}.transpose(1, 2).flatten(2)", dims=("B", "S", "H*E")))
    if kind in ("shuffle", "flat", "roll", "pad"):
        x = draft.keep(image(draft))
        text = {
            "shuffle": f"{x}.unflatten(1, (4, -1)).transpose(1, 2).flatten(1, 2)",
            "flat": f"{x}.flatten(2).transpose(1, 2)",
            "roll": f"torch.roll({x}, shifts=(-3, -3), dims=(2, 3))",
            "pad": f"F.pad({x}, (1, 1, 1, 1))",
        }[kind]
        h = draft.let("h", text, x)
        return draft.apply(h, scaled, activation, unary)
    x = draft.keep(tokens(draft))
    if kind == "heads":
        h = draft.let("h", f"{x}.unflatten(-1, (8, -1)).transpose(1, 2)", x)
        return draft.apply(h, scaled, activation)
    if kind == "interleave":
        y = draft.input("y", *x.dims)
        h = draft.let(
            "h", draft.choose(f"torch.stack([{x}, {y}], dim=2).flatten(1, 2)", f"torch.cat([{x}, {y}], dim=-1)"), x
        )
        return draft.apply(h, scaled, activation)
    if kind == "shift":
        previous = draft.let("previous", f"F.pad({x}, (0, 0, 1, -1))", x)
        mix = draft.input("mix", x.dims[-1])
        return draft.let(
            "out", draft.choose(f"{x} + ({previous} - {x}) * {mix}", f"{x} * {mix} + {previous} * (1.0 - {mix})"), x
        )
    return scaled(draft, draft.let("h", f"{x}.transpose(1, 2).contiguous()", x))


@family("function")
def pooled_tokens(draft: Draft) -> Outputs:
    """Sentence vectors: masked means, maxima, last tokens, weighted sums."""
    x = draft.keep(tokens(draft, "hidden"))
    mask = draft.input("mask", "B", "S", dtype=draft.choose("i64", "bool"))
    keep = draft.let("keep", f"{mask}.unsqueeze(-1).to({x}.dtype)", x)
    kind = draft.choose("mean", "max", "weighted", "sqrt")
    if kind == "mean":
        h = draft.let("pooled", f"({x} * {keep}).sum(dim=1) / {keep}.sum(dim=1).clamp(min=1.0)", x)
    elif kind == "max":
        h = draft.let("pooled", f"({x} + ({keep} - 1.0) * 1e4).amax(dim=1)", x)
    elif kind == "sqrt":
        h = draft.let("pooled", f"({x} * {keep}).sum(dim=1) / {keep}.sum(dim=1).clamp(min=1.0).sqrt()", x)
    else:
        score = draft.input("score", "B", "S")
        weight = draft.let("weight", f"torch.softmax({score} + ({keep}.squeeze(-1) - 1.0) * 1e4, dim=1)", score)
        h = draft.let("pooled", f"({x} * {weight}.unsqueeze(-1)).sum(dim=1)", x)
    if draft.chance(0.5):
        h = draft.then(h, f"F.normalize({h}, dim=-1)")
    return draft.apply(h, activation, scaled) if draft.chance(0.4) else h


@family("function")
def token_choice(draft: Draft) -> Outputs:
    """Logits before a token is drawn: temperature, penalties, thresholds, guidance."""
    b, v = draft.size("B", (1, 4, 16, 64, 128)), draft.size("V", sizes.VOCABULARY)
    logits = draft.keep(draft.input("logits", b, v))
    h = draft.keep(draft.let("z", f"{logits}.float()", logits, dtype="f32"))
    for step in draft.random.sample(
        ("temperature", "min_p", "presence", "bias", "cap", "guidance", "ban"), draft.choose(1, 2, 3)
    ):
        h = draft.keep(h, "z")
        if step == "temperature":
            h = draft.let("z", f"{h} / {draft.number('temperature', draft.choose(0.6, 0.8, 1.3))}", h)
        elif step == "min_p":
            probs = draft.let("probs", f"torch.softmax({h}, dim=-1)", h)
            low = f"{probs} < {draft.number('min_p', 0.05)} * {probs}.amax(dim=-1, keepdim=True)"
            h = draft.let("z", f'{h}.masked_fill({low}, float("-inf"))', h)
        elif step == "presence":
            count = draft.input("count", b, v, dtype="f32", values="0..3")
            h = draft.let("z", f"{h} - {draft.number('penalty', 0.5)} * ({count} > 0).float() - 0.1 * {count}", h)
        elif step == "bias":
            h = draft.let("z", f"{h} + {draft.input('bias', v, dtype='f32')}", h)
        elif step == "cap":
            h = draft.let("z", f"15.0 * torch.tanh({h} / 15.0)", h)
        elif step == "guidance":
            other = draft.input("unconditional", b, v)
            h = draft.let("z", f"{other}.float() + {draft.number('guidance', 1.5)} * ({h} - {other}.float())", h)
        else:
            banned = draft.input("banned", v, dtype="bool")
            h = draft.let("z", f"torch.where({banned}, -1e9, {h})", h)
    kind = draft.choose("probs", "log", "argmax", "logits")
    if kind == "logits":
        return h
    return draft.then(
        h,
        {"probs": f"torch.softmax({h}, dim=-1)", "log": f"torch.log_softmax({h}, dim=-1)"}.get(
            kind, f"{h}.argmax(dim=-1)"
        ),
    )
