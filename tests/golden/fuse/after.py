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


_ACCEPTED = {}


def _are_like_accepted(guard, tensors) -> bool:
    """Whether a guard accepted a call with tensors like these: classes, dtypes, shapes, strides, devices and modes.

    One function of torch.compile compares them all, which is faster than to read each attribute from Python.
    """
    # Torch's function ends the process for nested tensors.
    if torch.compiler.is_compiling() or any([getattr(t, "is_nested", True) for t in tensors]):
        return False
    for device, accepted in _ACCEPTED.get(guard, ()):
        if accepted.check(*tensors):
            return (
                device == torch.cuda.current_device()
                and torch.autograd.forward_ad._current_level < 0
                and not torch._C._is_tracing()
                and not torch._C._are_functorch_transforms_active()
                and not torch._C._len_torch_dispatch_stack()
            )
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
    except (AttributeError, ImportError, IndexError, KeyError, NameError, TypeError, ValueError):
        return False


def bias_gelu_up_to_date() -> bool:
    """Whether globals, helper functions and the environment match those of the verification."""
    try:
        return (
            bias_gelu_up_to_date_code()
        )
    except (AttributeError, ImportError, IndexError, KeyError, NameError, TypeError, ValueError):
        return False


@_reported
def bias_gelu_fits(x, bias) -> bool:
    """Whether the Triton version supports these arguments; otherwise the original code runs."""
    if not (
        bias_gelu_up_to_date()
    ):
        return False
    tensors = (x, bias)
    if not (
        _are_like_accepted("bias_gelu_fits", tensors)
        or (
            _is_plain_gpu_call(tensors)
            and x.dtype == torch.float32 and x.ndim == 2 and x.is_contiguous() and x.numel() > 0
            and bias.dtype == torch.float32 and bias.ndim == 1 and bias.shape[0] == x.shape[1] and bias.is_contiguous()
            and x.shape[1] <= 8388480
            and _accept("bias_gelu_fits", tensors)
        )
    ):
        return False
    return (
        not torch.is_autocast_enabled()
        and not (torch.is_grad_enabled() and any([t.requires_grad for t in tensors]))
    )


