import torch


# mtmc: emissions=f32[B,T,N] transitions=f32[N,N] B=4 T=64 N=24
def viterbi(emissions, transitions):
    if viterbi_fits(emissions, transitions):  # mtmc: dispatch
        return (viterbi_triton if torch.compiler.is_compiling() else viterbi_launch)(emissions, transitions)
    score = emissions[:, 0]
    history = []
    for t in range(1, emissions.shape[1]):
        best, index = (score.unsqueeze(2) + transitions).max(dim=1)
        score = best + emissions[:, t]
        history.append(index)
    return score, torch.stack(history, dim=1)


# mtmc: begin viterbi
import triton  # noqa: E402
import triton.language as tl  # noqa: E402
from torch.library import triton_op, wrap_triton  # noqa: E402


@triton.jit
def _max_nan(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def viterbi_kernel(
    score_ptr,
    emissions_t_ptr,
    transitions_ptr,
    out_ptr,
    last_score_ptr,
    n_steps,
    N,
    T,
    BLOCK: tl.constexpr,
):
    """out_0, out_1, in one kernel.

        for t in range(1, emissions.shape[1]):
        best, index = (score.unsqueeze(2) + transitions).max(dim=1)
        score = best + emissions[:, t]

    Each program instance holds a tile of the states in registers and runs all iterations, one after another.
    """
    row = tl.program_id(0).to(tl.int64)
    index = tl.arange(0, BLOCK)
    inside = index < N
    score = tl.load(score_ptr + row * (N * T) + index, mask=inside, other=0.0)
    transitions = tl.load(
        transitions_ptr + index[:, None] * N + index[None, :], mask=inside[:, None] & inside[None, :], other=0.0
    )
    emissions_t_ptr += N
    for t in tl.range(0, n_steps, num_stages=3):
        add = score[:, None] + transitions
        values = tl.where(inside[:, None], add, -float("inf"))
        extreme = tl.reduce(values, 0, _max_nan)
        emissions_t = tl.load(emissions_t_ptr + row * (N * T) + index, mask=inside, other=0.0)
        score_2 = extreme + emissions_t
        argmax = tl.min(
            tl.where((values == extreme[None, :]) | (values != values), index[:, None], BLOCK), axis=0
        ).to(tl.int64)
        tl.store(out_ptr + row * (N * T - N) + index, argmax, mask=inside)
        score = score_2
        emissions_t_ptr += N
        out_ptr += N
    tl.store(last_score_ptr + row * N + index, score, mask=inside)


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
def viterbi_up_to_date_code() -> bool:
    """Whether helper functions, closures and the environment match those of the verification."""
    try:
        return (
            _has_source(viterbi, "fccac6f71e2febe3")
        )
    except (AttributeError, ImportError, IndexError, KeyError, NameError, TypeError, ValueError):
        return False


def viterbi_up_to_date() -> bool:
    """Whether globals, helper functions and the environment match those of the verification."""
    try:
        return (
            viterbi_up_to_date_code()
        )
    except (AttributeError, ImportError, IndexError, KeyError, NameError, TypeError, ValueError):
        return False


@_reported
def viterbi_fits(emissions, transitions) -> bool:
    """Whether the Triton version supports these arguments; otherwise the original code runs."""
    if not (
        viterbi_up_to_date()
    ):
        return False
    tensors = (emissions, transitions)
    return (
        _is_plain_gpu_call(tensors)
        and not torch.is_autocast_enabled()
        and not (torch.is_grad_enabled() and any([t.requires_grad for t in tensors]))
        and emissions.dtype == torch.float32 and emissions.ndim == 3 and emissions.is_contiguous()
        and emissions.numel() > 0
        and transitions.dtype == torch.float32 and transitions.ndim == 2
        and transitions.shape[0] == emissions.shape[2] and transitions.shape[1] == emissions.shape[2]
        and transitions.is_contiguous()
        and emissions.shape[1] - 1 > 0
        and emissions.shape[2] <= 32
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


def viterbi_launch(emissions, transitions, viterbi_kernel=_DirectLaunches(viterbi_kernel)):
    """``viterbi`` with Triton kernels."""
    B = emissions.shape[0]
    T = emissions.shape[1]
    N = emissions.shape[2]
    score = torch.select(emissions, 1, 0)
    out_1 = emissions.new_empty(B, T - 1, N, dtype=torch.int64)
    out_0 = emissions.new_empty(B, N)
    n_rows = B
    viterbi_kernel[(n_rows,)](
        score, emissions, transitions, out_1, out_0, T - 1, N, T,
        BLOCK=32, num_warps=1, num_stages=3,
    )
    return out_0, out_1


@triton_op(f"{__name__.replace('.', '_')}::viterbi_triton", mutates_args=())
def viterbi_triton(
    emissions: torch.Tensor,
    transitions: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``viterbi_launch`` as an operator for torch.compile, torch.export and CUDA graphs."""
    return viterbi_launch(emissions, transitions, wrap_triton(viterbi_kernel))
# mtmc: end viterbi
