"""Losses of pairs, triplets and policies, and metrics."""

from __future__ import annotations

from mtmc_lsp.programs import sizes
from mtmc_lsp.programs.draft import Draft, Tensor
from mtmc_lsp.programs.families.losses import averaged
from mtmc_lsp.programs.family import Outputs, family
from mtmc_lsp.programs.pieces.elementwise import to_float
from mtmc_lsp.programs.pieces.norms import l2_normalized

BATCHES = (128, 256, 512, 1000, 1024, 2048)


def _embeddings(draft: Draft, *names: str) -> list[Tensor]:
    n, d = draft.size("N", BATCHES), draft.size("D", sizes.WIDTH[:10])
    return [draft.keep(to_float(draft, draft.input(name, n, d))) for name in names]


@family("function")
def contrastive_loss(draft: Draft) -> Outputs:
    """Losses of all pairs in a batch."""
    a, b = (draft.keep(l2_normalized(draft, x)) for x in _embeddings(draft, "a", "b"))
    scale = draft.choose(
        f"/ {draft.number('temperature', draft.choose(0.1, 0.2))}",
        f"* {draft.number('scale', draft.choose(14.3, 20.0))}",
    )
    logits = draft.let("logits", f"{a} @ {b}.t() {scale}", a, dims=("N", "N"))
    kind = draft.choose("one_way", "sigmoid", "written", "decoupled", "margin", "barlow")
    diagonal = draft.let(
        "positive", draft.choose(f"torch.diagonal({logits})", f"({a} * {b}).sum(dim=-1) {scale}"), logits, dims=("N",)
    )
    if kind == "sigmoid":
        eye = draft.let("sign", f"2.0 * torch.eye({logits}.shape[0], device={logits}.device) - 1.0", logits)
        draft.lines = [line for line in draft.lines if not line.startswith("positive")]
        return averaged(
            draft, draft.let("loss", f"-F.logsigmoid({eye} * ({logits} - {draft.number('bias', 10.0)}))", logits)
        )
    if kind == "margin":
        hinge = draft.let("hinge", f"(0.2 + {logits} - {diagonal}.unsqueeze(1)).clamp(min=0.0)", logits)
        return averaged(draft, hinge)
    if kind == "barlow":
        draft.lines = [line for line in draft.lines if not line.startswith("positive")]
        eye = draft.let("eye", f"torch.eye({logits}.shape[0], device={logits}.device)", logits)
        return draft.let("loss", f"(({logits} - {eye}).square() * ({eye} + 0.005 * (1.0 - {eye}))).sum()", logits)
    if kind == "decoupled":
        eye = draft.let("eye", f"torch.eye({logits}.shape[0], dtype=torch.bool, device={logits}.device)", logits)
        return averaged(
            draft,
            draft.let(
                "loss", f'torch.logsumexp({logits}.masked_fill({eye}, float("-inf")), dim=1) - {diagonal}', diagonal
            ),
        )
    loss = draft.let("loss", f"torch.logsumexp({logits}, dim=1) - {diagonal}", diagonal)
    if kind == "written":
        loss = draft.let("both", f"0.5 * ({loss} + torch.logsumexp({logits}, dim=0) - {diagonal})", loss)
    return averaged(draft, loss)


@family("function")
def triplet_loss(draft: Draft) -> Outputs:
    """Losses of an anchor, a positive and a negative, and of pairs with labels."""
    kind = draft.choose("triplet", "cosine", "soft", "pair", "ratio", "angular")
    if kind == "pair":
        a, b = _embeddings(draft, "a", "b")
        label = draft.input("same", "N", dtype="f32", values="0..1")
        d = draft.let("distance", f"torch.sqrt(({a} - {b}).square().sum(dim=1) + 1e-8)", a, dims=("N",))
        margin = draft.number("margin", draft.choose(0.5, 2.0))
        return averaged(
            draft,
            draft.let(
                "loss", f"{label} * {d}.square() + (1.0 - {label}) * ({margin} - {d}).clamp(min=0.0).square()", d
            ),
        )
    a, p, n = _embeddings(draft, "anchor", "positive", "negative")
    if kind in ("cosine", "angular"):
        a, p, n = (draft.keep(l2_normalized(draft, x)) for x in (a, p, n))
        near, far = (
            draft.let(name, f"1.0 - ({a} * {x}).sum(dim=-1)", a, dims=("N",)) for name, x in (("near", p), ("far", n))
        )
    else:
        near, far = (
            draft.let(name, f"({a} - {x}).{draft.choose('square()', 'abs()')}.sum(dim=-1)", a, dims=("N",))
            for name, x in (("near", p), ("far", n))
        )
    if kind == "soft":
        return averaged(draft, draft.let("loss", f"F.softplus({near} - {far})", near))
    if kind == "ratio":
        return averaged(
            draft,
            draft.let(
                "loss", f"torch.exp(-{far} * 0.01) / (torch.exp(-{near} * 0.01) + torch.exp(-{far} * 0.01))", near
            ),
        )
    return averaged(
        draft, draft.let("loss", f"F.relu({near} - {far} + {draft.number('margin', draft.choose(0.2, 1.0))})", near)
    )


