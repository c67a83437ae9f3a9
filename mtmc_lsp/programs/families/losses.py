"""Losses of classifiers, regressors and generators."""

from __future__ import annotations

from mtmc_lsp.programs import sizes
from mtmc_lsp.programs.draft import Draft, Tensor
from mtmc_lsp.programs.family import Outputs, family
from mtmc_lsp.programs.pieces.elementwise import to_float


def _logits(draft: Draft, classes: tuple[int, ...]) -> Tensor:
    x = draft.input("logits", draft.size("N", sizes.ROWS), draft.size("V", classes))
    h = draft.keep(to_float(draft, x))
    if draft.chance(0.3):
        h = draft.keep(draft.let("z", f"{h} / {draft.number('temperature', draft.choose(0.5, 2.0))}", h))
    return h


def averaged(draft: Draft, loss: Tensor, weight: str = "") -> Tensor:
    """The mean or sum of the losses of all elements, also weighted."""
    if weight:
        return draft.then(loss, f"({loss} * {weight}).sum() / {weight}.sum().clamp(min=1e-6)", "loss", dims=())
    kind = draft.choose("mean", "mean", "sum", "none")
    return (
        loss
        if kind == "none" and loss.rank < 2
        else draft.then(loss, draft.call(loss, "sum" if kind == "sum" else "mean"), "loss", dims=())
    )


@family("function")
def cross_entropy(draft: Draft) -> Outputs:
    """Cross entropy: smoothed, weighted, masked, with a penalty."""
    z = _logits(draft, (*sizes.CLASSES, *sizes.VOCABULARY[:6]))
    n, v = z.dims
    label = draft.input("labels", n, dtype="i64", values=f"0..{v}-1")
    base = draft.choose("library", "gather", "logsumexp", "smooth")
    if base == "library":
        smoothing = f", label_smoothing={draft.choose(0.05, 0.1)}" if draft.chance(0.4) else ""
        loss = draft.let("nll", f'F.cross_entropy({z}, {label}, reduction="none"{smoothing})', z, dims=(n,))
    elif base == "gather":
        logp = draft.let("logp", f"F.log_softmax({z}, dim=-1)", z)
        loss = draft.let("nll", f"-{logp}.gather(1, {label}[:, None])[:, 0]", z, dims=(n,))
    elif base == "logsumexp":
        loss = draft.let(
            "nll", f"torch.logsumexp({z}, dim=1) - {z}.gather(1, {label}.unsqueeze(1)).squeeze(1)", z, dims=(n,)
        )
    else:
        logp = draft.let("logp", f"torch.log_softmax({z}, dim=1)", z)
        eps = draft.number("smoothing", draft.choose(0.05, 0.2))
        loss = draft.let(
            "nll",
            f"-(1.0 - {eps}) * {logp}.gather(1, {label}[:, None])[:, 0] - {eps} * {logp}.mean(dim=1)",
            z,
            dims=(n,),
        )
    extra = draft.choose("none", "weight", "mask", "poly", "focal", "confidence")
    if extra == "weight":
        return averaged(draft, loss, f"{draft.input('class_weight', v, dtype='f32', values='0.1..2')}[{label}]")
    if extra == "mask":
        mask = draft.let("mask", f"{draft.input('mask', n, dtype='bool')}.float()", z)
        return averaged(draft, loss, f"{mask}")
    if extra == "poly":
        loss = draft.let("poly", f"{loss} + {draft.number('epsilon', 2.0)} * (1.0 - torch.exp(-{loss}))", loss)
    elif extra == "focal":
        loss = draft.let("focal", f"(1.0 - torch.exp(-{loss})) ** {draft.number('gamma', 2.0)} * {loss}", loss)
    elif extra == "confidence":
        probs = draft.let("probs", f"torch.softmax({z}, dim=1)", z)
        loss = draft.let("total", f"{loss} + 0.1 * ({probs} * torch.log({probs} + 1e-8)).sum(dim=1)", loss)
    return averaged(draft, loss)


