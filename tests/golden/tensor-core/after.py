import torch.nn.functional as F


# mtmc: x=f32[M,K] w=f32[N,K] M=48 K=64 N=32
def linear_relu(x, w):
    if linear_relu_fits(x, w):  # mtmc: dispatch
        return (linear_relu_triton if torch.compiler.is_compiling() else linear_relu_launch)(x, w)
    return F.relu(F.linear(x, w))


# mtmc: begin linear_relu
import torch  # noqa: E402
import triton  # noqa: E402
import triton.language as tl  # noqa: E402
from torch.library import triton_op, wrap_triton  # noqa: E402


@triton.jit
def _unit_scale(largest):
    """The power of two that scales ``largest`` to [64, 128), and its inverse. Exact, also for 0 and subnormals."""
    exponent = (largest.to(tl.int32, bitcast=True) >> 23) & 255
    up = tl.minimum(260 - exponent, 252)
    return (up << 23).to(tl.float32, bitcast=True), ((254 - up) << 23).to(tl.float32, bitcast=True)


@triton.jit
def linear_relu_kernel_split_x(
    program_0,
    x_ptr, x_halves_ptr, x_scale_ptr, M, K, K_PAD, ROWS: tl.constexpr, DEPTH: tl.constexpr,
):
    """Split each row of x into scaled float16 halves: low and high half side by side.

    high holds the leading 11 bits of each significand, low the next 11.
    """
    m = (program_0 * ROWS + tl.arange(0, ROWS))[:, None]
    largest = tl.zeros([ROWS, DEPTH], tl.float32)
    for start in range(0, K, DEPTH):
        k = (start + tl.arange(0, DEPTH))[None, :]
        inside = (m < M) & (k < K)
        x = tl.load(x_ptr + m * K + k, mask=inside, other=0.0)
        largest = tl.maximum(largest, tl.abs(x))
    factor, inverse = _unit_scale(tl.max(largest, axis=1, keep_dims=True))
    tl.store(x_scale_ptr + m, inverse, mask=m < M)
    for start in range(0, K_PAD, DEPTH):
        k = (start + tl.arange(0, DEPTH))[None, :]
        inside = (m < M) & (k < K)
        x = tl.load(x_ptr + m * K + k, mask=inside, other=0.0)
        scaled = x * factor
        high = scaled.to(tl.float16)
        low = (scaled - high.to(tl.float32)).to(tl.float16)
        address = x_halves_ptr + m * (2 * K_PAD) + k
        stored = (m < M) & (k < K_PAD)
        tl.store(address, low, mask=stored)
        tl.store(address + K_PAD, high, mask=stored)


@triton.jit
def linear_relu_kernel_split_w(
    program_0,
    w_ptr, w_halves_ptr, w_scale_ptr, N, K, K_PAD, ROWS: tl.constexpr, DEPTH: tl.constexpr,
):
    """Split each row of w into scaled float16 halves: high and low half side by side.

    high holds the leading 11 bits of each significand, low the next 11.
    """
    n = (program_0 * ROWS + tl.arange(0, ROWS))[:, None]
    largest = tl.zeros([ROWS, DEPTH], tl.float32)
    for start in range(0, K, DEPTH):
        k = (start + tl.arange(0, DEPTH))[None, :]
        inside = (n < N) & (k < K)
        w = tl.load(w_ptr + n * K + k, mask=inside, other=0.0)
        largest = tl.maximum(largest, tl.abs(w))
    factor, inverse = _unit_scale(tl.max(largest, axis=1, keep_dims=True))
    tl.store(w_scale_ptr + n, inverse, mask=n < N)
    for start in range(0, K_PAD, DEPTH):
        k = (start + tl.arange(0, DEPTH))[None, :]
        inside = (n < N) & (k < K)
        w = tl.load(w_ptr + n * K + k, mask=inside, other=0.0)
        scaled = w * factor
        high = scaled.to(tl.float16)
        low = (scaled - high.to(tl.float32)).to(tl.float16)
        address = w_halves_ptr + n * (2 * K_PAD) + k
        stored = (n < N) & (k < K_PAD)
        tl.store(address, high, mask=stored)
        tl.store(address + K_PAD, low, mask=stored)


@triton.jit(do_not_specialize=["end_1"])
def linear_relu_kernel_split(
    x_ptr, w_ptr, x_halves_ptr, x_scale_ptr, w_halves_ptr, w_scale_ptr, M, K, K_PAD, N, end_1,
    ROWS: tl.constexpr, DEPTH: tl.constexpr,
):
    """Split each row of x and w into scaled float16 halves."""
    pid = tl.program_id(0)
    if pid < end_1:
        linear_relu_kernel_split_x(pid, x_ptr, x_halves_ptr, x_scale_ptr, M, K, K_PAD, ROWS, DEPTH)
    else:
        linear_relu_kernel_split_w(pid - end_1, w_ptr, w_halves_ptr, w_scale_ptr, N, K, K_PAD, ROWS, DEPTH)


