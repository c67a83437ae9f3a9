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
def swiglu_up_to_date() -> bool:
    """Whether globals, helper functions and the environment match those of the verification."""
    try:
        return _has_source(swiglu, "d167c8584fd0692a")
    except (AttributeError, ImportError, IndexError, KeyError, NameError, TypeError, ValueError):
        return False


@_reported
def swiglu_fits(gate, up) -> bool:
    """Whether the Triton version supports these arguments; otherwise the original code runs."""
    tensors = (gate, up)
    return (
        swiglu_up_to_date()
        and (
            _are_like_accepted("swiglu_fits", tensors)
            or (
                _is_plain_gpu_call(tensors)
                and gate.dtype == torch.float32 and gate.ndim == 2 and gate.is_contiguous() and gate.numel() > 0
                and up.dtype == torch.float32 and up.shape == gate.shape and up.is_contiguous()
                and _accept("swiglu_fits", tensors)
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


def swiglu_launch(gate, up, swiglu_kernel=_DirectLaunches(swiglu_kernel)):
    """``swiglu`` with Triton kernels."""
    M, N = gate.shape
    out = torch.empty_like(gate)
    n_cols = M * N
    swiglu_kernel[((n_cols + 1023) // 1024,)](gate, up, out, n_cols, BLOCK=1024, num_warps=4, num_stages=2)
    return out


@triton_op(f"{__name__.replace('.', '_')}::swiglu_triton", mutates_args=())
def swiglu_triton(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """``swiglu_launch`` as an operator for torch.compile, torch.export and CUDA graphs."""
    return swiglu_launch(gate, up, wrap_triton(swiglu_kernel))
# mtmc: end swiglu
