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
    mm_ptr,
    unsqueeze_ptr,
    amax_ptr,
    log_ptr,
    row_gather_ptr,
    n_rows,
    n_cols,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
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
    unsqueeze_1_ptr,
    ne_4_ptr,
    neg_1_ptr,
    mm_ptr,
    amax_ptr,
    log_ptr,
    sub_ptr,
    n_rows,
    n_cols,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
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
def linear_cross_entropy_up_to_date_code() -> bool:
    """Whether helper functions, closures and the environment match those of the verification."""
    try:
        return (
            _has_source(linear_cross_entropy, "8e2923584ee60028")
        )
    except (AttributeError, ImportError, IndexError, KeyError, NameError, TypeError, ValueError):
        return False


def linear_cross_entropy_up_to_date() -> bool:
    """Whether globals, helper functions and the environment match those of the verification."""
    try:
        return (
            linear_cross_entropy_up_to_date_code()
        )
    except (AttributeError, ImportError, IndexError, KeyError, NameError, TypeError, ValueError):
        return False


@_reported
def linear_cross_entropy_fits(x, weight, target) -> bool:
    """Whether the Triton version supports these arguments; otherwise the original code runs."""
    if not (
        linear_cross_entropy_up_to_date()
    ):
        return False
    tensors = (x, weight, target)
    if not (
        _are_like_accepted("linear_cross_entropy_fits", tensors)
        or (
            _is_plain_gpu_call(tensors)
            and x.dtype == torch.float32 and x.ndim == 2 and x.is_contiguous() and x.numel() > 0
            and weight.dtype == torch.float32 and weight.ndim == 2 and weight.shape[1] == x.shape[1]
            and weight.is_contiguous() and weight.numel() > 0
            and target.dtype == torch.int64 and target.ndim == 1 and target.shape[0] == x.shape[0]
            and target.is_contiguous()
            and weight.shape[0] <= 16384
            and _accept("linear_cross_entropy_fits", tensors)
        )
    ):
        return False
    return (
        not torch.is_autocast_enabled()
        and (not torch.compiler.is_compiling() or torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad))
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
    x,
    weight,
    unsqueeze,
    unsqueeze_1,
    ne_4,
    neg_1,
    grad_weight,
    grad_x,
    needs_gradients,
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
    n_cols = V
    n_rows = rows
    linear_cross_entropy_row_gather_kernel[((n_rows + 3) // 4,)](
        mm, unsqueeze, amax, log, row_gather, n_rows, n_cols,
        ROWS=4, BLOCK=1 << (n_cols - 1).bit_length(), num_warps=2, num_stages=2,
    )
    if not needs_gradients:
        return row_gather
    # sub replaces mm, which nothing reads afterwards.
    linear_cross_entropy_sub_kernel[((n_rows + 3) // 4,)](
        unsqueeze_1, ne_4, neg_1, mm, amax, log, mm, n_rows, n_cols,
        ROWS=4, BLOCK=1 << (n_cols - 1).bit_length(), num_warps=2, num_stages=2,
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
    N = x.shape[0]
    V = weight.shape[0]
    D = x.shape[1]
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
    x: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
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
