"""Policy for code of a model. This code runs on the user's machine, so only the constructs listed here are allowed."""

from __future__ import annotations

import ast
import builtins
import symtable
from collections import Counter
from collections.abc import Collection, Iterator, Mapping

from mtmc_lsp.llm.coder.editable_text import EditableCode, launched_kernels
from mtmc_lsp.llm.coder.hunks import InvalidAnswer
from mtmc_lsp.source.lint import check, context_of
from mtmc_lsp.source.lint.finding import Severity
from mtmc_lsp.source.outline import Outliner
from mtmc_lsp.source.syntax import parse

FORBIDDEN = {
    "Try": "try/except hides failures",
    "TryStar": "try/except hides failures",
    "Import": "the required imports are added automatically",
    "ImportFrom": "the required imports are added automatically",
    "Global": "no state may be kept between calls",
    "Nonlocal": "no state may be kept between calls",
    "ClassDef": "only functions are allowed",
    "Lambda": "write the grid as a tuple",
    "AsyncFunctionDef": "only plain functions are allowed",
    "With": "no context managers",
    "Yield": "no generators",
    "Raise": "the guard already checked the inputs",
    "Delete": "no del",
}
"""Forbidden syntax by ``ast`` class name (some exist only in newer Python versions), and the reason."""
PLAIN_CALLS = frozenset("min max range len int float bool abs tuple list sum zip enumerate".split())
ALLOCATION = frozenset("empty empty_like empty_strided zeros zeros_like full".split())
"""Functions of ``torch`` that allocate outputs of kernels; ``zeros`` and ``full`` are for atomics."""
TYPES = frozenset(
    "float16 float32 float64 bfloat16 int8 int16 int32 int64 uint8 bool float8_e4m3fn float8_e5m2 Tensor".split()
)
TENSOR_ATTRIBUTES = frozenset(
    "shape stride size numel dtype device ndim element_size is_contiguous dim new_empty".split()
)
VIEW_METHODS = frozenset(
    "view reshape expand unsqueeze squeeze as_strided flatten transpose permute t mT T detach".split()
)
TRITON_FUNCTIONS = frozenset("jit cdiv next_power_of_2 set_allocator".split())
TL_SUBMODULES = frozenset("math extra cuda libdevice dtype PropagateNan".split())
"""Allowed attributes between ``tl`` and a function, as in ``tl.math.exp``."""


def check_policy(
    editable: EditableCode, text: str, *, moved_calls: int, unrelated_kernels: Collection[str] = ()
) -> None:
    """Check new editable code before any of it runs.

    Args:
        moved_calls: number of torch calls that the step moves from the launcher into a kernel; they must be removed.
        unrelated_kernels: kernels that the step must not change.

    Raises:
        InvalidAnswer: the code violates a rule. The message names the rule, the line and the correction.
    """
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError) as error:
        line = getattr(error, "lineno", None) or 0
        quoted = text.splitlines()[line - 1].strip() if 0 < line <= len(text.splitlines()) else ""
        raise InvalidAnswer(f"Line {line} does not parse ({getattr(error, 'msg', error)}): {quoted}") from None
    functions = _functions(tree)
    launcher = functions.get(editable.launcher)
    if launcher is None:
        raise InvalidAnswer(f"{editable.launcher} is missing; keep it, with its parameters.")
    _check_launcher(editable, functions)
    old = ast.parse(editable.text)
    for name, function in functions.items():
        _check_function(function, set(functions), old, is_kernel=name != editable.launcher)
    _check_names(text, set(functions) | _shared_helpers(editable))
    if not launched_kernels(launcher):
        raise InvalidAnswer(f"{editable.launcher} launches no kernel: name[grid](arguments).")
    _check_unrelated_kernels(_functions(old), functions, unrelated_kernels)
    _check_torch(_functions(old)[editable.launcher], launcher, moved_calls=moved_calls)
    _check_lint(editable.text, text)


