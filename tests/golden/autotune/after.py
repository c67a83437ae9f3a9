import torch


# mtmc: x=f32[M,N] weight=f32[N] M=16 N=96
def rms_norm(x, weight):
    if rms_norm_fits(x, weight):  # mtmc: dispatch
        return (rms_norm_triton if torch.compiler.is_compiling() else rms_norm_launch)(x, weight)
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * weight


# mtmc: begin rms_norm
import triton  # noqa: E402
import triton.language as tl  # noqa: E402
from torch.library import triton_op, wrap_triton  # noqa: E402


@triton.jit
def rms_norm_kernel(
    x_ptr,
    weight_ptr,
    out_ptr,
    n_rows,
    n_cols,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """out, in one kernel.

        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * weight

    One program instance reads, reduces and writes each row; intermediate values are not written to memory.
    """
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    row_mask = rows < n_rows
    cols = tl.arange(0, BLOCK)[None, :]
    col_mask = cols < n_cols
    x = tl.load(x_ptr + rows * n_cols + cols, mask=row_mask & col_mask, other=0.0)
    row_sum = tl.sum(tl.where(col_mask, x * x, 0.0), axis=1, keep_dims=True)
    weight = tl.load(weight_ptr + cols, mask=col_mask, other=0.0)
    tl.store(out_ptr + rows * n_cols + cols, x * tl.rsqrt(row_sum / n_cols + 1e-06) * weight, mask=row_mask & col_mask)


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
def rms_norm_up_to_date_code() -> bool:
    """Whether helper functions, closures and the environment match those of the verification."""
    try:
        return (
            _has_source(rms_norm, "300e3aeee432012a")
        )
    except (AttributeError, IndexError, KeyError, NameError, TypeError, ValueError):
        return False


def rms_norm_up_to_date() -> bool:
    """Whether globals, helper functions and the environment match those of the verification."""
    try:
        return (
            rms_norm_up_to_date_code()
        )
    except (AttributeError, IndexError, KeyError, NameError, TypeError, ValueError):
        return False


@_reported
def rms_norm_fits(x, weight) -> bool:
    """Whether the Triton version supports these arguments; otherwise the original code runs."""
    if not (
        rms_norm_up_to_date()
    ):
        return False
    tensors = (x, weight)
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
        and x.shape[1] <= 32768
    )


def rms_norm_launch(x, weight, rms_norm_kernel=rms_norm_kernel):
    """``rms_norm`` with Triton kernels."""
    N = x.shape[1]
    M = x.shape[0]
    out = torch.empty_like(x)
    n_cols = N
    n_rows = M
    rms_norm_kernel[((n_rows + 1) // 2,)](
        x, weight, out, n_rows, n_cols,
        ROWS=2, BLOCK=triton.next_power_of_2(n_cols), num_warps=2, num_stages=2,
    )
    return out


@triton_op(f"{__name__.replace('.', '_')}::rms_norm_triton", mutates_args=())
def rms_norm_triton(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """``rms_norm_launch`` as an operator for torch.compile, torch.export and CUDA graphs."""
    return rms_norm_launch(x, weight, wrap_triton(rms_norm_kernel))
# mtmc: end rms_norm