@family("function")
def binary_loss(draft: Draft) -> Outputs:
    """Binary cross entropy: weighted, focal, asymmetric, smoothed."""
    shape = draft.choose(("N",), ("N", "V"), ("B", "C", "H", "H"))
    for name, options in {
        "N": sizes.ROWS,
        "V": sizes.CLASSES,
        "B": sizes.BATCH,
        "C": (1, 4, 21),
        "H": sizes.LARGE_IMAGE,
    }.items():
        if name in shape:
            draft.size(name, options)
    z = draft.keep(to_float(draft, draft.input("logits", *shape)))
    y = draft.keep(draft.input("targets", *shape, dtype="f32", values="0..1"))
    if draft.chance(0.3):
        y = draft.let("smooth", f"{y} * 0.9 + 0.05", y)
    base = draft.choose("library", "softplus", "clamped", "log")
    text = {
        "library": f'F.binary_cross_entropy_with_logits({z}, {y}, reduction="none")',
        "softplus": f"F.softplus({z}) - {z} * {y}",
        "clamped": f"{z}.clamp(min=0.0) - {z} * {y} + torch.log1p(torch.exp(-{z}.abs()))",
        "log": f"-({y} * F.logsigmoid({z}) + (1.0 - {y}) * F.logsigmoid(-{z}))",
    }[base]
    loss = draft.let("bce", text, z)
    extra = draft.choose("none", "focal", "asymmetric", "positive", "weight", "balanced")
    if extra in ("focal", "asymmetric"):
        p = draft.let("p", f"torch.sigmoid({z})", z)
        if extra == "focal":
            gap = draft.let("gap", f"({p} - {y}).abs()", z)
            loss = draft.let("focal", f"{gap}.pow({draft.number('gamma', draft.choose(1.5, 3.0))}) * {loss}", z)
        else:
            loss = draft.let(
                "asymmetric", f"{loss} * torch.where({y} > 0.5, 1.0 - {p}, ({p} - 0.05).clamp(min=0.0) ** 4)", z
            )
    elif extra == "positive":
        loss = draft.let("weighted", f"{loss} * (1.0 + {draft.number('pos_weight', 3.0)} * {y})", z)
    elif extra == "weight":
        return averaged(draft, loss, f"{draft.input('weight', *shape, dtype='f32', values='0..1')}")
    elif extra == "balanced":
        share = draft.let("share", f"{y}.mean()", z)
        loss = draft.let("balanced", f"{loss} * torch.where({y} > 0.5, 1.0 - {share}, {share})", z)
    return averaged(draft, loss)


