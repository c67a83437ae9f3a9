import torch.nn.functional as F


# mtmc: x=f32[N,D] weight=f32[V,D] target=i64[N]@0..199 N=48 D=32 V=200 grad=x,weight
def linear_cross_entropy(x, weight, target):
    if linear_cross_entropy_fits(x, weight, target):  # mtmc: dispatch
        return linear_cross_entropy_launch(x, weight, target, linear_cross_entropy)
    return F.cross_entropy(x @ weight.T, target)


# mtmc: begin linear_cross_entropy
import torch  # noqa: E402
import triton  # noqa: E402
import triton.language as tl  # noqa: E402


@triton.jit
def _max_nan(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def linear_cross_entropy_row_gather_kernel(
    mm_ptr, unsqueeze_ptr, amax_ptr, log_ptr, row_gather_ptr, n_rows, n_cols,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):
    """amax, log, row_gather, in one kernel.

        return F.cross_entropy(x @ weight.T, target)

    One program instance reads, reduces and writes each row; intermediate values are not written to memory.
    """
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    row_mask = rows < n_rows
    cols = tl.arange(0, BLOCK)[None, :]
    col_mask = cols < n_cols
    mm = tl.load(mm_ptr + rows * n_cols + cols, mask=row_mask & col_mask, other=0.0)
    row_max = tl.reduce(tl.where(col_mask, mm, -float("inf")), 1, _max_nan, keep_dims=True)
    tl.store(amax_ptr + rows, row_max, mask=row_mask)
    sub = mm - row_max
    row_sum = tl.sum(tl.where(col_mask, tl.exp(sub), 0.0), axis=1, keep_dims=True)
    log = tl.log(row_sum)
    tl.store(log_ptr + rows, log, mask=row_mask)
    unsqueeze = tl.load(unsqueeze_ptr + rows, mask=row_mask, other=0)
    mm_2 = tl.load(mm_ptr + rows * n_cols + unsqueeze, mask=row_mask, other=0.0)
    sub_2 = mm_2 - row_max
    row_gather = sub_2 - log
    tl.store(row_gather_ptr + rows, row_gather, mask=row_mask)


@triton.jit
def linear_cross_entropy_sub_kernel(
    unsqueeze_1_ptr, ne_4_ptr, neg_1_ptr, mm_ptr, amax_ptr, log_ptr, sub_ptr, n_rows, n_cols,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):
    """sub, in one kernel.

        return F.cross_entropy(x @ weight.T, target)

    One program instance reads, reduces and writes each row; intermediate values are not written to memory.
    """
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    row_mask = rows < n_rows
    cols = tl.arange(0, BLOCK)[None, :]
    col_mask = cols < n_cols
    unsqueeze_1 = tl.load(unsqueeze_1_ptr + rows, mask=row_mask, other=0)
    ne_4 = tl.load(ne_4_ptr + rows, mask=row_mask, other=0)
    neg_1 = tl.load(neg_1_ptr)
    where = tl.where((cols == unsqueeze_1) & ne_4, neg_1, 0.0)
    mm = tl.load(mm_ptr + rows * n_cols + cols, mask=row_mask & col_mask, other=0.0)
    amax = tl.load(amax_ptr + rows, mask=row_mask, other=0.0)
    log = tl.load(log_ptr + rows, mask=row_mask, other=0.0)
    row_sum = tl.sum(tl.where(col_mask, where, 0.0), axis=1, keep_dims=True)
    tl.store(sub_ptr + rows * n_cols + cols, where - tl.exp(mm - amax - log) * row_sum, mask=row_mask & col_mask)


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
def linear_cross_entropy_up_to_date() -> bool:
    """Whether globals, helper functions and the environment match those of the verification."""
    try:
        return _has_source(linear_cross_entropy, "8e2923584ee60028")
    except (AttributeError, ImportError, IndexError, KeyError, NameError, TypeError, ValueError):
        return False


@_reported
def linear_cross_entropy_fits(x, weight, target) -> bool:
    """Whether the Triton version supports these arguments; otherwise the original code runs."""
    tensors = (x, weight, target)
    return (
        linear_cross_entropy_up_to_date()
        and (
            _are_like_accepted("linear_cross_entropy_fits", tensors)
            or (
                _is_plain_gpu_call(tensors)
                and all([t.is_contiguous() for t in tensors])
                and x.dtype == torch.float32 and x.ndim == 2 and x.numel() > 0
                and weight.dtype == torch.float32 and weight.ndim == 2 and weight.shape[1] == x.shape[1]
                and weight.numel() > 0
                and target.dtype == torch.int64 and target.ndim == 1 and target.shape[0] == x.shape[0]
                and weight.shape[0] <= 16384
                and _accept("linear_cross_entropy_fits", tensors)
            )
        )
        and not torch.is_autocast_enabled()
        and (not torch.compiler.is_compiling() or torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad))
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


def _is_differentiated(tangents) -> bool:
    """Whether autograd or a transform differentiates or maps a backward pass, which kernels cannot serve."""
    return not torch.compiler.is_compiling() and (
        torch.is_grad_enabled()
        or torch._C._are_functorch_transforms_active()
        or torch.autograd.forward_ad._current_level >= 0
        or any([t is not None and torch._C._functorch.is_legacy_batchedtensor(t) for t in tangents])
    )


def _original_gradients(run, inputs, tangents, autocast=None):
    """Gradients by the original code, so that they can be differentiated again. Guards leave the calls in it to that
    code."""
    from torch.utils._python_dispatch import BaseTorchDispatchMode
    from torch.utils._pytree import tree_leaves

    create_graph = torch.is_grad_enabled()
    cast = torch.autocast(inputs[0].device.type, autocast, enabled=autocast is not None)
    with torch.enable_grad(), BaseTorchDispatchMode():
        inputs = [x.view_as(x) if x.requires_grad else x for x in inputs]
        with cast:
            results = [item for item in tree_leaves(run(*inputs)) if isinstance(item, torch.Tensor)]
        outputs, gradients = zip(*[(r, t) for r, t in zip(results, tangents) if r.requires_grad])
        trained = [x for x in inputs if x.requires_grad]
        found = iter(torch.autograd.grad(outputs, trained, gradients, create_graph=create_graph, allow_unused=True))
    return [next(found) if x.requires_grad else None for x in inputs]


def linear_cross_entropy_chunk(
    x, weight, unsqueeze, unsqueeze_1, ne_4, neg_1, grad_weight, grad_x, needs_gradients,
    linear_cross_entropy_row_gather_kernel=_DirectLaunches(linear_cross_entropy_row_gather_kernel),
    linear_cross_entropy_sub_kernel=_DirectLaunches(linear_cross_entropy_sub_kernel),
):
    """row_gather, grad_weight, grad_x for one chunk of rows."""
    V = weight.shape[0]
    rows = x.shape[0]
    permute = weight.permute([1, 0])
    mm = torch.mm(x, permute)
    amax = torch.empty_like(unsqueeze, dtype=torch.float32)
    log = torch.empty_like(unsqueeze, dtype=torch.float32)
    row_gather = torch.empty_like(unsqueeze, dtype=torch.float32)
    linear_cross_entropy_row_gather_kernel[((rows + 3) // 4,)](
        mm, unsqueeze, amax, log, row_gather, rows, V,
        ROWS=4, BLOCK=1 << (V - 1).bit_length(), num_warps=2, num_stages=2,
    )
    if not needs_gradients:
        return row_gather
    # sub replaces mm, which nothing reads afterwards.
    linear_cross_entropy_sub_kernel[((rows + 3) // 4,)](
        unsqueeze_1, ne_4, neg_1, mm, amax, log, mm, rows, V,
        ROWS=4, BLOCK=1 << (V - 1).bit_length(), num_warps=2, num_stages=2,
    )
    t = torch.t(mm)
    grad_weight.addmm_(t, x)
    torch.mm(mm, weight, out=grad_x)
    return row_gather


def linear_cross_entropy_forward(x, weight, target, needs_gradients=True):
    """Results and gradients of ``linear_cross_entropy`` with Triton kernels."""
    if torch.is_autocast_enabled():
        # The casts are part of the kernels and of the calls below.
        with torch.autocast(x.device.type, enabled=False):
            return linear_cross_entropy_forward(x, weight, target, needs_gradients)
    N, D = x.shape
    V = weight.shape[0]
    ne = torch.ne(target, -100)
    where = torch.where(ne, target, 0)
    unsqueeze = where.unsqueeze(1)
    total = torch.sum(ne)
    to_copy = total.to(torch.float32, copy=True).contiguous()
    ones = torch.ones([], dtype=torch.float32, device=x.device)
    unsqueeze_2 = target.unsqueeze(1)
    div = torch.div(ones, to_copy)
    ne_2 = torch.ne(unsqueeze_2, -100)
    neg = torch.neg(div)
    row_gather = x.new_empty(N, 1)
    grad_weight = torch.zeros((V, D), dtype=torch.float32, device=x.device) if needs_gradients else None
    grad_x = torch.empty_like(x) if needs_gradients else None
    # mm of all 48 rows would take 38.4 kB. A chunk computes, uses and drops 12.8 kB of it.
    for start in range(0, N, 16):
        stop = start + 16
        row_gather[start:stop] = linear_cross_entropy_chunk(
            x[start:stop], weight, unsqueeze[start:stop], unsqueeze_2[start:stop], ne_2[start:stop], neg,
            grad_weight, grad_x[start:stop] if needs_gradients else None, needs_gradients,
        )
    squeeze = row_gather.squeeze(1)
    neg_2 = torch.neg(squeeze)
    where_2 = torch.where(ne, neg_2, 0)
    total_2 = torch.sum(where_2)
    out = torch.div(total_2, to_copy)
    if not needs_gradients:
        return out
    return out, grad_x, grad_weight


@torch.library.custom_op(f"{__name__.replace('.', '_')}::linear_cross_entropy_forward_triton", mutates_args=())
def linear_cross_entropy_forward_triton(
    x: torch.Tensor, weight: torch.Tensor, target: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``linear_cross_entropy_forward`` as an operator for torch.compile."""
    return linear_cross_entropy_forward(x, weight, target)


@linear_cross_entropy_forward_triton.register_fake
def linear_cross_entropy_forward_shapes(x, weight, target):
    """The results of ``linear_cross_entropy_forward`` without values."""
    return (
        x.new_empty((), dtype=torch.float32), x.new_empty((x.shape[0], x.shape[1]), dtype=torch.float32),
        x.new_empty((weight.shape[0], x.shape[1]), dtype=torch.float32),
    )


class _LinearCrossEntropyAutograd(torch.autograd.Function):
    """``linear_cross_entropy`` with Triton kernels.

    The forward pass computes the gradients for an upstream gradient of 1, so that each logit is computed once.
    The backward pass multiplies them by the upstream gradient.
    """

    @staticmethod
    def forward(ctx, x, weight, target, original):
        if original is not None:
            ctx.original = original
        linear_cross_entropy_pass = (
            linear_cross_entropy_forward_triton if torch.compiler.is_compiling() else linear_cross_entropy_forward
        )
        out, *ctx.gradients = linear_cross_entropy_pass(x, weight, target)
        ctx.save_for_backward(x, weight, target)
        return out

    @staticmethod
    def backward(ctx, grad_out):
        if _is_differentiated((grad_out,)):
            return _LinearCrossEntropyAutograd.original_gradients(ctx, (grad_out,))
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:
            # A further backward pass of the same call: the first one has given the gradients away.
            gradients = linear_cross_entropy_forward(*ctx.saved_tensors)[1:]
        grad_x, grad_weight = [gradient.mul_(grad_out) for gradient in gradients]
        return grad_x, grad_weight, None, None

    @staticmethod
    def original_gradients(ctx, tangents):
        """The gradients by the original code."""
        original = ctx.original
        x, weight, target = ctx.saved_tensors

        def run(x, weight, target):
            return original(x, weight, target)

        return *_original_gradients(run, (x, weight, target), tangents), None


def linear_cross_entropy_launch(x, weight, target, original=None):
    """``linear_cross_entropy`` with Triton kernels; autograd records the call if it has to."""
    if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
        return _LinearCrossEntropyAutograd.apply(
            x, weight, target, None if torch.compiler.is_compiling() else original,
        )
    return linear_cross_entropy_forward(x, weight, target, needs_gradients=False)
# mtmc: end linear_cross_entropy