class _DirectLaunches:
    """A kernel whose compiled versions are launched directly: without a search, and without a check of each pointer.

    A version is kept for all that Triton specialises on: device and dtypes of tensors, whether integers are 1,
    multiples of 16 or beyond 32 bits, constants and options. An autotuner reads its key as well, and heuristics may
    read all arguments, so their values and the layouts of tensors count, too. Launches with unaligned tensors or
    changed settings are left to Triton.
    """

    def __init__(self, fn):
        self.fn, self.forms, self.by_value, hooks = fn, {}, set(), []
        while hasattr(fn, "fn") and not isinstance(fn, triton.JITFunction):
            self.by_value |= set(getattr(fn, "keys", fn.arg_names))  # what an autotuner reads, or heuristics
            hooks += [config.pre_hook for config in getattr(fn, "configs", [])]
            fn = fn.fn
        # For AMD's GPUs Triton also specialises on the size of tensors.
        self.is_direct = isinstance(fn, triton.JITFunction) and torch.version.hip is None and not any(hooks)
        self.kernel, self.names = fn, fn.arg_names if self.is_direct else []
        self.variables = {p.name for p in fn.params if not p.is_constexpr} if self.is_direct else set()
        self.plain = (int, bool, float, str, type(None), torch.dtype, triton.language.dtype)
        knobs, self.driver = triton.knobs, triton.runtime.driver
        hooks = [knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook]
        hooks = [getattr(hook, "calls", hook) for hook in hooks] + [getattr(fn, "pre_run_hooks", None)]
        # What the program sets is in these, and the hooks that it adds.
        self.settings = (knobs.runtime.__dict__, knobs.compilation.__dict__, *hooks)

    def __getitem__(self, grid):
        if not self.is_direct or torch.compiler.is_compiling():
            return self.fn[grid]
        return lambda *arguments, **named: self.launch(grid, arguments, named)

    def launch(self, grid, arguments, named):
        types = (len(arguments), *named, *map(type, arguments), *map(type, named.values()))
        form = self.forms.get(types)
        if form is None:
            form = self.forms[types] = self.form_of(arguments, named), {}
        read, versions = form
        if read is None or any(self.settings) or (self.kernel.used_global_vals and self.is_changed()):
            return self.fn[grid](*arguments, **named)
        key, addresses, values = read(*arguments, **named)
        device = key[0]
        version = versions.get((device, key))
        if addresses % 16:
            return self.fn[grid](*arguments, **named)
        if version is None:
            return self.searched(grid, arguments, named, versions, (device, key))
        compiled, rest = version
        for place, name, value in rest:
            values[place] = value
        if callable(grid):
            bound = dict(zip(self.names, arguments))
            bound.update(named)
            for _, name, value in rest:
                bound[name] = value
            grid = grid(bound)
        x, y, z = (*grid, 1, 1)[:3]
        stream = self.driver.active.get_current_stream(device)
        compiled.run(x, y, z, stream, compiled.function, compiled.packed_metadata, None, None, None, *values)
        return compiled

    def is_changed(self):
        """Whether global variables that the kernel reads have other values than when it was compiled."""
        used = self.kernel.used_global_vals.items()
        return any(space.get(name) != value for (name, _), (value, space) in used)

    def form_of(self, arguments, named):
        """Reads launches with arguments of these types: key, all addresses in one, and values for the driver."""
        given = [*zip(self.names, arguments), *named.items()]
        values, keys, tensors = dict.fromkeys(self.names), [], []
        for name, value in given:
            is_variable, is_value = name in self.variables, name not in self.variables or name in self.by_value
            if is_variable and isinstance(value, torch.Tensor):
                layout = f", {name}.shape, {name}.stride()" if is_value else ""
                keys.append(f"{name}.dtype{layout}")
                tensors.append(name)
                values[name] = f"of_{name}"
                continue
            if type(value) not in self.plain or (is_variable and isinstance(value, (str, torch.dtype))):
                return None
            if is_value:
                # 0.0 equals -0.0, and NaN equals nothing.
                keys.append(f"{name}.hex()" if isinstance(value, float) else name)
            elif type(value) is int:
                # 0 stands for all multiples of 16 and 2 for other integers except 1.
                is_short = f"-(2**31) <= {name} < 2**31"
                keys.append(f"{name} % 16 and ({name} == 1 or 2) if {is_short} else ({name} % 16 == 0, {name} >> 63)")
            values[name] = name
        names = [name for name, _ in given]
        if not tensors or len(arguments) > len(self.names) or len({*names}) < len(names):
            return None
        if not all(map(str.isidentifier, names)):
            return None
        addresses = " | ".join(f"(of_{name} := {name}.data_ptr())" for name in tensors)
        bound = ", ".join(str(values[name]) for name in self.names)
        key = ", ".join([f"{tensors[0]}.get_device()", *keys])
        return eval(f"lambda {', '.join(names)}: (({key},), {addresses}, [{bound}])")

    def searched(self, grid, arguments, named, versions, key):
        passed = {}  # what the autotuner and heuristics pass to the kernel at last
        self.kernel.pre_run_hooks.append(lambda *args, **kwargs: passed.update(kwargs))
        try:
            compiled = self.fn[grid](*arguments, **named)
        finally:
            self.kernel.pre_run_hooks.pop()
        if isinstance(compiled, triton.compiler.CompiledKernel):
            if len(versions) == 1000:
                versions.clear()
            rest = [(i, p.name, passed.get(p.name, p.default)) for i, p in enumerate(self.kernel.params)]
            rest = [item for item in rest[len(arguments) :] if item[1] not in named]
            versions[key] = compiled, rest
        return compiled


def bias_gelu_launch(x, bias, bias_gelu_kernel=_DirectLaunches(bias_gelu_kernel)):
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
