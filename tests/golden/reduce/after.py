import torch.nn.functional as F


# mtmc: x=f32[M,N] weight=f32[N] bias=f32[N] M=16 N=96
def layer_norm(x, weight, bias):
    if layer_norm_fits(x, weight, bias):  # mtmc: dispatch
        return (layer_norm_triton if torch.compiler.is_compiling() else layer_norm_launch)(x, weight, bias)
    return F.layer_norm(x, (x.shape[-1],), weight, bias)


# mtmc: begin layer_norm
import torch  # noqa: E402
import triton  # noqa: E402
import triton.language as tl  # noqa: E402
from torch.library import triton_op, wrap_triton  # noqa: E402


@triton.jit
def layer_norm_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    n_rows,
    n_cols,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """out, in one kernel.

        return F.layer_norm(x, (x.shape[-1],), weight, bias)

    One program instance reads, reduces and writes each row.
    """
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    row_mask = rows < n_rows
    cols = tl.arange(0, BLOCK)[None, :]
    col_mask = cols < n_cols
    x = tl.load(x_ptr + rows * n_cols + cols, mask=row_mask & col_mask, other=0.0)
    x_2 = tl.load(x_ptr + rows * n_cols, mask=row_mask, other=0.0)
    sub = x - x_2
    row_sum = tl.sum(tl.where(col_mask, sub, 0.0), axis=1, keep_dims=True)
    sub_2 = sub - row_sum / n_cols
    row_sum_2 = tl.sum(tl.where(col_mask, sub_2 * sub_2, 0.0), axis=1, keep_dims=True)
    weight = tl.load(weight_ptr + cols, mask=col_mask, other=0.0)
    bias = tl.load(bias_ptr + cols, mask=col_mask, other=0.0)
    tl.store(
        out_ptr + rows * n_cols + cols,
        sub_2 * tl.rsqrt(row_sum_2 / n_cols + 1e-05) * weight + bias,
        mask=row_mask & col_mask,
    )


def _is_plain_call(tensors) -> bool:
    """Whether all are ordinary strided tensors, and neither tracing, vmap nor forward-mode AD is active."""
    kinds, strided = (torch.Tensor, torch.nn.Parameter), torch.strided
    for t in tensors:
        if type(t) not in kinds or t.layout is not strided or t.is_nested or t.is_neg():
            return False
    return (
        torch.autograd.forward_ad._current_level < 0
        and not torch.jit.is_tracing()
        and not torch._C._are_functorch_transforms_active()
        and not torch._C._len_torch_dispatch_stack()
    )


def _reported(guard):
    """The guard; under MTMC_GUARD=warn, with warnings of the first call that it refuses for each reason."""
    import os

    if os.environ.get("MTMC_GUARD") != "warn":
        return guard
    from mtmc_lsp.guard.worker.misses import reported

    return reported(guard)


def _syntax_text(node) -> str:
    """A syntax tree as text, without docstrings and without the dispatch statements that mtmc inserts."""
    import ast

    if isinstance(node, list):
        kept = []
        for item in node:
            is_text = isinstance(item, ast.Expr) and isinstance(item.value, ast.Constant)
            if isinstance(item, ast.If) and _calls_guard(item.test):
                # The dispatch of a region has the user's statements in its other branch.
                kept += [_syntax_text(item.orelse)[1:-1]] if item.orelse else []
            elif not is_text:
                kept.append(_syntax_text(item))
        return f"[{','.join(kept)}]"
    if not isinstance(node, ast.AST):
        return repr(node)
    if isinstance(node, ast.IfExp) and _calls_guard(node.test):
        # The dispatch of a lambda expression.
        return _syntax_text(node.orelse)
    fields = ((name, value) for name, value in ast.iter_fields(node) if name not in ("ctx", "kind", "type_comment"))
    # Later Python versions add fields, which are empty for older syntax.
    texts = [f"{name}={_syntax_text(value)}" for name, value in fields if value is not None and value != []]
    return f"{type(node).__name__}({','.join(texts)})"


def _calls_guard(condition) -> bool:
    import ast

    return any(isinstance(node, ast.Name) and node.id.endswith("_fits") for node in ast.walk(condition))


def _source_digest(source: str) -> str:
    """Digest of statements; they may be indented.

    Raises:
        SyntaxError: the source does not parse.
    """
    import ast
    import hashlib
    import textwrap

    tree = ast.parse(textwrap.dedent(source))
    return hashlib.sha256(_syntax_text(tree).encode("utf-8", "surrogatepass")).hexdigest()[:16]


_SOURCES = {}


def _has_source(function, digest) -> bool:
    """Whether a function's source has this digest. Cached per code object, since sources do not change in a process."""
    code = function.__code__
    entry = _SOURCES.get(id(code))
    if entry is None:
        import inspect

        try:
            text = inspect.getsource(code)
            entry = _SOURCES[id(code)] = (code, _source_digest(text))
        except (OSError, SyntaxError):
            return False  # no source to compare
    return entry[1] == digest


@torch.compiler.assume_constant_result
def layer_norm_up_to_date_code() -> bool:
    """Whether helper functions, closures and the environment match those of the verification."""
    try:
        return (
            _has_source(layer_norm, "8c3a19f5e909a378")
        )
    except (AttributeError, IndexError, KeyError, NameError, TypeError, ValueError):
        return False


def layer_norm_up_to_date() -> bool:
    """Whether globals, helper functions and the environment match those of the verification."""
    try:
        return (
            layer_norm_up_to_date_code()
        )
    except (AttributeError, IndexError, KeyError, NameError, TypeError, ValueError):
        return False


@_reported
def layer_norm_fits(x, weight, bias) -> bool:
    """Whether the Triton version supports these arguments; otherwise the original code runs."""
    if not (
        layer_norm_up_to_date()
    ):
        return False
    tensors = (x, weight, bias)
    return (
        (torch.compiler.is_compiling() or _is_plain_call(tensors))
        and all(
            isinstance(t, torch.Tensor)
            and t.is_cuda
            and t.device == tensors[0].device
            and t.dtype == torch.float32
            and t.is_contiguous()
            for t in tensors
        )
        and tensors[0].get_device() == torch.cuda.current_device()
        and not torch.is_autocast_enabled()
        and not (torch.is_grad_enabled() and any(t.requires_grad for t in tensors))
        and x.ndim == 2
        and x.numel() > 0
        and weight.ndim == 1
        and weight.shape[0] == x.shape[1]
        and weight.numel() > 0
        and bias.shape == weight.shape
        and x.shape[1] <= 8192
    )


def layer_norm_launch(x, weight, bias, layer_norm_kernel=layer_norm_kernel):
    """``layer_norm`` with Triton kernels."""
    N = x.shape[1]
    M = x.shape[0]
    out = torch.empty_like(x)
    n_cols = N
    n_rows = M
    layer_norm_kernel[((n_rows + 7) // 8,)](
        x, weight, bias, out, n_rows, n_cols,
        ROWS=8, BLOCK=triton.next_power_of_2(n_cols), num_warps=2, num_stages=2,
    )
    return out


@triton_op(f"{__name__.replace('.', '_')}::layer_norm_triton", mutates_args=())
def layer_norm_triton(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """``layer_norm_launch`` as an operator for torch.compile, torch.export and CUDA graphs."""
    return layer_norm_launch(x, weight, bias, wrap_triton(layer_norm_kernel))
# mtmc: end layer_norm
