"""Reads the settings of this process, which the user's file has set, that decide in which precision torch computes."""

from __future__ import annotations

import torch

from mtmc_lsp.core.dtypes import PrecisionSettings


def precision_settings(autocast: str) -> PrecisionSettings:
    """The settings, for calls under autocast with a dtype."""
    products = torch.backends.cuda.matmul
    return PrecisionSettings(
        _fp32_matmul(),
        _fp32_convolution(),
        bool(products.allow_fp16_reduced_precision_reduction),
        bool(products.allow_bf16_reduced_precision_reduction),
        torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled(),
        autocast,
        torch.is_autocast_cache_enabled(),
    )


def _fp32_matmul() -> str:
    try:
        return "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee"
    except RuntimeError:
        # As below.
        return "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "ieee"


def _fp32_convolution() -> str:
    try:
        return "tf32" if torch.backends.cudnn.allow_tf32 else "ieee"
    except RuntimeError:
        # The user set it through the newer attribute, and torch does not allow reading the older one then.
        return "tf32" if torch.backends.cudnn.conv.fp32_precision == "tf32" else "ieee"