@family("function")
def preference_loss(draft: Draft) -> Outputs:
    """Losses of preferred and rejected answers, and of policies."""
    draft.dtype = "f32"
    n = draft.size("N", (256, 1024, 4096, 20000))
    kind = draft.choose("preference", "identity", "hinge", "clipped", "entropy", "advantage")
    if kind in ("preference", "identity", "hinge"):
        names = ("chosen", "rejected", "ref_chosen", "ref_rejected")
        c, r, rc, rr = (draft.input(name, n) for name in names)
        margin = draft.let("margin", f"({c} - {r}) - ({rc} - {rr})", c)
        beta = draft.number("beta", draft.choose(0.1, 0.3))
        text = {
            "preference": f"-F.logsigmoid({beta} * {margin})",
            "identity": f"({margin} - 0.5 / {beta}).square()",
            "hinge": f"F.relu(1.0 - {beta} * {margin})",
        }[kind]
        return averaged(draft, draft.let("loss", text, c))
    a = draft.input("advantage", n)
    if kind == "entropy":
        logits = draft.input("logits", n, draft.size("A", (4, 6, 18, 64)))
        logp = draft.let("logp", f"F.log_softmax({logits}, dim=-1)", logits)
        entropy = draft.let("entropy", f"-({logp}.exp() * {logp}).sum(dim=-1)", a)
        chosen = draft.input("action", n, dtype="i64", values="0..A-1")
        return averaged(
            draft, draft.let("loss", f"-{logp}.gather(1, {chosen}[:, None])[:, 0] * {a} - 0.01 * {entropy}", a)
        )
    new, old = draft.input("logp", n, values="-3..0"), draft.input("old_logp", n, values="-3..0")
    ratio = draft.let("ratio", f"torch.exp({new} - {old})", a)
    if kind == "advantage":
        return averaged(draft, draft.let("loss", f"-{ratio} * {a} + 0.2 * (({ratio} - 1.0) - ({new} - {old}))", a))
    low, high = draft.choose((0.8, 1.2), (0.8, 1.28), (0.9, 1.1))
    return averaged(draft, draft.let("loss", f"torch.maximum(-{a} * {ratio}, -{a} * {ratio}.clamp({low}, {high}))", a))


@family("function")
def metric(draft: Draft) -> Outputs:
    """Scores of predictions that are reported, not trained on."""
    kind = draft.choose("psnr", "r2", "correlation", "f1", "accuracy", "calibration", "snr", "perplexity")
    draft.dtype = "f32"
    n, d = draft.size("N", sizes.ROWS), draft.size("D", (10, 64, 100, 512, 1000))
    x, y = draft.keep(draft.input("pred", n, d)), draft.keep(draft.input("target", n, d))
    if kind == "psnr":
        return draft.let("score", f"-10.0 * torch.log10(({x} - {y}).square().mean(dim=-1) + 1e-8)", x)
    if kind == "r2":
        total = draft.let("total", f"({y} - {y}.mean(dim=0)).square().sum(dim=0)", y)
        return draft.let("score", f"1.0 - ({x} - {y}).square().sum(dim=0) / {total}.clamp(min=1e-6)", x)
    if kind == "correlation":
        a, b = (
            draft.let("a", f"{x} - {x}.mean(dim=-1, keepdim=True)", x),
            draft.let("b", f"{y} - {y}.mean(dim=-1, keepdim=True)", y),
        )
        return draft.let("score", f"({a} * {b}).sum(dim=-1) / ({a}.norm(dim=-1) * {b}.norm(dim=-1) + 1e-8)", x)
    if kind == "f1":
        hit = draft.let("hit", f"(torch.sigmoid({x}) > {draft.number('threshold', 0.5)}).float()", x)
        both = draft.let("both", f"({hit} * {y}).sum(dim=0)", x)
        return draft.let("score", f"2.0 * {both} / ({hit}.sum(dim=0) + {y}.sum(dim=0) + 1e-8)", x)
    if kind == "snr":
        return draft.let(
            "score",
            f"10.0 * torch.log10({y}.square().sum(dim=-1) / (({x} - {y}).square().sum(dim=-1) + 1e-8) + 1e-8)",
            x,
        )
    draft.arguments.pop("target")
    label = draft.input("label", n, dtype="i64", values="0..D-1")
    if kind == "accuracy":
        return draft.let("score", f"({x}.argmax(dim=-1) == {label}).float().mean() * 100.0", x)
    if kind == "perplexity":
        return draft.let("score", f"torch.exp(F.cross_entropy({x}, {label}))", x)
    probs = draft.let("probs", f"torch.softmax({x}, dim=-1)", x)
    top = draft.let("top", f"{probs}.amax(dim=-1)", x)
    return draft.let("score", f"({top} - ({x}.argmax(dim=-1) == {label}).float()).square().mean()", x)
