"""Lowers losses: elementwise losses with their reduction, and cross entropy."""

from __future__ import annotations

from mtmc_lsp.core.dtypes import compute_dtype, is_float
from mtmc_lsp.ir.lower import Call, lowering
from mtmc_lsp.ir.lower.reductions import count, finish, rank_of, rounded, scale_by_count, softmax_statistics
from mtmc_lsp.ir.primitives import ONE, PrimOp


def reduce_loss(c: Call, loss: str, reduction: int) -> str:
    """Apply ATen's reduction number to an elementwise loss."""
    if reduction == 0:
        return finish(c, loss)
    d, dims = compute_dtype(c.out.dtype), tuple(range(rank_of(c, loss)))
    total = c.b.reduce("sum", loss, dims, d)
    return finish(c, total if reduction == 2 else scale_by_count(c.b, total, count(c.b.shape(loss), dims), d))


@lowering(
    "mse_loss",
    "l1_loss",
    "smooth_l1_loss",
    "huber_loss",
    "binary_cross_entropy_with_logits",
    "kl_div",
)
def elementwise_loss(c: Call) -> str:
    x, target = c.tensor(0), c.tensor(1)
    d = compute_dtype(c.out.dtype)
    if c.op == "mse_loss":
        loss = c.b.pointwise("square", c.b.pointwise("sub", x, target, dtype=d), dtype=d)
        return reduce_loss(c, loss, c.integer(2, "reduction", 1))
    if c.op == "l1_loss":
        loss = c.b.pointwise("abs", c.b.pointwise("sub", x, target, dtype=d), dtype=d)
        return reduce_loss(c, loss, c.integer(2, "reduction", 1))
    if c.op in ("smooth_l1_loss", "huber_loss"):
        beta = c.number(3, "beta" if c.op == "smooth_l1_loss" else "delta", 1.0)
        difference = c.b.pointwise("sub", x, target, dtype=d)
        loss = c.b.pointwise(c.op, difference, dtype=d, beta=beta)
        return reduce_loss(c, loss, c.integer(2, "reduction", 1))
    if c.op == "kl_div":
        log_target = bool(c.node.kwargs.get("log_target", False))
        loss = c.b.pointwise("kl_div_log" if log_target else "kl_div", x, target, dtype=d)
        return reduce_loss(c, loss, c.integer(2, "reduction", 1))
    # PyTorch's formula, so that infinite logits give the same result: (1 - y) * x - log_sigmoid(x), the latter weighted by
    # pos_weight for the positives.
    log_sigmoid = c.b.pointwise("log_sigmoid", x, dtype=d)
    if c.has(3, "pos_weight"):
        extra_weight = c.b.pointwise(
            "mul", c.b.pointwise("sub", c.tensor(3, "pos_weight"), 1.0, dtype=d), target, dtype=d
        )
        log_sigmoid = c.b.pointwise("mul", log_sigmoid, c.b.pointwise("add", extra_weight, 1.0, dtype=d), dtype=d)
    linear = c.b.pointwise("mul", c.b.pointwise("sub", 1.0, target, dtype=d), x, dtype=d)
    loss = c.b.pointwise("sub", linear, log_sigmoid, dtype=d)
    return reduce_loss(c, weighted(c, loss, c.optional(2, "weight")), c.integer(4, "reduction", 1))


def weighted(c: Call, loss: str, weight: str | None) -> str:
    """Each element's loss times its weight."""
    return loss if weight is None else c.b.pointwise("mul", loss, weight, dtype=c.b.dtype(loss))