@family("function")
def regression_loss(draft: Draft) -> Outputs:
    """Distances of predictions and targets, element by element, then reduced."""
    shape = draft.choose(("N",), ("N", "D"), ("B", "C", "H", "H"), ("B", "S", "D"))
    options = {
        "N": sizes.ROWS,
        "D": sizes.WIDTH,
        "B": sizes.BATCH,
        "C": (1, 3, 64),
        "H": sizes.LARGE_IMAGE,
        "S": sizes.SEQUENCE,
    }
    for name in dict.fromkeys(shape):
        draft.size(name, options[name])
    pred, target = draft.input(draft.choose("pred", "output"), *shape), draft.input("target", *shape)
    d = draft.let(
        draft.choose("diff", "error"), f"{to_float(draft, pred)} - {to_float(draft, target)}", pred, dtype="f32"
    )
    delta = draft.number(draft.choose("delta", "beta"), draft.choose(0.5, 1.0, 0.1))
    formulas = (
        f"torch.where({d}.abs() < {delta}, 0.5 * {d}.square(), {delta} * ({d}.abs() - 0.5 * {delta}))",
        f"torch.where({d}.abs() < {delta}, 0.5 * {d} ** 2 / {delta}, {d}.abs() - 0.5 * {delta})",
        f"torch.log(torch.cosh({d}.clamp(-10.0, 10.0)))",
        f"torch.sqrt({d}.square() + {draft.number('eps', 1e-6)})",
        f"torch.maximum(0.9 * {d}, -0.1 * {d})",
        f"{d}.abs() / ({target}.float().abs() + 1e-3)",
        f"{d}.square() / ({d}.square() + {delta})",
        f"{delta} * torch.log1p({d}.abs() / {delta})",
        f"torch.where({d} > 0, 2.0 * {d}.square(), 0.5 * {d}.square())",
        f"{d}.abs().clamp(max=4.0) + 0.1 * {d}.square()",
    )
    loss = draft.let("loss", draft.choose(*formulas), d)
    if draft.chance(0.3):
        weight = draft.input("weight", *shape, dtype="f32", values="0..1")
        return averaged(draft, loss, f"{weight}")
    if draft.chance(0.3) and loss.rank > 1:
        loss = draft.let(
            "per_row", draft.call(loss, draft.choose("sum", "mean", "amax"), "dim=-1"), loss, dims=shape[:-1]
        )
    return averaged(draft, loss)


@family("function")
def divergence(draft: Draft) -> Outputs:
    """Divergences of two distributions of logits."""
    n, v = draft.size("N", sizes.ROWS), draft.size("V", (*sizes.CLASSES[1:], *sizes.VOCABULARY[:5]))
    a, b = draft.input("student", n, v), draft.input("teacher", n, v)
    t = draft.number("temperature", draft.choose(1.5, 2.0, 3.0))
    p = draft.let("logp", f"F.log_softmax({to_float(draft, a)} / {t}, dim=-1)", a, dtype="f32")
    q = draft.let("logq", f"F.log_softmax({to_float(draft, b)} / {t}, dim=-1)", b, dtype="f32")
    kind = draft.choose("forward", "reverse", "jensen", "cross", "squared", "entropy", "bhattacharyya")
    if kind == "forward":
        h = f"({q}.exp() * ({q} - {p})).sum(dim=-1)"
    elif kind == "reverse":
        h = f"({p}.exp() * ({p} - {q})).sum(dim=-1)"
    elif kind == "jensen":
        m = draft.let("m", f"0.5 * ({p}.exp() + {q}.exp())", p)
        h = f"0.5 * ({p}.exp() * ({p} - torch.log({m})) + {q}.exp() * ({q} - torch.log({m}))).sum(dim=-1)"
    elif kind == "cross":
        h = f"-({q}.exp() * {p}).sum(dim=-1)"
    elif kind == "squared":
        h = f"({p}.exp() - {q}.exp()).square().sum(dim=-1)"
    elif kind == "entropy":
        h = f"({q}.exp() * ({q} - {p})).sum(dim=-1) + 0.01 * ({p}.exp() * {p}).sum(dim=-1)"
    else:
        h = f"-torch.logsumexp(0.5 * ({p} + {q}), dim=-1)"
    loss = draft.let("loss", h, p, dims=(n,))
    if draft.chance(0.3):
        return averaged(draft, loss, f"{draft.input('weight', n, dtype='f32', values='0..1')}")
    return averaged(draft, loss)