@triton.jit
def linear_relu_kernel(
    x_halves_ptr, w_halves_ptr, x_scale_ptr, w_scale_ptr, out_ptr, M, N, K_PAD,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
    PIECE: tl.constexpr, ONE_PIECE: tl.constexpr,
):
    """out, in one kernel.

        return F.relu(F.linear(x, w))

    Each program instance computes one tile of the product and applies the fused operations in registers;
    intermediate values are not written to memory.
    """
    # Grouped order: programs that share operands run close together, so operands stay in the L2 cache.
    pid = tl.program_id(0)
    blocks_m = tl.cdiv(M, BLOCK_M)
    blocks_n = tl.cdiv(N, BLOCK_N)
    first_m = pid // (GROUP_M * blocks_n) * GROUP_M
    group_m = min(blocks_m - first_m, GROUP_M)
    m_start = (first_m + pid % group_m) * BLOCK_M
    n_start = pid % (GROUP_M * blocks_n) // group_m * BLOCK_N
    m = (m_start + tl.arange(0, BLOCK_M))[:, None]
    n = (n_start + tl.arange(0, BLOCK_N))[None, :]
    m_mask = m < M
    n_mask = n < N
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    k = tl.arange(0, BLOCK_K)
    # Rows beyond the last wrap around; their results are not stored.
    x_row = x_halves_ptr + (m % M) * (2 * K_PAD) + k[None, :]
    w_row = w_halves_ptr + (n % N) * (2 * K_PAD) + k[:, None]
    # low*high and high*low in one loop.
    for start in range(0, 2 * K_PAD, BLOCK_K):
        x_part = tl.load(x_row + start)
        w_part = tl.load(w_row + start)
        acc = tl.dot(x_part, w_part, acc)
    # Then high*high in pieces of PIECE blocks of K. FP32 units add the pieces with rounding to nearest; tensor cores
    # round
    # towards zero, and that error accumulates over a long sum.
    if ONE_PIECE:
        for start in range(0, K_PAD, BLOCK_K):
            x_part = tl.load(x_row + K_PAD + start)
            w_part = tl.load(w_row + start)
            acc = tl.dot(x_part, w_part, acc)
    else:
        part = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for start in range(0, K_PAD, BLOCK_K):
            x_part = tl.load(x_row + K_PAD + start)
            w_part = tl.load(w_row + start)
            part = tl.dot(x_part, w_part, part)
            if (start // BLOCK_K + 1) % PIECE == 0:
                acc += part
                part = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        acc += part
    acc *= tl.load(x_scale_ptr + m, mask=m_mask, other=0.0)
    acc *= tl.load(w_scale_ptr + n, mask=n_mask, other=0.0)
    tl.store(out_ptr + m * N + n, tl.where(acc < 0, 0.0, acc), mask=m_mask & n_mask)


def _can_launch_on(device) -> bool:
    """Whether launches run on this GPU, and nothing traces (jit, make_fx) or transforms (vmap, jvp) the call."""
    return (
        device == torch.cuda.current_device()
        and torch.autograd.forward_ad._current_level < 0
        and not torch._C._is_tracing()
        and not torch._C._are_functorch_transforms_active()
        and not torch._C._len_torch_dispatch_stack()
    )


def _is_plain_gpu_call(tensors) -> bool:
    """Whether all are ordinary strided tensors on the current GPU, and nothing traces or transforms the call."""
    if torch.compiler.is_compiling():
        current = torch.cuda.current_device()
        return all([isinstance(t, torch.Tensor) and t.is_cuda and t.get_device() == current for t in tensors])
    kinds, strided = (torch.Tensor, torch.nn.Parameter), torch.strided
    for t in tensors:
        # Fake tensors, DTensors and similar classes have no memory that a kernel can read.
        if type(t) not in kinds or t.layout is not strided or t.is_nested or t.is_neg() or not t.is_cuda:
            return False
    devices = {t.get_device() for t in tensors}
    return len(devices) == 1 and _can_launch_on(devices.pop())


_ACCEPTED = {}


def _are_like_accepted(guard, tensors) -> bool:
    """Whether a guard accepted a call with tensors like these: classes, dtypes, shapes, strides, devices and modes."""
    # The function of torch.compile that compares them all at once ends the process for nested tensors.
    if torch.compiler.is_compiling() or any([getattr(t, "is_nested", True) for t in tensors]):
        return False
    for device, accepted in _ACCEPTED.get(guard, ()):
        if accepted.check(*tensors):
            return _can_launch_on(device)
    return False


def _accept(guard, tensors) -> bool:
    """Note that a guard accepts tensors like these, the newest first."""
    if not torch.compiler.is_compiling():
        like = torch._C._dynamo.guards.TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None)
        _ACCEPTED[guard] = [(torch.cuda.current_device(), like), *_ACCEPTED.get(guard, [])[:7]]
    return True


