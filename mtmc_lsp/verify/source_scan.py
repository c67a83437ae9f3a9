"""Scans the text of a candidate for ways to deceive the verification or the timing, without running it."""

from __future__ import annotations

import ast
from collections.abc import Callable, Container, Iterator, Mapping

from mtmc_lsp.codegen.module.cuda_graph import without_cuda_graph
from mtmc_lsp.core.results import Check, CheckStatus
from mtmc_lsp.verify.generated_helpers import without_generated_checks

FORBIDDEN_MODULES = {
    "ctypes": "native memory",
    "gc": "objects of other code",
    "inspect": "frames of other code",
    "multiprocessing": "other processes",
    "secrets": "chance",
    "socket": "the network",
    "subprocess": "other processes",
    "threading": "other threads",
    "_thread": "other threads",
    "asyncio": "other threads",
    "torch.futures": "other threads",
    "torch.multiprocessing": "other processes",
    "concurrent.futures": "other threads",
    "traceback": "frames of other code",
    "unittest.mock": "patching of other code",
    "uuid": "chance",
    "cffi": "native memory",
    "torch.utils.cpp_extension": "native code that cannot be read",
}
"""Modules that no kernel needs, and what they access."""
FORBIDDEN_CALLS = {
    "sys._getframe": "frames of other code",
    "os.fork": "other processes",
    "os.getppid": "other processes",
    "os.urandom": "chance",
    "os.system": "other processes",
    "os.write": "the channel for results",
    "os.dup2": "the channel for results",
    "time.time": "when it runs",
    "time.time_ns": "when it runs",
    "time.monotonic": "when it runs",
    "time.monotonic_ns": "when it runs",
    "time.perf_counter": "when it runs",
    "time.perf_counter_ns": "when it runs",
    "torch.cuda.cudart": "the GPU's caches and clocks",
    "torch.set_float32_matmul_precision": "how the reference computes",
    "torch.set_num_threads": "how fast the reference computes",
    "torch.Stream": "a stream that is not timed",
    "torch.cuda.Stream": "a stream that is not timed",
    "torch.cuda.ExternalStream": "a stream that is not timed",
    "torch.cuda.streams.Stream": "a stream that is not timed",
    "torch.cuda.streams.ExternalStream": "a stream that is not timed",
    "torch.cuda.make_graphed_callables": "a graph that replays old inputs",
    "torch.jit.fork": "other threads",
    "torch.jit._fork": "other threads",
    "torch.cuda.CUDAGraph": "a graph that replays old inputs",
    "torch.cuda.graph": "a graph that replays old inputs",
    "torch.Tensor._make_subclass": "a tensor that is computed only when it is read",
    "torch.Tensor._make_wrapper_subclass": "a tensor that is computed only when it is read",
    "eval": "code that cannot be read",
    "exec": "code that cannot be read",
    "__import__": "code that cannot be read",
}
CURRENT_STREAM = ("get_current_stream", "_cuda_getCurrentRawStream", "current_stream")
"""Functions that return the stream on which a kernel must be launched."""
WATCHED = {"torch", "triton", "tl", "time", "sys", "os", "builtins", "numpy", "np", "F"}
"""Modules whose attributes a candidate must not set."""


def scan(source: str, path: str, user_source: str = "") -> tuple[Check, ...]:
    """One check for each rule; none if the text is no valid Python, which an import reports better.

    Args:
        user_source: the user's file, if the candidate is a version of it. Code that the user's file contains is no violation.
    """
    try:
        # Generated text that is known to be safe is compared with line endings of "\n".
        unified = source.replace("\r\n", "\n")
        tree = ast.parse(without_generated_checks(without_cuda_graph(unified)))
        allowed = {wrong for rule in RULES.values() for _, wrong in rule(ast.parse(user_source))}
    except SyntaxError:
        return ()
    checks = []
    for name, rule in RULES.items():
        line, wrong = next(((line, wrong) for line, wrong in rule(tree) if wrong not in allowed), (0, ""))
        status = CheckStatus.FAILED if wrong else CheckStatus.PASSED
        checks.append(Check(name, status, "", f"{wrong} ({path}:{line})" if wrong else ""))
    return tuple(checks)