@family("function")
def gaussian_loss(draft: Draft) -> Outputs:
    """Likelihoods and divergences of normal, Laplace and Poisson distributions."""
    n, d = draft.size("N", sizes.ROWS), draft.size("D", (2, 6, 16, 32, 64, 128, 256))
    mean, spread = draft.input("mean", n, d, dtype="f32"), draft.input("logvar", n, d, dtype="f32", values="-3..3")
    kind = draft.choose("nll", "laplace", "poisson", "prior", "pair", "student", "mixture")
    x = draft.input("x", n, d, dtype="f32") if kind != "prior" else mean
    if kind == "nll":
        h = f"0.5 * ({spread} + ({x} - {mean}).square() * torch.exp(-{spread}))"
    elif kind == "laplace":
        h = f"{spread} + ({x} - {mean}).abs() * torch.exp(-{spread})"
    elif kind == "poisson":
        draft.arguments.pop("logvar")
        h = f"torch.exp({mean}.clamp(max=10.0)) - {x} * {mean}"
    elif kind == "prior":
        h = f"-0.5 * (1.0 + {spread} - {mean} * {mean} - {spread}.exp())"
    elif kind == "pair":
        other = draft.input("other", n, d, dtype="f32", values="-3..3")
        h = f"0.5 * ({other} - {spread} + (torch.exp({spread}) + ({mean} - {x}).square()) * torch.exp(-{other}) - 1.0)"
    elif kind == "student":
        h = f"2.0 * torch.log1p(({x} - {mean}).square() / (3.0 * {spread}.exp())) + 0.5 * {spread}"
    else:
        weight = draft.input("weight", n, d, dtype="f32")
        inner = f"F.log_softmax({weight}, dim=-1) - 0.5 * ({spread} + ({x} - {mean}).square() / {spread}.exp())"
        return averaged(draft, draft.let("nll", f"-torch.logsumexp({inner}, dim=-1)", x, dims=(n,)))
    loss = draft.let("nll", h, mean)
    if draft.chance(0.6):
        loss = draft.let("total", draft.call(loss, "sum", "dim=-1"), loss, dims=(n,))
    return averaged(draft, loss)


@family("function")
def overlap_loss(draft: Draft) -> Outputs:
    """Dice, Jaccard and Tversky losses of segmentation."""
    b, c, h = draft.size("B", sizes.BATCH), draft.size("C", (1, 2, 4, 21)), draft.size("H", sizes.LARGE_IMAGE)
    z = draft.input("logits", b, c, h, h)
    y = draft.input("masks", b, c, h, h, dtype="f32", values="0..1")
    x = to_float(draft, z)
    p = draft.let(
        "p", draft.choose(f"torch.sigmoid({x})", f"torch.softmax({x}, dim=1)", f"torch.sigmoid(2.0 * {x})"), x
    )
    dims = draft.choose("(2, 3)", "(2, 3)", "(0, 2, 3)", "(1, 2, 3)")
    both = draft.let("both", f"({p} * {y}).sum(dim={dims})", p)
    kind = draft.choose("dice", "squared", "jaccard", "tversky", "log_cosh", "generalised")
    smooth = draft.number("smooth", draft.choose(1.0, 1e-5))
    if kind == "squared":
        score = f"(2.0 * {both} + {smooth}) / ({p}.square().sum(dim={dims}) + {y}.square().sum(dim={dims}) + {smooth})"
    elif kind == "jaccard":
        score = f"({both} + {smooth}) / ({p}.sum(dim={dims}) + {y}.sum(dim={dims}) - {both} + {smooth})"
    elif kind == "tversky":
        wrong = draft.let("wrong", f"({p} * (1.0 - {y})).sum(dim={dims})", both)
        missed = draft.let("missed", f"((1.0 - {p}) * {y}).sum(dim={dims})", both)
        score = f"({both} + {smooth}) / ({both} + 0.3 * {wrong} + 0.7 * {missed} + {smooth})"
    else:
        score = f"(2.0 * {both} + {smooth}) / (({p} + {y}).sum(dim={dims}) + {smooth})"
    loss = draft.let("loss", f"1.0 - {score}", both, dims=(b,))
    if kind == "log_cosh":
        loss = draft.let("smooth_loss", f"torch.log(torch.cosh({loss}))", loss)
    elif kind == "generalised":
        loss = draft.let("powered", f"{loss}.clamp(min=0.0) ** {draft.number('gamma', 0.75)}", loss)
    return averaged(draft, loss)
