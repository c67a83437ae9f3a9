import torch.nn.functional as F


# mtmc: x=f32[M,N] bias=f32[N] M=32 N=96
def bias_gelu(x, bias):
    if bias_gelu_fits(x, bias):  # mtmc: dispatch
        return (bias_gelu_triton if torch.compiler.is_compiling() else bias_gelu_launch)(x, bias)
    return F.gelu(x + bias) * 0.5


# mtmc: begin bias_gelu
import torch  # noqa: E402
import triton  # noqa: E402
import triton.language as tl  # noqa: E402
from torch.library import triton_op, wrap_triton  # noqa: E402


@triton.jit
def bias_gelu_kernel(
    x_ptr,
    bias_ptr,
    out_ptr,
    n_rows,
    n_cols,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """out, in one kernel.

        return F.gelu(x + bias) * 0.5

    One pass over memory; intermediate values are not written to memory.
    """
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    row_mask = rows < n_rows
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    col_mask = cols < n_cols
    x = tl.load(x_ptr + rows * n_cols + cols, mask=row_mask & col_mask, other=0.0)
    bias = tl.load(bias_ptr + cols, mask=col_mask, other=0.0)
    value = x + bias
    tl.store(
        out_ptr + rows * n_cols + cols,
        0.5 * value * (1.0 + tl.erf(value * 0.7071067811865476)) * 0.5,
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
def bias_gelu_up_to_date_code() -> bool:
    """Whether helper functions, closures and the environment match those of the verification."""
    try:
        return (
            _has_source(bias_gelu, "098d13820537f04f")
        )
    except (AttributeError, IndexError, KeyError, NameError, TypeError, ValueError):
        return False


def bias_gelu_up_to_date() -> bool:
    """Whether globals, helper functions and the environment match those of the verification."""
    try:
        return (
            bias_gelu_up_to_date_code()
        )
    except (AttributeError, IndexError, KeyError, NameError, TypeError, ValueError):
        return False


@_reported
def bias_gelu_fits(x, bias) -> bool:
    """Whether the Triton version supports these arguments; otherwise the original code runs."""
    if not (
        bias_gelu_up_to_date()
    ):
        return False
    tensors = (x, bias)
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
        and bias.ndim == 1
        and bias.shape[0] == x.shape[1]
        and bias.numel() > 0
        and x.shape[1] < 2147483648
    )


def bias_gelu_launch(x, bias, bias_gelu_kernel=bias_gelu_kernel):
    """``bias_gelu`` with Triton kernels."""
    N = x.shape[1]
    M = x.shape[0]
    out = torch.empty_like(x)
    n_cols = N
    n_rows = M
    bias_gelu_kernel[((n_rows + 7) // 8, (n_cols + 127) // 128)](
        x, bias, out, n_rows, n_cols,
        ROWS=8, BLOCK=128, num_warps=4, num_stages=2,
    )
    return out


@triton_op(f"{__name__.replace('.', '_')}::bias_gelu_triton", mutates_args=())
def bias_gelu_triton(x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """``bias_gelu_launch`` as an operator for torch.compile, torch.export and CUDA graphs."""
    return bias_gelu_launch(x, bias, wrap_triton(bias_gelu_kernel))
# mtmc: end bias_gelu
