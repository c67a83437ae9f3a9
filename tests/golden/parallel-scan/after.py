import torch


# mtmc: decay=f32[B,T,D]@0..1 x=f32[B,T,D] B=2 T=4096 D=32
def scan(decay, x):
    if scan_fits(decay, x):  # mtmc: dispatch
        return (scan_triton if torch.compiler.is_compiling() else scan_launch)(decay, x)
    h = torch.zeros_like(x[:, 0])
    out = torch.empty_like(x)
    for t in range(x.shape[1]):
        h = decay[:, t] * h + x[:, t]
        out[:, t] = h
    return out


# mtmc: begin scan
import triton  # noqa: E402
import triton.language as tl  # noqa: E402
from torch.library import triton_op, wrap_triton  # noqa: E402


@triton.jit
def _affine(a1, b1, a2, b2):
    """The update a1 * x + b1, and then a2 * x + b2, as one."""
    return a1 * a2, a2 * b1 + b2


@triton.jit
def _row_of(x, chosen):
    """The row of x where ``chosen`` holds."""
    return tl.sum(tl.where(chosen, x, 0), axis=0, keep_dims=True).to(x.dtype)


@triton.jit
def scan_kernel_segments(
    decay_t_ptr,
    x_t_ptr,
    h_a_ptr,
    h_b_ptr,
    T,
    n_cols,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    SEGMENTS: tl.constexpr,
):
    """What the iterations of each segment do to h, as one update."""
    outer = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    col_mask = cols < n_cols
    segment = tl.program_id(2)
    length = tl.cdiv(tl.cdiv(T, ROWS), SEGMENTS) * ROWS
    begin = segment * length
    end = tl.minimum(begin + length, T)
    h_a = tl.full([1, BLOCK], 1.0, tl.float64)
    h_b = tl.full([1, BLOCK], 0.0, tl.float64)
    for start in tl.range(begin, end, ROWS, num_stages=2):
        rows = (start + tl.arange(0, ROWS)[:, None]).to(tl.int64)
        row_mask = rows < T
        is_last = rows == tl.minimum(start + ROWS, T) - 1
        decay_t = tl.load(decay_t_ptr + outer * T * n_cols + cols + rows * n_cols, mask=row_mask & col_mask, other=0.0)
        h_a_2 = decay_t.to(tl.float64)
        x_t = tl.load(x_t_ptr + outer * T * n_cols + cols + rows * n_cols, mask=row_mask & col_mask, other=0.0)
        h_b_2 = x_t.to(tl.float64)
        h_a_3, h_b_3 = tl.associative_scan((h_a_2, h_b_2), 0, _affine)
        chunk_a = _row_of(h_a_3, is_last)
        chunk_b = _row_of(h_b_3, is_last)
        h_a, h_b = _affine(h_a, h_b, chunk_a, chunk_b)
    tl.store(h_a_ptr + (outer * SEGMENTS + segment) * n_cols + cols, h_a, mask=col_mask)
    tl.store(h_b_ptr + (outer * SEGMENTS + segment) * n_cols + cols, h_b, mask=col_mask)


@triton.jit
def scan_kernel(
    decay_t_ptr,
    x_t_ptr,
    h_a_ptr,
    h_b_ptr,
    out_ptr,
    flags_ptr,
    T,
    n_cols,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    SEGMENTS: tl.constexpr,
):
    """out, in one kernel.

        for t in range(x.shape[1]):
        h = decay[:, t] * h + x[:, t]
        out[:, t] = h

    Each program instance scans chunks of 32 iterations, 8 program instances for each tile.
    """
    outer = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    col_mask = cols < n_cols
    segment = tl.program_id(2)
    length = tl.cdiv(tl.cdiv(T, ROWS), SEGMENTS) * ROWS
    begin = segment * length
    end = tl.minimum(begin + length, T)
    h = tl.full([1, BLOCK], 0.0, tl.float32)
    for earlier in range(0, segment):
        h_a = tl.load(h_a_ptr + (outer * SEGMENTS + earlier) * n_cols + cols, mask=col_mask, other=0.0)
        h_b = tl.load(h_b_ptr + (outer * SEGMENTS + earlier) * n_cols + cols, mask=col_mask, other=0.0)
        h = (h_a * h + h_b).to(tl.float32)
    unsafe = tl.zeros([ROWS, BLOCK], tl.int1)
    for start in tl.range(begin, end, ROWS, num_stages=2):
        rows = (start + tl.arange(0, ROWS)[:, None]).to(tl.int64)
        row_mask = rows < T
        is_last = rows == tl.minimum(start + ROWS, T) - 1
        decay_t = tl.load(decay_t_ptr + outer * T * n_cols + cols + rows * n_cols, mask=row_mask & col_mask, other=0.0)
        h_a_2 = decay_t.to(tl.float64)
        x_t = tl.load(x_t_ptr + outer * T * n_cols + cols + rows * n_cols, mask=row_mask & col_mask, other=0.0)
        h_b_2 = x_t.to(tl.float64)
        h_a_3, h_b_3 = tl.associative_scan((h_a_2, h_b_2), 0, _affine)
        h_2 = (h_a_3 * h + h_b_3).to(tl.float32)
        unsafe = unsafe | (~(tl.abs(h_2) < float("inf")) & row_mask & col_mask)
        tl.store(out_ptr + outer * T * n_cols + cols + rows * n_cols, h_2, mask=row_mask & col_mask)
        h = _row_of(h_2, is_last)
    tl.store(
        flags_ptr + (outer * tl.num_programs(1) + tl.program_id(1)) * SEGMENTS + segment, tl.max(unsafe.to(tl.int32))
    )


