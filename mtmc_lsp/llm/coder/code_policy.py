"""What generated code may do. A model's code runs on the user's machine, so only what is named here is allowed."""

from __future__ import annotations

import ast
import builtins
import symtable
from collections import Counter
from collections.abc import Collection, Iterator, Mapping

from mtmc_lsp.llm.coder.editable_text import Sheet, launched_kernels
from mtmc_lsp.llm.coder.hunks import BadAnswer
from mtmc_lsp.source.lint import check, context_of
from mtmc_lsp.source.lint.finding import Severity
from mtmc_lsp.source.outline import Outliner
from mtmc_lsp.source.syntax import parse

FORBIDDEN = {
    "Try": "try/except hides failures",
    "TryStar": "try/except hides failures",
    "Import": "imports are made for you",
    "ImportFrom": "imports are made for you",
    "Global": "nothing may be kept between calls",
    "Nonlocal": "nothing may be kept between calls",
    "ClassDef": "only functions are allowed",
    "Lambda": "give the grid as a tuple",
    "AsyncFunctionDef": "only plain functions are allowed",
    "With": "no context managers",
    "Yield": "no generators",
    "Raise": "the guard already chose when this code runs",
    "Delete": "no del",
}
"""Kinds of syntax, by the names that ``ast`` gives them (not every Python has each), and why not."""
PLAIN_CALLS = frozenset("min max range len int float bool abs tuple list sum zip enumerate".split())
ALLOCATION = frozenset("empty empty_like empty_strided zeros zeros_like full".split())
"""Of ``torch``: memory for kernels to write; ``zeros`` and ``full`` for atomics."""
TYPES = frozenset(
    "float16 float32 float64 bfloat16 int8 int16 int32 int64 uint8 bool float8_e4m3fn float8_e5m2 Tensor".split()
)
OF_TENSORS = frozenset("shape stride size numel dtype device ndim element_size is_contiguous dim new_empty".split())
VIEWING = frozenset("view reshape expand unsqueeze squeeze as_strided flatten transpose permute t mT T detach".split())
OF_TRITON = frozenset("jit cdiv next_power_of_2 set_allocator".split())
NESTED = frozenset("math extra cuda libdevice dtype PropagateNan".split())
"""What may stand between ``tl`` and the name that is used."""


def check_rules(sheet: Sheet, text: str, *, moved_calls: int, elsewhere: Collection[str] = ()) -> None:
    """Check a new text of a sheet, before any of it runs.

    Args:
        sheet: what the model was given.
        text: the new text.
        moved_calls: how many of the launcher's torch calls the step moves into a kernel, so that these must be gone.
        elsewhere: kernels that the step is not about.

    Raises:
        BadAnswer: it breaks a rule; the message says which, where, and what to do.
    """
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError) as error:
        line = getattr(error, "lineno", None) or 0
        quoted = text.splitlines()[line - 1].strip() if 0 < line <= len(text.splitlines()) else ""
        raise BadAnswer(f"Line {line} does not parse ({getattr(error, 'msg', error)}): {quoted}") from None
    functions = _functions(tree)
    launcher = functions.get(sheet.launcher)
    if launcher is None:
        raise BadAnswer(f"{sheet.launcher} is gone; it must stay, with its parameters.")
    _check_frame(sheet, functions)
    old = ast.parse(sheet.text)
    for name, function in functions.items():
        _check_function(function, set(functions), old, is_kernel=name != sheet.launcher)
    _check_names(text, set(functions) | _lent(sheet))
    if not launched_kernels(launcher):
        raise BadAnswer(f"{sheet.launcher} launches no kernel: name[grid](arguments).")
    _check_elsewhere(_functions(old), functions, elsewhere)
    _check_torch(_functions(old)[sheet.launcher], launcher, moved_calls=moved_calls)
    _check_static(sheet.text, text)