def _imports(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        for name in names:
            accessed = _forbidden(name)
            if accessed:
                yield node.lineno, f"imports {name}, which accesses {accessed}"  # type: ignore[attr-defined]


def _forbidden(module: str) -> str:
    """What a module, or a package that it is in, accesses that it should not; empty if nothing."""
    packages = [module[:end] for end in (*(i for i, letter in enumerate(module) if letter == "."), len(module))]
    return next((FORBIDDEN_MODULES[name] for name in packages if name in FORBIDDEN_MODULES), "")


def _aliases(tree: ast.Module) -> dict[str, str]:
    """The full names of what a file imports or assigns under another name, as ``from torch.cuda import Stream as S``."""
    aliases: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            aliases |= {alias.asname: alias.name for alias in node.names if alias.asname}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            aliases |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    imported = {*aliases, *WATCHED}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            name = _dotted(node.value)
            if "." in name and name.partition(".")[0] in imported:
                aliases.setdefault(node.targets[0].id, _full_name(name, aliases))
    return aliases


def _full_name(name: str, aliases: Mapping[str, str]) -> str:
    first, dot, rest = name.partition(".")
    return f"{aliases.get(first, first)}{dot}{rest}"


def _dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        owner = _dotted(node.value)
        return f"{owner}.{node.attr}" if owner else ""
    return node.id if isinstance(node, ast.Name) else ""


def _calls(tree: ast.Module) -> Iterator[tuple[int, str]]:
    yield from _launches(tree)
    aliases = _aliases(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = _full_name(_dotted(node.func), aliases)
            if name in FORBIDDEN_CALLS:
                yield node.lineno, f"calls {name}, which accesses {FORBIDDEN_CALLS[name]}"
            module = node.args[0].value if node.args and isinstance(node.args[0], ast.Constant) else None
            if name == "importlib.import_module" and isinstance(module, str) and _forbidden(module):
                yield node.lineno, f"imports {module}, which accesses {_forbidden(module)}"
        if isinstance(node, ast.Attribute) and _dotted(node) == "sys.modules":
            yield node.lineno, "accesses sys.modules, which holds other code"
        if isinstance(node, ast.Call) and _dotted(node.func) in ("setattr", "delattr") and node.args:
            owner = _dotted(node.args[0])
            if owner.partition(".")[0] in WATCHED:
                yield node.lineno, f"changes {owner}"


def _launches(tree: ast.Module) -> Iterator[tuple[int, str]]:
    current = {
        target.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and _is_current_stream(node.value, set())
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for node in ast.walk(tree):
        # Such as compiled[grid](x, out, stream=0).
        for keyword in node.keywords if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript) else ():
            if keyword.arg == "stream" and not _is_current_stream(keyword.value, current):
                yield node.lineno, f"launches on {ast.unparse(keyword.value)}, which is no current stream"  # type: ignore[attr-defined]


def _is_current_stream(node: ast.expr, names: Container[str]) -> bool:
    """Whether an expression is a call that returns the current stream, its address, or a name of it."""
    if isinstance(node, ast.Attribute) and node.attr == "cuda_stream":
        node = node.value
    if isinstance(node, ast.Call):
        return _dotted(node.func).rpartition(".")[2] in CURRENT_STREAM
    return isinstance(node, ast.Name) and node.id in names


def _assignments(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        targets = node.targets if isinstance(node, ast.Assign) else []
        targets = [node.target] if isinstance(node, (ast.AugAssign, ast.AnnAssign)) else targets
        for target in targets:
            name = _dotted(target)
            if isinstance(target, ast.Attribute) and target.attr in ("__code__", "__class__", "__dict__"):
                yield node.lineno, f"sets {target.attr}"  # type: ignore[attr-defined]
            # This includes switches such as torch.backends.cuda.matmul.allow_tf32, which change the rounding.
            elif isinstance(target, ast.Attribute) and name.partition(".")[0] in WATCHED:
                yield node.lineno, f"sets {name}"  # type: ignore[attr-defined]


def _fallbacks(tree: ast.Module) -> Iterator[tuple[int, str]]:
    functions = [n for n in ast.walk(tree) if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef))]
    for function in functions:
        for node in ast.walk(function):
            if isinstance(node, ast.Try):
                for handler in node.handlers:
                    if not isinstance(handler.body[-1], ast.Raise):
                        yield handler.lineno, f"{function.name} continues after an exception"


def _subclasses(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            for base in node.bases:
                if _dotted(base) in ("torch.Tensor", "Tensor"):
                    yield node.lineno, f"{node.name} is a subclass of torch.Tensor"
            methods = {item.name for item in node.body if isinstance(item, ast.FunctionDef)}
            if methods & {"__torch_function__", "__torch_dispatch__"}:
                yield node.lineno, f"{node.name} intercepts torch's functions"


RULES: dict[str, Callable[[ast.Module], Iterator[tuple[int, str]]]] = {
    "text: imports": _imports,
    "text: calls": _calls,
    "text: leaves modules alone": _assignments,
    "text: no fallback": _fallbacks,
    "text: plain tensors": _subclasses,
}
"""By the name of its check, each rule's violations: line and text."""
