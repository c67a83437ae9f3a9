import torch.nn.functional as F


# mtmc: x=f32[B,16,H,W] w=f32[32,16,3,3] v=f32[8,32,1,1] B=2 H=8 W=10
def two_convolutions(x, w, v):
    if two_convolutions_fits(x, w, v):  # mtmc: dispatch
        return (two_convolutions_triton if torch.compiler.is_compiling() else two_convolutions_launch)(x, w, v)
    y = F.silu(F.conv2d(x, w, padding=1))
    return F.conv2d(y, v)


# mtmc: begin two_convolutions
import torch  # noqa: E402
import triton  # noqa: E402
import triton.language as tl  # noqa: E402
from torch.library import triton_op, wrap_triton  # noqa: E402


@triton.jit
def two_convolutions_y_kernel(conv2d_ptr, y_ptr, n_cols, BLOCK: tl.constexpr):
    """y, in one kernel.

        y = F.silu(F.conv2d(x, w, padding=1))

    One pass over memory.
    """
    cols = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    col_mask = cols < n_cols
    conv2d = tl.load(conv2d_ptr + cols, mask=col_mask, other=0.0)
    y = conv2d * tl.sigmoid(conv2d)
    tl.store(y_ptr + cols, y, mask=col_mask)


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
def two_convolutions_up_to_date_code() -> bool:
    """Whether helper functions, closures and the environment match those of the verification."""
    try:
        return (
            _has_source(two_convolutions, "9688ec2589e83b97")
        )
    except (AttributeError, IndexError, KeyError, NameError, TypeError, ValueError):
        return False


def two_convolutions_up_to_date() -> bool:
    """Whether globals, helper functions and the environment match those of the verification."""
    try:
        return (
            two_convolutions_up_to_date_code()
        )
    except (AttributeError, IndexError, KeyError, NameError, TypeError, ValueError):
        return False


@_reported
def two_convolutions_fits(x, w, v) -> bool:
    """Whether the Triton version supports these arguments; otherwise the original code runs."""
    if not (
        two_convolutions_up_to_date()
    ):
        return False
    tensors = (x, w, v)
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
        and x.ndim == 4
        and x.shape[1] == 16
        and x.numel() > 0
        and w.shape == (32, 16, 3, 3)
        and v.shape == (8, 32, 1, 1)
    )


def two_convolutions_launch(x, w, v, two_convolutions_y_kernel=two_convolutions_y_kernel):
    """``two_convolutions`` with Triton kernels."""
    B = x.shape[0]
    H = x.shape[2]
    W = x.shape[3]
    clone = torch.ops.aten.clone.default(
        x, memory_format=torch.channels_last
    ).contiguous(memory_format=torch.channels_last)
    clone_2 = torch.ops.aten.clone.default(
        w, memory_format=torch.channels_last
    ).contiguous(memory_format=torch.channels_last)
    conv2d = torch.conv2d(clone, clone_2, None, [1, 1], [1, 1]).contiguous(memory_format=torch.channels_last)
    y = torch.empty_strided((B, 32, H, W), (32 * H * W, 1, 32 * W, 32), dtype=torch.float32, device=x.device)
    n_cols = 32 * B * H * W
    two_convolutions_y_kernel[((n_cols + 1023) // 1024,)](
        conv2d, y, n_cols,
        BLOCK=1024, num_warps=4, num_stages=2,
    )
    conv2d_2 = torch.conv2d(y, v).contiguous(memory_format=torch.channels_last)
    out = torch.ops.aten.clone.default(conv2d_2, memory_format=torch.contiguous_format)
    return out


@triton_op(f"{__name__.replace('.', '_')}::two_convolutions_triton", mutates_args=())
def two_convolutions_triton(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """``two_convolutions_launch`` as an operator for torch.compile, torch.export and CUDA graphs."""
    return two_convolutions_launch(x, w, v, wrap_triton(two_convolutions_y_kernel))
# mtmc: end two_convolutions