def _functions(tree: ast.Module) -> dict[str, ast.FunctionDef]:
    found: dict[str, ast.FunctionDef] = {}
    for node in tree.body:
        if not isinstance(node, ast.FunctionDef):
            _refuse(node, "only functions are allowed at module level, so nothing is kept between calls")
            continue
        if node.name in found:
            raise BadAnswer(f"{node.name} is defined twice.")
        found[node.name] = node
    return found


def _refuse(node: ast.AST, why: str) -> None:
    raise BadAnswer(f"Line {getattr(node, 'lineno', 0)} ({ast.unparse(node).splitlines()[0][:80]}): {why}.")


def _check_frame(sheet: Sheet, functions: dict[str, ast.FunctionDef]) -> None:
    launcher = functions[sheet.launcher]
    names = [arg.arg for arg in launcher.args.args]
    if tuple(names[: len(sheet.tensors)]) != sheet.tensors:
        raise BadAnswer(f"{sheet.launcher} must keep its parameters: {', '.join(sheet.tensors)}.")
    framed = {
        node.name for node in ast.parse(f"{sheet.guard}\n{sheet.operator}").body if isinstance(node, ast.FunctionDef)
    }
    taken = framed & set(functions)
    if taken:
        raise BadAnswer(f"{min(taken)} exists already outside this text; leave it out.")
    # The defaults hand the kernels in, for torch.compile; they are written anew from what is launched.
    extra = set(names[len(sheet.tensors) :]) - set(functions)
    if extra or launcher.args.kwonlyargs or launcher.args.vararg or launcher.args.kwarg or launcher.decorator_list:
        raise BadAnswer(f"{sheet.launcher} takes nothing beside {', '.join(sheet.tensors)} and its kernels.")


def _check_function(function: ast.FunctionDef, ours: set[str], old: ast.Module, *, is_kernel: bool) -> None:
    known = {ast.dump(node) for node in ast.walk(old) if isinstance(node, (ast.Call, ast.Attribute))}
    if is_kernel and [ast.unparse(item) for item in function.decorator_list] != ["triton.jit"]:
        _refuse(
            function, "every function beside the launcher is a kernel or a helper of one: @triton.jit, nothing else"
        )
    for node in ast.walk(function):
        if type(node).__name__ in FORBIDDEN:
            _refuse(node, FORBIDDEN[type(node).__name__])
        if isinstance(node, ast.FunctionDef) and node is not function:
            _refuse(node, "no functions inside functions")
        if isinstance(node, ast.Attribute) and ast.dump(node) not in known:
            _check_attribute(node, is_kernel=is_kernel)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            name = node.func.id
            if name not in PLAIN_CALLS and not (is_kernel and name in ours):
                _refuse(node, f"{name} may not be called here")


def _check_attribute(node: ast.Attribute, *, is_kernel: bool) -> None:
    if node.attr.startswith("_"):
        _refuse(node, "no private names")
    parts, root = [node.attr], node.value
    while isinstance(root, ast.Attribute):
        parts.insert(0, root.attr)
        root = root.value
    base = root.id if isinstance(root, ast.Name) else ""
    if base == "torch" and (is_kernel or len(parts) > 1 or parts[0] not in ALLOCATION | TYPES):
        _refuse(
            node,
            "torch is only for allocation (torch.empty, torch.empty_like, ...) in the launcher; compute in a kernel",
        )
    elif base == "triton" and (len(parts) > 1 or parts[0] not in OF_TRITON):
        _refuse(node, f"of triton only {', '.join(sorted(OF_TRITON))} are allowed")
    elif base == "tl" and (not is_kernel or not set(parts[:-1]) <= NESTED):
        _refuse(node, "tl is for kernels, as in tl.load")
    elif base not in ("torch", "triton", "tl") and not is_kernel and parts[-1] not in OF_TENSORS | VIEWING:
        _refuse(node, f".{parts[-1]} is no allocation, size or view of a tensor; compute in a kernel")


