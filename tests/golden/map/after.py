import torch.nn.functional as F


# mtmc: gate=f32[M,N] up=f32[M,N] M=32 N=96
def swiglu(gate, up):
    if swiglu_fits(gate, up):  # mtmc: dispatch
        return (swiglu_triton if torch.compiler.is_compiling() else swiglu_launch)(gate, up)
    return F.silu(gate) * up


# mtmc: begin swiglu
import torch  # noqa: E402
import triton  # noqa: E402
import triton.language as tl  # noqa: E402
from torch.library import triton_op, wrap_triton  # noqa: E402


@triton.jit
def swiglu_kernel(gate_ptr, up_ptr, out_ptr, n_cols, BLOCK: tl.constexpr):
    """out, in one kernel.

        return F.silu(gate) * up

    One pass over memory; intermediate values are not written to memory.
    """
    cols = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    col_mask = cols < n_cols
    gate = tl.load(gate_ptr + cols, mask=col_mask, other=0.0)
    up = tl.load(up_ptr + cols, mask=col_mask, other=0.0)
    tl.store(out_ptr + cols, gate * tl.sigmoid(gate) * up, mask=col_mask)


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
def swiglu_up_to_date_code() -> bool:
    """Whether helper functions, closures and the environment match those of the verification."""
    try:
        return (
            _has_source(swiglu, "d167c8584fd0692a")
        )
    except (AttributeError, IndexError, KeyError, NameError, TypeError, ValueError):
        return False


def swiglu_up_to_date() -> bool:
    """Whether globals, helper functions and the environment match those of the verification."""
    try:
        return (
            swiglu_up_to_date_code()
        )
    except (AttributeError, IndexError, KeyError, NameError, TypeError, ValueError):
        return False


@_reported
def swiglu_fits(gate, up) -> bool:
    """Whether the Triton version supports these arguments; otherwise the original code runs."""
    if not (
        swiglu_up_to_date()
    ):
        return False
    tensors = (gate, up)
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
        and gate.ndim == 2
        and gate.numel() > 0
        and up.shape == gate.shape
    )


def swiglu_launch(gate, up, swiglu_kernel=swiglu_kernel):
    """``swiglu`` with Triton kernels."""
    M = gate.shape[0]
    N = gate.shape[1]
    out = torch.empty_like(gate)
    n_cols = M * N
    swiglu_kernel[((n_cols + 1023) // 1024,)](gate, up, out, n_cols, BLOCK=1024, num_warps=4, num_stages=2)
    return out


@triton_op(f"{__name__.replace('.', '_')}::swiglu_triton", mutates_args=())
def swiglu_triton(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """``swiglu_launch`` as an operator for torch.compile, torch.export and CUDA graphs."""
    return swiglu_launch(gate, up, wrap_triton(swiglu_kernel))
# mtmc: end swiglu
