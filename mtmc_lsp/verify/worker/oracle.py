"""Modes of the oracle: products in TF32, and dropout as in generated kernels. Runs in workers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

RECURRENT = "_cudnn_rnn"
CONVOLUTIONS = frozenset({"convolution", "convolution_backward", RECURRENT})
"""ATen operations that cuDNN computes. PyTorch has a separate TF32 setting for them."""
PRODUCTS = frozenset({"mm", "bmm", "addmm", "baddbmm", "addbmm", "mv", "addmv"})
"""ATen operations that multiply matrices, as a dispatch mode sees them."""
ATTENTION = F.scaled_dot_product_attention
CUT_BITS = 42
"""The bits of a float64 significand that TF32 lacks."""


class Tf32Products(TorchDispatchMode):  # type: ignore[misc]  # torch is not typed here
    """Rounds float64 operands of products, also in the backward pass, to the ten bits of TF32, as tensor cores do."""

    def __init__(self, *, convolutions: bool, products: bool) -> None:
        super().__init__()
        self.names = (CONVOLUTIONS if convolutions else frozenset()) | (PRODUCTS if products else frozenset())

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = function.overloadpacket.__name__
        if name in self.names and name == RECURRENT:
            args = _rounded_layer(args)
        elif name in self.names:
            # The first argument of addmm and the like is added to the product, so it is not rounded.
            first = 1 if name.startswith("add") or name == "baddbmm" else 0
            end = {"convolution": 2, "convolution_backward": 3}.get(name, len(args))
            args = [_rounded_to_tf32(a) if first <= i < end else a for i, a in enumerate(args)]
        return function(*args, **(kwargs or {}))


def _rounded_layer(args: Any) -> list[Any]:
    """The arguments of a recurrent layer, with inputs, weights and the hidden state rounded; without the packed weights."""
    x, weights, stride, _, hidden, *rest = args
    rounded = [_rounded_to_tf32(weight) if weight.dim() > 1 else weight for weight in weights]
    return [_rounded_to_tf32(x), rounded, stride, None, _rounded_to_tf32(hidden), *rest]


def _rounded_to_tf32(value: Any) -> Any:
    if not isinstance(value, torch.Tensor) or value.dtype != torch.float64:
        return value
    bits = value.contiguous().view(torch.int64)
    rounded: torch.Tensor = (bits + (1 << (CUT_BITS - 1))).bitwise_and_(-(1 << CUT_BITS)).view(torch.float64)
    return torch.where(torch.isfinite(value), rounded, value)


class SharedRandomMode(TorchFunctionMode):  # type: ignore[misc]  # torch is not typed here
    """Makes dropout keep exactly the elements that generated kernels keep: Philox of a seed, by flat element index."""

    def __init__(self, seeds: list[int]) -> None:
        super().__init__()
        self._seeds = list(seeds)
        self._next = 0

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if getattr(function, "__name__", "") == "dropout":
            return self._dropout(function, *args, **kwargs)
        if function is ATTENTION:
            return self._attention(*args, **kwargs)
        if function is not F.multi_head_attention_forward:
            return function(*args, **kwargs)
        # Calls of a function of torch that is written in Python run without this mode.
        plain = F.dropout
        with (
            patch.object(F, "dropout", lambda *given, **named: self._dropout(plain, *given, **named)),
            patch.object(F, "scaled_dot_product_attention", self._attention),
        ):
            return function(*args, **kwargs)

    def _dropout(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        x = args[0] if args else kwargs["input"]
        p = args[1] if len(args) > 1 else kwargs.get("p", 0.5)
        training = args[2] if len(args) > 2 else kwargs.get("training", kwargs.get("train", True))
        return self._dropped(x, p) if training and p > 0 else function(*args, **kwargs)

    def _dropped(self, x: torch.Tensor, p: float) -> torch.Tensor:
        seed = self._seeds[self._next]
        self._next += 1
        is_kept = uniform(seed, x.numel(), x.device).view(x.shape) >= p
        return torch.where(is_kept, x * (1.0 / (1.0 - p) if p < 1 else 0.0), torch.zeros_like(x))

    def _attention(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        """Attention in single operations if it drops probabilities, unless the graph leaves that to the library."""
        if not dropout_p or self._next == len(self._seeds):
            options: dict[str, Any] = {"enable_gqa": True} if enable_gqa else {}
            result: torch.Tensor = ATTENTION(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, **options)
            return result
        if enable_gqa:
            key, value = (x.repeat_interleave(query.shape[-3] // x.shape[-3], -3) for x in (key, value))
        scores = query @ key.transpose(-2, -1) * (query.shape[-1] ** -0.5 if scale is None else scale)
        if is_causal:
            attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        if attn_mask is not None:
            is_choice = attn_mask.dtype == torch.bool
            scores = scores.masked_fill(~attn_mask, -torch.inf) if is_choice else scores + attn_mask
        return self._dropped(torch.softmax(scores, -1), dropout_p) @ value


def draw_seeds(seed: int, count: int, device: str) -> list[int]:
    """The seeds that a generated launcher draws after ``torch.manual_seed(seed)``."""
    torch.manual_seed(seed)
    return [int(s) for s in torch.randint(2**31 - 1, (count,), device=device).tolist()]


def uniform(seed: int, count: int, device: Any) -> torch.Tensor:
    """Float32 in [0, 1): word i % 4 of counter i // 4 of Philox 4x32-10 (Salmon et al., SC 2011), as in ``tl.rand4x``."""
    mask = 0xFFFFFFFF
    c0 = torch.arange(-(-count // 4), dtype=torch.int64, device=device) & mask
    c1 = torch.zeros_like(c0)
    c2, c3 = c1.clone(), c1.clone()
    k0, k1 = seed & mask, (seed >> 32) & mask
    for _ in range(10):
        high_a, low_a = _multiply(0xD2511F53, c0)
        high_b, low_b = _multiply(0xCD9E8D57, c2)
        c0, c1, c2, c3 = high_b ^ c1 ^ k0, low_b, high_a ^ c3 ^ k1, low_a
        k0, k1 = (k0 + 0x9E3779B9) & mask, (k1 + 0xBB67AE85) & mask
    words = torch.stack([c0, c1, c2, c3], dim=1).flatten()[:count]
    signed = torch.where(words >= 2**31, words - 2**32, words)
    folded = torch.where(signed < 0, -signed - 1, signed)
    return folded.to(torch.float32) * 4.6566127342e-10


def _multiply(a: int, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """High and low 32 bits of a 64-bit product, from parts that fit into int64."""
    a_high, a_low = a >> 16, a & 0xFFFF
    b_high, b_low = b >> 16, b & 0xFFFF
    low = a_low * b_low
    middle = a_high * b_low + (low >> 16)
    carry = a_low * b_high + (middle & 0xFFFF)
    high = a_high * b_high + (middle >> 16) + (carry >> 16)
    return high & 0xFFFFFFFF, ((carry & 0xFFFF) << 16) | (low & 0xFFFF)