def _check_names(text: str, ours: set[str]) -> None:
    """Every name is a parameter, made in its function, or one of the few that are there."""
    there = ours | PLAIN_CALLS | {"torch", "triton", "tl", "True", "False", "None"}
    for scope in symtable.symtable(text, "<answer>", "exec").get_children():
        for symbol in _read_from_outside(scope):
            if symbol not in there:
                what = "is not allowed" if hasattr(builtins, symbol) else "is defined nowhere"
                raise BadAnswer(f"{scope.get_name()}: the name {symbol} {what}.")


def _lent(sheet: Sheet) -> set[str]:
    """Functions outside the text that its launcher uses."""
    framed = {node.name for node in ast.parse(sheet.guard).body if isinstance(node, ast.FunctionDef)}
    return framed & {node.id for node in ast.walk(ast.parse(sheet.text)) if isinstance(node, ast.Name)}


def _read_from_outside(scope: symtable.SymbolTable) -> Iterator[str]:
    for symbol in scope.get_symbols():
        if symbol.is_global() and symbol.is_referenced():
            yield symbol.get_name()
    for inner in scope.get_children():
        yield from _read_from_outside(inner)


def _check_elsewhere(
    old: Mapping[str, ast.FunctionDef], new: Mapping[str, ast.FunctionDef], elsewhere: Collection[str]
) -> None:
    """What the step is not about stays: those kernels, and the helpers that they call."""
    pending, seen = list(elsewhere), set(elsewhere)
    while pending:
        name = pending.pop()
        if name not in new:
            raise BadAnswer(f"{name} is gone; this step is not about it, so it must stay.")
        if ast.dump(new[name]) != ast.dump(old[name]):
            raise BadAnswer(f"{name} is changed, and this step is not about it. Leave it as it is.")
        called = {node.id for node in ast.walk(old[name]) if isinstance(node, ast.Name)} & set(old) - seen
        pending += called
        seen |= called


def _check_torch(old: ast.FunctionDef, new: ast.FunctionDef, *, moved_calls: int) -> None:
    before, after = _torch_calls(old), _torch_calls(new)
    added = after - before
    if added:
        raise BadAnswer(f"{new.name} computes with torch: {next(iter(added))}. Compute that in a kernel.")
    if after.total() > max(0, before.total() - moved_calls):
        calls = "; ".join(after)
        raise BadAnswer(
            f"{new.name} still makes torch calls of the region ({calls}). Take out what the kernel computes."
        )


def _torch_calls(function: ast.FunctionDef) -> Counter[str]:
    """Calls that compute something: neither allocation, nor views, nor launches."""
    found: Counter[str] = Counter()
    for node in ast.walk(function):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            base = node.func.value
            is_torch = isinstance(base, ast.Name) and base.id == "torch"
            cheap = ALLOCATION if is_torch else OF_TENSORS | VIEWING | OF_TRITON
            if node.func.attr not in cheap:
                found[ast.unparse(node.func) if is_torch or _is_operator(base) else f".{node.func.attr}"] += 1
    return found


def _is_operator(node: ast.AST) -> bool:
    return ast.unparse(node).startswith("torch.")


def _check_static(old: str, new: str) -> None:
    """What the editor's own checks find in the new text and did not in the old one."""
    known = Counter(code for code, _ in _findings(old))
    for code, message in _findings(new):
        if known[code]:
            known[code] -= 1
            continue
        raise BadAnswer(f"{code}: {message}")


def _findings(text: str) -> list[tuple[str, str]]:
    whole = f"import torch\nimport triton\nimport triton.language as tl\n\n\n{text}".encode()
    known = Outliner("").outline(whole, parse(whole))
    found = []
    for chunk in known.chunks:
        for item in check(chunk.text, context_of(known)):
            if item.severity in (Severity.ERROR, Severity.WARNING):
                line = chunk.text[item.start : item.end].decode().splitlines()[0]
                found.append((item.code, f"{item.message} ({line})"))
    return found