def _functions(tree: ast.Module) -> dict[str, ast.FunctionDef]:
    functions: dict[str, ast.FunctionDef] = {}
    for node in tree.body:
        if not isinstance(node, ast.FunctionDef):
            _reject(node, "only functions are allowed at module level, so no state is kept between calls")
            continue
        if node.name in functions:
            raise InvalidAnswer(f"{node.name} is defined twice.")
        functions[node.name] = node
    return functions


def _reject(node: ast.AST, why: str) -> None:
    raise InvalidAnswer(f"Line {getattr(node, 'lineno', 0)} ({ast.unparse(node).splitlines()[0][:80]}): {why}.")


def _check_launcher(editable: EditableCode, functions: dict[str, ast.FunctionDef]) -> None:
    launcher = functions[editable.launcher]
    names = [arg.arg for arg in launcher.args.args]
    if tuple(names[: len(editable.tensors)]) != editable.tensors:
        raise InvalidAnswer(f"{editable.launcher} must keep its parameters: {', '.join(editable.tensors)}.")
    fixed_names = _module_names(f"{editable.guard}\n{editable.operator}")
    conflicts = fixed_names & set(functions)
    if conflicts:
        raise InvalidAnswer(f"{min(conflicts)} already exists outside this text; remove it.")
    # Default values pass the kernels for torch.compile; they are regenerated from the launches.
    extra = set(names[len(editable.tensors) :]) - set(functions)
    if extra or launcher.args.kwonlyargs or launcher.args.vararg or launcher.args.kwarg or launcher.decorator_list:
        raise InvalidAnswer(
            f"{editable.launcher} has no parameters other than {', '.join(editable.tensors)} and its kernels."
        )


def _check_function(function: ast.FunctionDef, new_functions: set[str], old: ast.Module, *, is_kernel: bool) -> None:
    known = {ast.dump(node) for node in ast.walk(old) if isinstance(node, (ast.Call, ast.Attribute))}
    if is_kernel and [ast.unparse(item) for item in function.decorator_list] != ["triton.jit"]:
        _reject(
            function,
            "every function except the launcher is a kernel or a device function: only @triton.jit, nothing else",
        )
    for node in ast.walk(function):
        if type(node).__name__ in FORBIDDEN:
            _reject(node, FORBIDDEN[type(node).__name__])
        if isinstance(node, ast.FunctionDef) and node is not function:
            _reject(node, "no functions inside functions")
        if isinstance(node, ast.Attribute) and ast.dump(node) not in known:
            _check_attribute(node, is_kernel=is_kernel)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            name = node.func.id
            if name not in PLAIN_CALLS and not (is_kernel and name in new_functions):
                _reject(node, f"{name} may not be called here")


def _check_attribute(node: ast.Attribute, *, is_kernel: bool) -> None:
    if node.attr.startswith("_"):
        _reject(node, "no private names")
    parts, root = [node.attr], node.value
    while isinstance(root, ast.Attribute):
        parts.insert(0, root.attr)
        root = root.value
    base = root.id if isinstance(root, ast.Name) else ""
    if base == "torch" and (is_kernel or len(parts) > 1 or parts[0] not in ALLOCATION | TYPES):
        _reject(
            node,
            "torch is only for allocation (torch.empty, torch.empty_like, ...) in the launcher; compute in a kernel",
        )
    elif base == "triton" and (len(parts) > 1 or parts[0] not in TRITON_FUNCTIONS):
        _reject(node, f"only these functions of triton are allowed: {', '.join(sorted(TRITON_FUNCTIONS))}")
    elif base == "tl" and (not is_kernel or not set(parts[:-1]) <= TL_SUBMODULES):
        _reject(node, "tl is allowed only in kernels, as in tl.load")
    elif base not in ("torch", "triton", "tl") and not is_kernel and parts[-1] not in TENSOR_ATTRIBUTES | VIEW_METHODS:
        _reject(node, f".{parts[-1]} is not an allocation, size or view of a tensor; compute in a kernel")


