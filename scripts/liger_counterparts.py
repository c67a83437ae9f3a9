"""How Liger-Kernel computes the targets of ``benchmarks/training``: its public functions, called with their parameters."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

HIDDEN = tuple({"H": size} for size in (1024, 2048, 4096, 8192, 16384))
"""Sizes of the norms."""

Function = Callable[..., Any]


@dataclass(frozen=True)
class Counterpart:
    """How Liger-Kernel computes a target."""

    call: Callable[[Any], Function]
    """From Liger-Kernel's modules (:class:`Liger`) to a function with the target's parameters."""
    sizes: Sequence[Mapping[str, int]] = ({},)
    """Changes of the workload's sizes, one row each."""
    zeroed: tuple[str, ...] = ()
    """Inputs that are 0 for all contenders, because Liger-Kernel has no such input."""
    equal_halves: tuple[str, ...] = ()
    """Inputs whose last dimension has two equal halves for all contenders, as angles of a rotation have."""
    rows_first: tuple[str, ...] = ()
    """Inputs ``[B,heads,S,D]`` that Liger-Kernel gets in the memory layout of ``[B,S,heads,D]``, which it needs no copy for."""


class Liger:
    """Liger-Kernel's public functions and losses."""

    def __init__(self) -> None:
        from liger_kernel.transformers import functional

        self.functions: Any = functional

    @property
    def losses(self) -> Any:
        """The losses that are computed in chunks."""
        from liger_kernel import chunked_loss

        return chunked_loss


def _norm(liger: Liger) -> Function:
    return lambda x, weight: liger.functions.liger_rms_norm(x, weight, 1e-6)


def _added_norm(liger: Liger) -> Function:
    return lambda x, residual, weight: liger.functions.liger_fused_add_rms_norm(x, residual, weight, 1e-6)


def _layer_norm(liger: Liger) -> Function:
    return lambda x, weight, bias: liger.functions.liger_layer_norm(x, weight, bias, 1e-5)


def _divergence(liger: Liger) -> Function:
    """Liger-Kernel's divergences begin with log probabilities; torch computes these."""
    kl_div = functools.partial(liger.functions.liger_kl_div, reduction="batchmean")
    return lambda student, teacher: kl_div(student.log_softmax(-1), teacher.softmax(-1))


def _js_divergence(liger: Liger) -> Function:
    return lambda student, teacher: liger.functions.liger_jsd(student.log_softmax(-1), teacher.log_softmax(-1))


def _linear_divergence(beta: float, liger: Liger) -> Function:
    jsd = functools.partial(liger.functions.liger_fused_linear_jsd, jsd_beta=beta)
    return lambda x, weight, teacher_x, teacher_weight: jsd(x, weight, teacher_x, teacher_weight)


def _linear_cross_entropy(liger: Liger, **options: float) -> Function:
    loss = liger.functions.liger_fused_linear_cross_entropy
    return lambda x, weight, target: loss(x, weight, target, **options)


def _linear_dpo(liger: Liger) -> Function:
    loss = liger.losses.LigerFusedLinearDPOLoss(beta=0.1, use_ref_model=False)
    return lambda x, weight, bias, target, reference: loss(weight, x, target, bias)[0]


def _linear_grpo(liger: Liger) -> Function:
    loss = liger.losses.LigerFusedLinearGRPOLoss(beta=0.04, loss_type="bnpo")

    def call(x: Any, weight: Any, target: Any, old: Any, reference: Any, advantage: Any, mask: Any) -> Any:
        return loss(x, weight, target, mask, advantage, ref_per_token_logps=reference, old_per_token_logps=old)[0]

    return call


COUNTERPARTS: Mapping[str, Counterpart] = {
    "norms_and_gates::rms_norm": Counterpart(_norm, HIDDEN),
    "norms_and_gates::layer_norm": Counterpart(_layer_norm, HIDDEN),
    "norms_and_gates::add_rms_norm": Counterpart(_added_norm),
    "norms_and_gates::swiglu": Counterpart(lambda liger: lambda gate, up: liger.functions.liger_swiglu(gate, up)),
    "norms_and_gates::geglu": Counterpart(lambda liger: lambda gate, up: liger.functions.liger_geglu(gate, up)),
    "norms_and_gates::rotary": Counterpart(
        lambda liger: lambda q, k, cos, sin: liger.functions.liger_rope(q, k, cos, sin),
        equal_halves=("cos", "sin"),
        rows_first=("q", "k"),
    ),
    "losses::cross_entropy": Counterpart(
        lambda liger: lambda logits, target: liger.functions.liger_cross_entropy(logits, target)
    ),
    "losses::smoothed_cross_entropy": Counterpart(
        lambda liger: lambda logits, target: liger.functions.liger_cross_entropy(logits, target, label_smoothing=0.1)
    ),
    "losses::kl_divergence": Counterpart(_divergence),
    "losses::js_divergence": Counterpart(_js_divergence),
    "linear_losses::fused_linear_cross_entropy": Counterpart(_linear_cross_entropy),
    "linear_losses::fused_linear_cross_entropy_32768": Counterpart(_linear_cross_entropy),
    "linear_losses::fused_linear_cross_entropy_softcap": Counterpart(
        functools.partial(_linear_cross_entropy, softcap=30.0, lse_square_scale=1e-4)
    ),
    "linear_losses::fused_linear_dpo": Counterpart(_linear_dpo, zeroed=("reference",)),
    "linear_losses::fused_linear_grpo": Counterpart(_linear_grpo),
    "linear_losses::fused_linear_kl_divergence": Counterpart(functools.partial(_linear_divergence, 0.0)),
    "linear_losses::fused_linear_js_divergence": Counterpart(functools.partial(_linear_divergence, 0.5)),
}
