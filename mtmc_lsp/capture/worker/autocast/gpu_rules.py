"""CUDA's casts of autocast for CPU tensors, so that code runs on a CPU with the dtypes that it has on a GPU.

Torch casts for other operators on a CPU than on a GPU. The lists are those of ``ATen/autocast_mode.h``;
``tests/capture/test_autocast_rules.py`` compares them with the operators that torch registers for CUDA.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any

import torch

LOWER_PRECISION = frozenset(
    """_convolution.deprecated _convolution conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d.input
    conv_transpose3d.input convolution prelu addmm addmv addr matmul einsum mm mv linalg_vecdot linear addbmm baddbmm bmm
    chain_matmul linalg_multi_dot _thnn_fused_lstm_cell _thnn_fused_gru_cell lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell
    _scaled_dot_product_flash_attention scaled_dot_product_attention""".split()
)
"""Operators that run in autocast's dtype."""
FLOAT32 = frozenset(
    """acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow.Tensor_Scalar pow.Tensor_Tensor
    pow.Scalar softplus layer_norm native_layer_norm rms_norm group_norm frobenius_norm.dim nuclear_norm nuclear_norm.dim
    cosine_similarity poisson_nll_loss cosine_embedding_loss nll_loss nll_loss2d hinge_embedding_loss kl_div l1_loss
    smooth_l1_loss huber_loss mse_loss margin_ranking_loss multilabel_margin_loss soft_margin_loss triplet_margin_loss
    multi_margin_loss binary_cross_entropy_with_logits dist pdist cdist renorm logsumexp upsample_nearest1d
    _upsample_nearest_exact1d upsample_nearest2d _upsample_nearest_exact2d upsample_nearest3d _upsample_nearest_exact3d
    upsample_linear1d upsample_bilinear2d _upsample_bilinear2d_aa upsample_trilinear3d upsample_bicubic2d
    _upsample_bicubic2d_aa""".split()
)
"""Operators that run in float32."""
FLOAT32_RESULT = frozenset(
    """prod prod.dim_int softmax.int log_softmax.int cumprod cumsum linalg_vector_norm linalg_matrix_norm
    linalg_matrix_norm.str_ord sum sum.dim_IntList""".split()
)
"""Operators that get ``dtype=torch.float32`` if the call gives no dtype."""
NORMS = {"norm.Scalar": "ScalarOpt_dtype", "norm.ScalarOpt_dim": "ScalarOpt_dim_dtype"}
"""Overloads without a dtype, and the overloads with a dtype that replace them."""
WIDEST = frozenset("addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add".split())
"""Operators whose operands all get the widest dtype among them."""
REFUSED = "binary_cross_entropy"
"""The operator that raises under autocast."""
REFUSAL = (
    "torch.nn.functional.binary_cross_entropy and torch.nn.BCELoss are unsafe to autocast; use "
    "torch.nn.functional.binary_cross_entropy_with_logits or torch.nn.BCEWithLogitsLoss"
)
KEY = "AutocastCPU"


def listed() -> frozenset[str]:
    """All operators that autocast treats on a GPU, without ``aten::``."""
    return LOWER_PRECISION | FLOAT32 | FLOAT32_RESULT | NORMS.keys() | WIDEST | {REFUSED}


@lru_cache(maxsize=1)
def install() -> torch.library.Library:
    """Replace the casts for CPU tensors in this process by those of CUDA."""
    library = torch.library.Library("aten", "IMPL")
    on_gpu, on_cpu = (_registered(key) for key in ("AutocastCUDA", KEY))
    with warnings.catch_warnings():
        # Torch warns of the first operator whose casts are replaced.
        warnings.simplefilter("ignore")
        for name in sorted(listed() & on_gpu):
            operator = _operator(name)
            library.impl(operator, _kernel(name, operator), KEY)
        for name in sorted(on_cpu - on_gpu):
            library.impl(_operator(name), torch.library.fallthrough_kernel, KEY)
    return library


def _registered(key: str) -> set[str]:
    names = torch._C._dispatch_get_registrations_for_dispatch_key(key)
    return {name.removeprefix("aten::") for name in names if name.startswith("aten::")}


def _operator(name: str) -> Any:
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")


def _kernel(name: str, operator: Any) -> Callable[..., Any]:
    """The operator with autocast's casts before it."""
    run = _rule(name, operator)

    def kernel(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)):
            return run(args, kwargs)

    return kernel


def _rule(name: str, operator: Any) -> Callable[[Any, Any], Any]:
    if name in LOWER_PRECISION:
        return lambda args, kwargs: _in_dtype(operator, args, kwargs, torch.get_autocast_dtype("cpu"))
    if name in FLOAT32:
        return lambda args, kwargs: _in_dtype(operator, args, kwargs, torch.float32)
    if name in WIDEST:
        return lambda args, kwargs: _in_dtype(operator, args, kwargs, _widest((*args, *kwargs.values())))
    if name in NORMS:
        with_dtype = getattr(torch.ops.aten.norm, NORMS[name])
        return lambda args, kwargs: _norm(with_dtype, args, kwargs)
    if name == REFUSED:
        return _refuse
    position = next(i for i, argument in enumerate(operator._schema.arguments) if argument.name == "dtype")
    is_keyword = operator._schema.arguments[position].kwarg_only
    return lambda args, kwargs: _with_result(operator, args, kwargs, None if is_keyword else position)


def _in_dtype(operator: Any, args: Any, kwargs: Any, dtype: torch.dtype) -> Any:
    return operator(*_cast(args, dtype), **{name: _cast(value, dtype) for name, value in kwargs.items()})


def _with_result(operator: Any, args: Any, kwargs: Any, position: int | None) -> Any:
    """Ask for a float32 result, unless the call asks for a dtype; ``position`` is that of ``dtype``, if it has one."""
    if not _is_eligible(args[0]):
        return operator(*args, **kwargs)
    if position is None or len(args) <= position:
        return operator(*args, **{**kwargs, "dtype": kwargs.get("dtype") or torch.float32})
    dtype = args[position] if args[position] is not None else torch.float32
    return operator(*args[:position], dtype, *args[position + 1 :], **kwargs)


def _norm(operator: Any, args: Any, kwargs: Any) -> Any:
    named = {argument.name for argument in operator._schema.arguments}
    defaults = {"p": 2, "keepdim": False}
    given = {**dict(zip(("self", "p", "dim", "keepdim"), args, strict=False)), **kwargs}
    values = {name: value for name, value in {**defaults, **given}.items() if name in named}
    dtype = torch.float32 if _is_eligible(args[0]) else args[0].dtype
    return operator(**values, dtype=dtype)


def _refuse(args: Any, kwargs: Any) -> Any:
    raise RuntimeError(REFUSAL)


def _is_eligible(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point() and value.dtype is not torch.float64


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)(_cast(item, dtype) for item in value)
    return value.to(dtype) if _is_eligible(value) else value


def _widest(values: Iterable[Any]) -> torch.dtype:
    for value in values:
        items = value if isinstance(value, (list, tuple)) else (value,)
        if any(_is_eligible(item) and item.dtype == torch.float32 for item in items):
            return torch.float32
    return torch.get_autocast_dtype("cpu")