def _reported(guard):
    """The guard; under MTMC_GUARD=warn, with warnings of the first call that it refuses for each reason."""
    import os

    if os.environ.get("MTMC_GUARD") == "warn":
        from mtmc_lsp.guard.worker import misses

        return misses.reported(guard)
    return guard


def _source_digest(source: str) -> str:
    """Digest of statements, which may be indented, without docstrings and the dispatch statements that mtmc inserts."""
    import ast
    import hashlib
    import textwrap

    def calls_guard(condition) -> bool:
        return any(isinstance(node, ast.Name) and node.id.endswith("_fits") for node in ast.walk(condition))

    def text(node) -> str:
        if isinstance(node, list):
            return f"[{','.join(filter(None, map(text, node)))}]"
        if not isinstance(node, ast.AST):
            return repr(node)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            return ""
        if isinstance(node, (ast.If, ast.IfExp)) and calls_guard(node.test):
            # The user's statements, or the expression of a lambda, are in the other branch.
            return text(node.orelse)[1:-1] if isinstance(node, ast.If) else text(node.orelse)
        fields = [(name, value) for name, value in ast.iter_fields(node) if name not in ("ctx", "kind", "type_comment")]
        # Later Python versions add fields, which are empty for older syntax.
        texts = [f"{name}={text(value)}" for name, value in fields if value is not None and value != []]
        return f"{type(node).__name__}({','.join(texts)})"

    tree = ast.parse(textwrap.dedent(source))
    return hashlib.sha256(text(tree).encode("utf-8", "surrogatepass")).hexdigest()[:16]


_SOURCES = {}


def _has_source(function, digest) -> bool:
    """Whether a function's source has this digest. Cached per code object, since sources do not change in a process."""
    code = function.__code__
    if id(code) not in _SOURCES:
        import inspect

        try:
            _SOURCES[id(code)] = code, _source_digest(inspect.getsource(code))
        except (OSError, SyntaxError):
            return False  # no source to compare
    return _SOURCES[id(code)][1] == digest


@torch.compiler.assume_constant_result
def linear_relu_up_to_date() -> bool:
    """Whether globals, helper functions and the environment match those of the verification."""
    try:
        return _has_source(linear_relu, "66ef3805e4114e21")
    except (AttributeError, ImportError, IndexError, KeyError, NameError, TypeError, ValueError):
        return False