@triton.jit
def scan_kernel_again(decay_t_ptr, x_t_ptr, flags_ptr, out_ptr, T, n_cols, BLOCK: tl.constexpr):
    """Computes tiles again, one iteration after another, whose states are not all finite."""
    if (
        tl.max(tl.load(flags_ptr + (tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)) * 8 + tl.arange(0, 8)))
        == 0
    ):
        return
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    col_mask = cols < n_cols
    h = tl.full([BLOCK], 0.0, tl.float32)
    for t in tl.range(0, T, num_stages=2):
        decay_t = tl.load(decay_t_ptr + row * T * n_cols + cols, mask=col_mask, other=0.0)
        x_t = tl.load(x_t_ptr + row * T * n_cols + cols, mask=col_mask, other=0.0)
        h_2 = decay_t * h + x_t
        tl.store(out_ptr + row * T * n_cols + cols, h_2, mask=col_mask)
        h = h_2
        decay_t_ptr += n_cols
        x_t_ptr += n_cols
        out_ptr += n_cols


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
def scan_up_to_date_code() -> bool:
    """Whether helper functions, closures and the environment match those of the verification."""
    try:
        return (
            _has_source(scan, "2082ab183050aaa3")
        )
    except (AttributeError, ImportError, IndexError, KeyError, NameError, TypeError, ValueError):
        return False


def scan_up_to_date() -> bool:
    """Whether globals, helper functions and the environment match those of the verification."""
    try:
        return (
            scan_up_to_date_code()
        )
    except (AttributeError, ImportError, IndexError, KeyError, NameError, TypeError, ValueError):
        return False


@_reported
def scan_fits(decay, x) -> bool:
    """Whether the Triton version supports these arguments; otherwise the original code runs."""
    if not (
        scan_up_to_date()
    ):
        return False
    tensors = (decay, x)
    return (
        _is_plain_gpu_call(tensors)
        and not torch.is_autocast_enabled()
        and not (torch.is_grad_enabled() and any([t.requires_grad for t in tensors]))
        and decay.dtype == torch.float32 and decay.ndim == 3 and decay.is_contiguous() and decay.numel() > 0
        and x.dtype == torch.float32 and x.shape == decay.shape and x.is_contiguous()
        and decay.shape[2] <= 2097120
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


def scan_launch(
    decay,
    x,
    scan_kernel_segments=_DirectLaunches(scan_kernel_segments),
    scan_kernel=_DirectLaunches(scan_kernel),
    scan_kernel_again=_DirectLaunches(scan_kernel_again),
):
    """``scan`` with Triton kernels."""
    B = decay.shape[0]
    D = decay.shape[2]
    T = decay.shape[1]
    h_a = decay.new_empty(B, 8, D, dtype=torch.float64)
    h_b = decay.new_empty(B, 8, D, dtype=torch.float64)
    n_cols = D
    n_outer = B
    scan_kernel_segments[(n_outer, (n_cols + 31) // 32, 8)](
        decay, x, h_a, h_b, T, n_cols,
        ROWS=32, BLOCK=32, SEGMENTS=8, num_warps=4, num_stages=2,
    )
    out = torch.empty_like(decay)
    flags = decay.new_empty(B, ((D + 31) // 32), 8, dtype=torch.int32)
    scan_kernel[(n_outer, (n_cols + 31) // 32, 8)](
        decay, x, h_a, h_b, out, flags, T, n_cols,
        ROWS=32, BLOCK=32, SEGMENTS=8, num_warps=4, num_stages=2,
    )
    n_rows = B
    scan_kernel_again[(n_rows, (n_cols + 31) // 32)](
        decay, x, flags, out, T, n_cols,
        BLOCK=32, num_warps=4, num_stages=2,
    )
    return out


@triton_op(f"{__name__.replace('.', '_')}::scan_triton", mutates_args=())
def scan_triton(decay: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """``scan_launch`` as an operator for torch.compile, torch.export and CUDA graphs."""
    return scan_launch(
        decay, x, wrap_triton(scan_kernel_segments), wrap_triton(scan_kernel),
        wrap_triton(scan_kernel_again),
    )
# mtmc: end scan
