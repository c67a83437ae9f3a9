"""Looks through a candidate's text for ways to fool a measurement. It only reads the text; running it is judged elsewhere."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from mtmc_lsp.codegen.module.cuda_graph import without_cuda_graph
from mtmc_lsp.core.results import Check, CheckStatus

FORBIDDEN_MODULES = {
    "ctypes": "native memory",
    "gc": "objects of other code",
    "inspect": "frames of other code",
    "multiprocessing": "other processes",
    "socket": "the network",
    "subprocess": "other processes",
    "threading": "other threads",
    "concurrent.futures": "other threads",
    "unittest.mock": "patching of other code",
    "cffi": "native memory",
    "torch.utils.cpp_extension": "native code that cannot be read",
}
"""Modules that no kernel needs, and what they reach."""
FORBIDDEN_CALLS = {
    "sys._getframe": "frames of other code",
    "os.fork": "other processes",
    "os.system": "other processes",
    "os.write": "the channel that results travel on",
    "os.dup2": "the channel that results travel on",
    "torch.cuda.cudart": "the GPU's caches and clocks",
    "torch.set_float32_matmul_precision": "how the reference computes",
    "torch.set_num_threads": "how fast the reference computes",
    "torch.cuda.Stream": "another stream than the timed one",
    "torch.cuda.CUDAGraph": "a graph that replays old inputs",
    "torch.cuda.graph": "a graph that replays old inputs",
    "torch.Tensor._make_subclass": "a tensor that is computed when it is looked at",
    "torch.Tensor._make_wrapper_subclass": "a tensor that is computed when it is looked at",
    "eval": "code that cannot be read",
    "exec": "code that cannot be read",
    "__import__": "code that cannot be read",
}
WATCHED = {"torch", "triton", "tl", "time", "sys", "os", "builtins", "numpy", "np", "F"}
"""Names of modules whose attributes no candidate may set."""


def scan(source: str, path: str) -> tuple[Check, ...]:
    """One check for each rule. A text that does not parse passes: running it says what is wrong with it."""
    try:
        tree = ast.parse(without_cuda_graph(source))
    except SyntaxError:
        return ()
    rules = {
        "text: imports": _imports(tree),
        "text: calls": _calls(tree),
        "text: leaves modules alone": _assignments(tree),
        "text: no fallback": _fallbacks(tree),
        "text: plain tensors": _subclasses(tree),
    }
    checks = []
    for name, found in rules.items():
        line, wrong = next(found, (0, ""))
        status = CheckStatus.FAILED if wrong else CheckStatus.PASSED
        checks.append(Check(name, status, "", f"{wrong} ({path}:{line})" if wrong else ""))
    return tuple(checks)


def _imports(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        for name in names:
            reached = FORBIDDEN_MODULES.get(name) or FORBIDDEN_MODULES.get(name.partition(".")[0])
            if reached:
                yield node.lineno, f"imports {name}, which reaches {reached}"  # type: ignore[attr-defined]


def _dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        owner = _dotted(node.value)
        return f"{owner}.{node.attr}" if owner else ""
    return node.id if isinstance(node, ast.Name) else ""


def _calls(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and _dotted(node.func) in FORBIDDEN_CALLS:
            name = _dotted(node.func)
            yield node.lineno, f"calls {name}, which reaches {FORBIDDEN_CALLS[name]}"
        if isinstance(node, ast.Attribute) and _dotted(node) == "sys.modules":
            yield node.lineno, "looks into sys.modules, where other code lies"
        if isinstance(node, ast.Call) and _dotted(node.func) in ("setattr", "delattr") and node.args:
            owner = _dotted(node.args[0])
            if owner.partition(".")[0] in WATCHED:
                yield node.lineno, f"changes {owner}"


def _assignments(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        targets = node.targets if isinstance(node, ast.Assign) else []
        targets = [node.target] if isinstance(node, (ast.AugAssign, ast.AnnAssign)) else targets
        for target in targets:
            name = _dotted(target)
            if isinstance(target, ast.Attribute) and target.attr in ("__code__", "__class__", "__dict__"):
                yield node.lineno, f"sets {target.attr}"  # type: ignore[attr-defined]
            # Switches such as torch.backends.cuda.matmul.allow_tf32 change the reference's rounding too.
            elif isinstance(target, ast.Attribute) and name.partition(".")[0] in WATCHED:
                yield node.lineno, f"sets {name}"  # type: ignore[attr-defined]


def _fallbacks(tree: ast.Module) -> Iterator[tuple[int, str]]:
    functions = [n for n in ast.walk(tree) if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef))]
    for function in functions:
        for node in ast.walk(function):
            if isinstance(node, ast.Try):
                for handler in node.handlers:
                    if not isinstance(handler.body[-1], ast.Raise):
                        yield handler.lineno, f"{function.name} goes on when something fails"


def _subclasses(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            for base in node.bases:
                if _dotted(base) in ("torch.Tensor", "Tensor"):
                    yield node.lineno, f"{node.name} is a kind of tensor of its own"
            methods = {item.name for item in node.body if isinstance(item, ast.FunctionDef)}
            if methods & {"__torch_function__", "__torch_dispatch__"}:
                yield node.lineno, f"{node.name} intercepts torch's functions"