@_reported
def linear_relu_fits(x, w) -> bool:
    """Whether the Triton version supports these arguments; otherwise the original code runs."""
    tensors = (x, w)
    return (
        linear_relu_up_to_date()
        and (
            _are_like_accepted("linear_relu_fits", tensors)
            or (
                _is_plain_gpu_call(tensors)
                and x.dtype == torch.float32 and x.ndim == 2 and x.is_contiguous() and x.numel() > 0
                and w.dtype == torch.float32 and w.ndim == 2 and w.shape[1] == x.shape[1] and w.is_contiguous()
                and w.numel() > 0
                and 64 * ((x.shape[1] + 31) // 32) * x.shape[0] < 2147483648
                and 64 * ((x.shape[1] + 31) // 32) * w.shape[0] < 2147483648
                and x.shape[1] * x.shape[0] < 2147483648
                and x.shape[1] * w.shape[0] < 2147483648
                and x.shape[0] * w.shape[0] < 2147483648
                and x.shape[0] >= 32
                and _accept("linear_relu_fits", tensors)
            )
        )
        and not torch.is_autocast_enabled()
        and not (torch.is_grad_enabled() and any([t.requires_grad for t in tensors]))
    )


class _DirectLaunches:
    """A kernel whose compiled versions are launched directly: without a search, and without a check of each pointer.

    A version is kept for all that Triton specialises on: device and dtypes of tensors, whether integers are 1,
    multiples of 16 or beyond 32 bits, constants and options. On AMD's GPUs it is more, so launches are left to
    Triton there, and with unaligned tensors or changed settings everywhere.
    """

    def __init__(self, kernel):
        self.kernel, self.forms, self.driver = kernel, {}, triton.runtime.driver
        self.is_direct = isinstance(kernel, triton.JITFunction) and torch.version.hip is None
        runtime, compilation = triton.knobs.runtime, triton.knobs.compilation
        hooks = [getattr(hook, "calls", hook) for hook in (runtime.launch_enter_hook, runtime.launch_exit_hook)]
        # What the program sets is in these, and the hooks that it adds.
        self.settings = (runtime.__dict__, compilation.__dict__, *hooks, getattr(kernel, "pre_run_hooks", None))

    def __getitem__(self, grid):
        if not self.is_direct or torch.compiler.is_compiling():
            return self.kernel[grid]
        return lambda *arguments, **named: self.launch(grid, arguments, named)

    def launch(self, grid, arguments, named):
        types = (len(arguments), *named, *map(type, arguments), *map(type, named.values()))
        read, versions = self.forms.get(types) or self.forms.setdefault(types, (self.form_of(arguments, named), {}))
        if read is None or any(self.settings) or self.kernel.used_global_vals:
            return self.kernel[grid](*arguments, **named)
        key, addresses, values = read(*arguments, **named)
        compiled = versions.get(key)
        if compiled is None or addresses % 16:
            compiled = self.kernel[grid](*arguments, **named)
            if addresses % 16 == 0 and isinstance(compiled, triton.compiler.CompiledKernel):
                versions[key] = compiled
            return compiled
        if callable(grid):
            grid = grid(dict(zip(self.kernel.arg_names, arguments), **named))
        x, y, z = (*grid, 1, 1)[:3]
        stream = self.driver.active.get_current_stream(key[0])
        compiled.run(x, y, z, stream, compiled.function, compiled.packed_metadata, None, None, None, *values)
        return compiled

    def form_of(self, arguments, named):
        """Reads launches with arguments of these types: key, all addresses in one, and values for the driver."""
        parameters = {p.name: p.is_constexpr for p in self.kernel.params}
        given = dict(zip(parameters, arguments), **named)
        tensors = [name for name, value in given.items() if isinstance(value, torch.Tensor)]
        is_complete = len(given) == len(arguments) + len(named) and parameters.keys() <= given.keys()
        if not tensors or not is_complete or not all(map(str.isidentifier, given)):
            return None
        keys = [f"{tensors[0]}.get_device()"]
        for name, value in given.items():
            is_constant = parameters.get(name, True)  # as options are
            if is_constant and type(value) in (int, bool, float, str, type(None), torch.dtype, triton.language.dtype):
                # 0.0 equals -0.0, and NaN equals nothing.
                keys.append(f"{name}.hex()" if type(value) is float else name)
            elif not is_constant and name in tensors:
                keys.append(f"{name}.dtype")
            elif not is_constant and type(value) is int:
                # 0 stands for all multiples of 16 and 2 for other integers except 1.
                is_short = f"-(2**31) <= {name} < 2**31"
                keys.append(f"{name} % 16 and ({name} == 1 or 2) if {is_short} else ({name} % 16 == 0, {name} >> 63)")
            elif is_constant or type(value) not in (float, bool, type(None)):
                return None
        addresses = " | ".join(f"(of_{name} := {name}.data_ptr())" for name in tensors)
        values = ", ".join(f"of_{name}" if name in tensors else name for name in parameters)
        return eval(f"lambda {', '.join(given)}: (({', '.join(keys)}), {addresses}, [{values}])")


def linear_relu_launch(
    x, w,
    linear_relu_kernel_split=_DirectLaunches(linear_relu_kernel_split),
    linear_relu_kernel=_DirectLaunches(linear_relu_kernel),
):
    """``linear_relu`` with Triton kernels."""
    M, K = x.shape
    N = w.shape[0]
    x_halves = x.new_empty(M, 64 * ((K + 31) // 32), dtype=torch.float16)
    x_scale = x.new_empty(M)
    w_halves = x.new_empty(N, 64 * ((K + 31) // 32), dtype=torch.float16)
    w_scale = x.new_empty(N)
    k_pad = 32 * ((K + 31) // 32)
    end_1 = (M + 3) // 4
    linear_relu_kernel_split[(end_1 + (N + 3) // 4,)](
        x, w, x_halves, x_scale, w_halves, w_scale, M, K, k_pad, N, end_1,
        ROWS=4, DEPTH=256, num_warps=8, num_stages=2,
    )
    out = x.new_empty(M, N)
    linear_relu_kernel[((M + 15) // 16 * ((N + 15) // 16),)](
        x_halves, w_halves, x_scale, w_scale, out, M, N, k_pad,
        BLOCK_M=16, BLOCK_N=16, BLOCK_K=32, GROUP_M=4, PIECE=8, ONE_PIECE=k_pad <= 256, num_warps=4, num_stages=2,
    )
    return out


@triton_op(f"{__name__.replace('.', '_')}::linear_relu_triton", mutates_args=())
def linear_relu_triton(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """``linear_relu_launch`` as an operator for torch.compile, torch.export and CUDA graphs."""
    return linear_relu_launch(x, w, wrap_triton(linear_relu_kernel_split), wrap_triton(linear_relu_kernel))
# mtmc: end linear_relu