@lowering("binary_cross_entropy")
def binary_cross_entropy(c: Call) -> str:
    """``-(y * log(x) + (1 - y) * log(1 - x))``, each logarithm at least -100 as in PyTorch."""
    x, y = c.tensor(0), c.tensor(1)
    d = compute_dtype(c.out.dtype)
    x = c.b.cast(x, d)
    complement = c.b.pointwise("sub", 1.0, y, dtype=d)
    log_yes, log_no = (
        c.b.pointwise("maximum", c.b.pointwise(fn, value, dtype=d), -100.0, dtype=d)
        for fn, value in (("log", x), ("log1p", c.b.pointwise("neg", x, dtype=d)))
    )
    log_likelihood = c.b.pointwise(
        "add", c.b.pointwise("mul", y, log_yes, dtype=d), c.b.pointwise("mul", complement, log_no, dtype=d), dtype=d
    )
    loss = c.b.pointwise("neg", log_likelihood, dtype=d)
    return reduce_loss(c, weighted(c, loss, c.optional(2, "weight")), c.integer(3, "reduction", 1))


@lowering("cross_entropy_loss")
def cross_entropy(c: Call) -> str:
    """The loss of each sample; the capture splits off sums and means of them. Classes are dimension 1 (or 0 without a batch).

    For class indices ``-w[t] * log_softmax(x)[t]``, smoothed; for probabilities ``-sum(w * p * log_softmax(x))``. As in PyTorch
    the maximum is subtracted from each logit first: ``logsumexp(x) - x[t]`` would cancel if the logits are large.
    """
    x, target, weight = c.tensor(0), c.tensor(1), c.optional(2, "weight")
    if c.integer(3, "reduction", 1) != 0:
        raise c.fail("a reduction that the capture should have split off")
    shape = c.b.shape(x)
    d, dim = compute_dtype(c.out.dtype), 1 if len(shape) > 1 else 0
    smoothing, classes = c.number(5, "label_smoothing", 0.0), shape[dim]
    wide = rounded(c.b, c.b.cast(x, d))
    top, total = softmax_statistics(c.b, wide, (dim,))
    log_total = c.b.pointwise("log", total, dtype=d)

    def surprise(logit: str) -> str:
        """The negative logarithm of the probability of a logit's class."""
        return c.b.pointwise("sub", log_total, c.b.pointwise("sub", logit, top, dtype=d), dtype=d)

    class_weight = None
    if weight is not None:
        class_weight = c.b.reshape(weight, [size if i == dim else ONE for i, size in enumerate(shape)])
    if is_float(c.b.dtype(target)):
        probability = c.b.cast(target, d)
        if smoothing:
            uniform = scale_by_count(c.b, c.b.constant(smoothing, d), classes, d)
            probability = c.b.pointwise(
                "add", c.b.pointwise("mul", probability, 1.0 - smoothing, dtype=d), uniform, dtype=d
            )
        loss = c.b.pointwise("mul", probability, surprise(wide), dtype=d)
        return finish(c, c.b.reduce("sum", weighted(c, loss, class_weight), (dim,), d))
    class_index = c.b.reshape(target, [ONE if i == dim else size for i, size in enumerate(shape)])
    is_counted = c.b.pointwise(
        "ne", class_index, c.integer(4, "ignore_index", -100), dtype="bool", operand_dtype="int64"
    )
    safe_index = c.b.pointwise("where", is_counted, class_index, 0, dtype="int64")
    picked = c.b.add(PrimOp.GATHER, (wide, safe_index), c.b.shape(class_index), d, dim=dim)
    loss = surprise(picked)
    if class_weight is not None:
        expanded_weight = c.b.expand(class_weight, shape)
        sample_weight = c.b.add(
            PrimOp.GATHER, (expanded_weight, safe_index), c.b.shape(class_index), c.b.dtype(expanded_weight), dim=dim
        )
        loss = weighted(c, loss, sample_weight)
    if smoothing:
        smooth = c.b.reduce("sum", weighted(c, surprise(wide), class_weight), (dim,), d)
        smooth = scale_by_count(c.b, smooth, classes, d)
        class_part = c.b.pointwise("mul", loss, 1.0 - smoothing, dtype=d)
        loss = c.b.pointwise("add", class_part, c.b.pointwise("mul", smooth, smoothing, dtype=d), dtype=d)
    return finish(c, c.b.pointwise("where", is_counted, loss, 0.0, dtype=d))
