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


def _is_plain_gpu_call(tensors) -> bool:
    """Whether all are ordinary strided tensors on the current GPU, and nothing traces or transforms the call."""
    if torch.compiler.is_compiling():
        current = torch.cuda.current_device()
        return all([isinstance(t, torch.Tensor) and t.is_cuda and t.get_device() == current for t in tensors])
    kinds, strided, devices = (torch.Tensor, torch.nn.Parameter), torch.strided, set()
    for t in tensors:
        # Fake tensors, DTensors and similar classes have no memory that a kernel can read.
        if type(t) not in kinds or t.layout is not strided or t.is_nested or t.is_neg() or not t.is_cuda:
            return False
        devices.add(t.get_device())
    # Tracing (jit, make_fx) and transforms (vmap, forward-mode AD) cannot see a launch.
    return (
        devices == {torch.cuda.current_device()}
        and torch.autograd.forward_ad._current_level < 0
        and not torch._C._is_tracing()
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
    except (AttributeError, ImportError, IndexError, KeyError, NameError, TypeError, ValueError):
        return False


def two_convolutions_up_to_date() -> bool:
    """Whether globals, helper functions and the environment match those of the verification."""
    try:
        return (
            two_convolutions_up_to_date_code()
        )
    except (AttributeError, ImportError, IndexError, KeyError, NameError, TypeError, ValueError):
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
        _is_plain_gpu_call(tensors)
        and not torch.is_autocast_enabled()
        and not (torch.is_grad_enabled() and any([t.requires_grad for t in tensors]))
        and x.dtype == torch.float32 and x.ndim == 4 and x.shape[1] == 16 and x.is_contiguous() and x.numel() > 0
        and w.dtype == torch.float32 and w.shape == (32, 16, 3, 3) and w.is_contiguous()
        and v.dtype == torch.float32 and v.shape == (8, 32, 1, 1) and v.is_contiguous()
    )


class _DirectLaunches:
    """A kernel whose compiled versions are launched directly, as ``compiled[grid](...)``.

    ``kernel[grid](...)`` searches for the compiled version in each launch: 23 us on an H100 host, 12 us without.
    Here a version is kept for all that Triton specialises on: device and dtypes of tensors, whether integers are 1,
    multiples of 16 or beyond 32 bits, constants and options. Launches with unaligned tensors are left to Triton.
    """

    def __init__(self, kernel):
        self.kernel, self.versions = kernel, {}
        # An autotuner chooses versions itself. For AMD's GPUs Triton also specialises on the size of tensors.
        self.is_direct = isinstance(kernel, triton.JITFunction) and torch.version.hip is None

    def __getitem__(self, grid):
        if not self.is_direct or callable(grid) or torch.compiler.is_compiling():
            return self.kernel[grid]
        return lambda *arguments, **constants: self.launch(grid, arguments, constants)

    def launch(self, grid, arguments, constants):
        # Triton tells apart 1, 1.0 and True, which are equal in Python.
        key = [*constants, None, *constants.values(), *map(type, constants.values())]
        tensor, addresses = None, 0
        for argument in arguments:
            if type(argument) is int:
                if -(2**31) <= argument < 2**31:
                    # 0 stands for all multiples of 16 and 2 for other integers except 1.
                    key.append(1 if argument == 1 else argument % 16 and 2)
                else:
                    key.append((argument % 16 == 0, argument // 2**63))
            elif isinstance(argument, torch.Tensor):
                key.append(argument.dtype)
                tensor, addresses = argument, addresses | argument.data_ptr()
            else:
                key.append(type(argument))
        device = None if tensor is None else tensor.get_device()
        key = (device, *key)
        version = self.versions.get(key)
        settings = triton.knobs.runtime.__dict__ or triton.knobs.compilation.__dict__  # those that the program changed
        if version is None or addresses % 16 or settings or self.kernel.pre_run_hooks:
            compiled = self.kernel[grid](*arguments, **constants)
            if not (addresses % 16 or settings) and self.is_complete(key, compiled, arguments, constants):
                self.versions[key] = compiled, [constants[name] for name in self.kernel.arg_names[len(arguments) :]]
        else:
            compiled, values = version
            stream = triton.runtime.driver.active.get_current_stream(device)
            compiled[(*grid, 1, 1)[:3]](*arguments, *values, stream=stream)

    def is_complete(self, key, compiled, arguments, constants) -> bool:
        """Whether the key holds all that the compiled version depends on."""
        return (
            isinstance(compiled, triton.compiler.CompiledKernel)
            and key[0] is not None
            and not self.kernel.used_global_vals  # Triton compares these in every launch
            and all(isinstance(item, torch.Tensor) or type(item) in (int, float, bool) for item in arguments)
            # 0.0 equals -0.0, and NaN equals nothing.
            and not any([isinstance(value, float) for value in constants.values()])
            and not any([item.is_constexpr for item in self.kernel.params[: len(arguments)]])
            and all(item.is_constexpr and item.name in constants for item in self.kernel.params[len(arguments) :])
        )


def two_convolutions_launch(
    x,
    w,
    v,
    two_convolutions_y_kernel=_DirectLaunches(two_convolutions_y_kernel),
):
    """``two_convolutions`` with Triton kernels."""
    B = x.shape[0]
    H = x.shape[2]
    W = x.shape[3]
    clone = torch.clone(x, memory_format=torch.channels_last).contiguous(memory_format=torch.channels_last)
    clone_2 = torch.clone(w, memory_format=torch.channels_last).contiguous(memory_format=torch.channels_last)
    conv2d = torch.conv2d(clone, clone_2, None, [1, 1], [1, 1]).contiguous(memory_format=torch.channels_last)
    y = torch.empty_strided((B, 32, H, W), (32 * H * W, 1, 32 * W, 32), dtype=torch.float32, device=x.device)
    n_cols = 32 * B * H * W
    two_convolutions_y_kernel[((n_cols + 1023) // 1024,)](
        conv2d, y, n_cols,
        BLOCK=1024, num_warps=4, num_stages=2,
    )
    conv2d_2 = torch.conv2d(y, v).contiguous(memory_format=torch.channels_last)
    out = torch.clone(conv2d_2, memory_format=torch.contiguous_format)
    return out


@triton_op(f"{__name__.replace('.', '_')}::two_convolutions_triton", mutates_args=())
def two_convolutions_triton(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """``two_convolutions_launch`` as an operator for torch.compile, torch.export and CUDA graphs."""
    return two_convolutions_launch(x, w, v, wrap_triton(two_convolutions_y_kernel))
# mtmc: end two_convolutions
