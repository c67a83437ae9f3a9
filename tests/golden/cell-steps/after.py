import torch


# mtmc: x=f32[T,B,G] w=f32[H,G]@-0.2..0.2 B=32 T=64 H=48 G=192
def lstm(x, w):
    if lstm_fits(x, w):  # mtmc: dispatch
        return (lstm_triton if torch.compiler.is_compiling() else lstm_launch)(x, w)
    h = c = torch.zeros(x.shape[1], w.shape[0], device=x.device)
    outs = []
    for t in range(x.shape[0]):
        i, f, g, o = (x[t] + h @ w).chunk(4, dim=1)
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        h = torch.sigmoid(o) * torch.tanh(c)
        outs.append(h)
    return torch.stack(outs)


# mtmc: begin lstm
import triton  # noqa: E402
import triton.language as tl  # noqa: E402
from torch.library import triton_op, wrap_triton  # noqa: E402


@triton.jit
def _tanh(x):
    """tanh to a few ulp: an odd polynomial near zero, where the exponential form loses precision by cancellation."""
    e = tl.exp(-2.0 * tl.abs(x))
    large = (1.0 - e) / (1.0 + e)
    s = x * x
    small = tl.abs(x) * (1.0 + s * (-0.33333334 + s * (0.13333331 + s * (-0.05396779 + s * (0.02181148 - s * 0.0083)))))
    return tl.where(x < 0.0, -1.0, 1.0) * tl.where(tl.abs(x) < 0.35, small, large)


@triton.jit(do_not_specialize=["t"])
def lstm_kernel(
    x_t_ptr,
    w_ptr,
    h_ptr,
    c_states_ptr,
    h_states_ptr,
    n_rows,
    B_48,
    B_192,
    t,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """out, in one kernel.

        for t in range(x.shape[0]):
        i, f, g, o = (x[t] + h @ w).chunk(4, dim=1)
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        h = torch.sigmoid(o) * torch.tanh(c)

    Each launch runs one iteration. A program instance computes some columns of some rows, and states are in
    memory.
    """
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    row_mask = rows < n_rows
    old_c_ptr = c_states_ptr + t % 2 * B_48
    next_c_ptr = c_states_ptr + (t + 1) % 2 * B_48
    old_h_ptr = h_states_ptr + t % 2 * B_48
    next_h_ptr = h_states_ptr + (t + 1) % 2 * B_48
    x_t_ptr += tl.cast(t, tl.int64) * B_192
    h_ptr += tl.cast(t, tl.int64) * B_48
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    x_t = tl.load(x_t_ptr + 48 + rows * 192 + cols, mask=row_mask, other=0.0)
    old_c = tl.load(old_c_ptr + rows * 48 + cols, mask=row_mask, other=0.0)
    x_t_2 = tl.load(x_t_ptr + rows * 192 + cols, mask=row_mask, other=0.0)
    x_t_3 = tl.load(x_t_ptr + 96 + rows * 192 + cols, mask=row_mask, other=0.0)
    x_t_4 = tl.load(x_t_ptr + 144 + rows * 192 + cols, mask=row_mask, other=0.0)
    product = tl.zeros([ROWS, BLOCK], tl.float32)
    product_2 = tl.zeros([ROWS, BLOCK], tl.float32)
    product_3 = tl.zeros([ROWS, BLOCK], tl.float32)
    product_4 = tl.zeros([ROWS, BLOCK], tl.float32)
    for start_2 in range(0, 48, DEPTH):
        inner = start_2 + tl.arange(0, DEPTH)[:, None]
        inner_mask = inner < 48
        k = start_2 + tl.arange(0, DEPTH)[None, :]
        k_mask = k < 48
        old_h = tl.load(old_h_ptr + rows * 48 + k, mask=row_mask & k_mask, other=0.0)
        w = tl.load(w_ptr + 48 + cols + inner * 192, mask=inner_mask, other=0.0)
        product = tl.dot(old_h, w, product, input_precision="ieee")
        w_2 = tl.load(w_ptr + cols + inner * 192, mask=inner_mask, other=0.0)
        product_2 = tl.dot(old_h, w_2, product_2, input_precision="ieee")
        w_3 = tl.load(w_ptr + 96 + cols + inner * 192, mask=inner_mask, other=0.0)
        product_3 = tl.dot(old_h, w_3, product_3, input_precision="ieee")
        w_4 = tl.load(w_ptr + 144 + cols + inner * 192, mask=inner_mask, other=0.0)
        product_4 = tl.dot(old_h, w_4, product_4, input_precision="ieee")
    add = x_t + product
    add_2 = x_t_2 + product_2
    add_3 = x_t_3 + product_3
    c = tl.sigmoid(add) * old_c + tl.sigmoid(add_2) * _tanh(add_3)
    add_4 = x_t_4 + product_4
    h = tl.sigmoid(add_4) * _tanh(c)
    tl.store(next_c_ptr + rows * 48 + cols, c, mask=row_mask)
    tl.store(next_h_ptr + rows * 48 + cols, h, mask=row_mask)
    tl.store(h_ptr + rows * 48 + cols, h, mask=row_mask)


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
def lstm_up_to_date_code() -> bool:
    """Whether helper functions, closures and the environment match those of the verification."""
    try:
        return (
            _has_source(lstm, "1b0ec75107057dcd")
        )
    except (AttributeError, ImportError, IndexError, KeyError, NameError, TypeError, ValueError):
        return False


def lstm_up_to_date() -> bool:
    """Whether globals, helper functions and the environment match those of the verification."""
    try:
        return (
            lstm_up_to_date_code()
        )
    except (AttributeError, ImportError, IndexError, KeyError, NameError, TypeError, ValueError):
        return False


@_reported
def lstm_fits(x, w) -> bool:
    """Whether the Triton version supports these arguments; otherwise the original code runs."""
    if not (
        lstm_up_to_date()
    ):
        return False
    tensors = (x, w)
    return (
        _is_plain_gpu_call(tensors)
        and not torch.is_autocast_enabled()
        and not (torch.is_grad_enabled() and any([t.requires_grad for t in tensors]))
        and x.dtype == torch.float32 and x.ndim == 3 and x.shape[2] == 192 and x.is_contiguous() and x.numel() > 0
        and w.dtype == torch.float32 and w.shape == (48, 192) and w.is_contiguous()
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


def lstm_launch(x, w, lstm_kernel=_DirectLaunches(lstm_kernel)):
    """``lstm`` with Triton kernels."""
    T = x.shape[0]
    B = x.shape[1]
    out = x.new_empty(T, B, 48)
    c_states = x.new_empty(2, B, 48)
    h_states = x.new_empty(2, B, 48)
    c_states[0] = 0.0
    h_states[0] = 0.0
    n_rows = B
    n_cols = 48
    for t in range(T):
        lstm_kernel[((n_rows + 15) // 16, (n_cols + 15) // 16)](
            x, w, out, c_states, h_states, n_rows, 48 * B, 192 * B, t,
            ROWS=16, BLOCK=16, DEPTH=32, num_warps=4, num_stages=3,
        )
    return out


@triton_op(f"{__name__.replace('.', '_')}::lstm_triton", mutates_args=())
def lstm_triton(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """``lstm_launch`` as an operator for torch.compile, torch.export and CUDA graphs."""
    return lstm_launch(x, w, wrap_triton(lstm_kernel))
# mtmc: end lstm