def _check_names(text: str, available: set[str]) -> None:
    """Check that every name is a parameter, a local variable or one of the few allowed globals."""
    allowed = available | PLAIN_CALLS | {"torch", "triton", "tl", "True", "False", "None"}
    for scope in symtable.symtable(text, "<answer>", "exec").get_children():
        for symbol in _free_names(scope):
            if symbol not in allowed:
                problem = "is not allowed" if hasattr(builtins, symbol) else "is not defined"
                raise InvalidAnswer(f"{scope.get_name()}: the name {symbol} {problem}.")


def _module_names(text: str) -> set[str]:
    """Functions and variables that a module's text defines."""
    names = set()
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return names


def _shared_helpers(editable: EditableCode) -> set[str]:
    """Functions outside the editable text that its launcher uses."""
    fixed_names = {node.name for node in ast.parse(editable.guard).body if isinstance(node, ast.FunctionDef)}
    return fixed_names & {node.id for node in ast.walk(ast.parse(editable.text)) if isinstance(node, ast.Name)}


def _free_names(scope: symtable.SymbolTable) -> Iterator[str]:
    for symbol in scope.get_symbols():
        if symbol.is_global() and symbol.is_referenced():
            yield symbol.get_name()
    for inner in scope.get_children():
        yield from _free_names(inner)


def _check_unrelated_kernels(
    old: Mapping[str, ast.FunctionDef], new: Mapping[str, ast.FunctionDef], unrelated_kernels: Collection[str]
) -> None:
    """Check that unrelated kernels and the functions they call are unchanged."""
    pending, visited = list(unrelated_kernels), set(unrelated_kernels)
    while pending:
        name = pending.pop()
        if name not in new:
            raise InvalidAnswer(f"{name} is missing; this step does not concern it, so keep it.")
        if ast.dump(new[name]) != ast.dump(old[name]):
            raise InvalidAnswer(f"{name} was changed, but this step does not concern it. Leave it unchanged.")
        called = {node.id for node in ast.walk(old[name]) if isinstance(node, ast.Name)} & set(old) - visited
        pending += called
        visited |= called


def _check_torch(old: ast.FunctionDef, new: ast.FunctionDef, *, moved_calls: int) -> None:
    before, after = torch_calls(old), torch_calls(new)
    added = after - before
    if added:
        raise InvalidAnswer(f"{new.name} computes with torch: {next(iter(added))}. Compute that in a kernel.")
    if after.total() > max(0, before.total() - moved_calls):
        calls = "; ".join(after)
        raise InvalidAnswer(
            f"{new.name} still contains torch calls of the region ({calls}). Remove the calls that the kernel computes."
        )


def torch_calls(function: ast.FunctionDef) -> Counter[str]:
    """Calls that compute: neither allocations, nor views, nor kernel launches."""
    calls: Counter[str] = Counter()
    for node in ast.walk(function):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            base = node.func.value
            is_torch = isinstance(base, ast.Name) and base.id == "torch"
            is_operator = ast.unparse(base).startswith("torch.")
            allowed = ALLOCATION if is_torch else TENSOR_ATTRIBUTES | VIEW_METHODS | TRITON_FUNCTIONS
            if node.func.attr not in allowed:
                calls[ast.unparse(node.func) if is_torch or is_operator else f".{node.func.attr}"] += 1
    return calls


def _check_lint(old: str, new: str) -> None:
    """Reject errors and warnings of the editor's linter that the old text did not have."""
    old_codes = Counter(code for code, _ in findings(old))
    for code, message in findings(new):
        if old_codes[code]:
            old_codes[code] -= 1
            continue
        raise InvalidAnswer(f"{code}: {message}")


def findings(text: str) -> list[tuple[str, str]]:
    """Code and message of each error and warning of the static checks in kernels and a launcher."""
    module = f"import torch\nimport triton\nimport triton.language as tl\n\n\n{text}".encode()
    outline = Outliner("").outline(module, parse(module))
    result = []
    for chunk in outline.chunks:
        for finding in check(chunk.text, context_of(outline)):
            if finding.severity in (Severity.ERROR, Severity.WARNING):
                line = chunk.text[finding.start : finding.end].decode().splitlines()[0]
                result.append((finding.code, f"{finding.message} ({line})"))
    return result
