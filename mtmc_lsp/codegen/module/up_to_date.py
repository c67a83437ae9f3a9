"""Generates the run-time check that globals, helper functions and environment are the same as at verification."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Sequence

from mtmc_lsp.core import source_digest as digests
from mtmc_lsp.core.dependencies import Dependency, DependencyKind

DOTTED = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
ERRORS = "(AttributeError, IndexError, KeyError, NameError, TypeError, ValueError)"
"""Exceptions of reading a name, attribute or closure cell that no longer exists."""
IS_UNCHANGED_CODE = "_has_source"
CODE_HELPERS = (
    f'''{inspect.getsource(digests).partition("from typing import Any")[2].strip()}


_SOURCES = {{}}


def _has_source(function, digest) -> bool:
    """Whether a function's source has this digest. Cached per code object, because sources do not change in a process."""
    code = function.__code__
    known = _SOURCES.get(id(code))
    if known is None:
        import inspect

        try:
            text = inspect.getsource(code)
            known = _SOURCES[id(code)] = (code, source_digest(text))
        except (OSError, SyntaxError):
            return False  # there is no source to compare
    return known[1] == digest
'''.replace(": Any", "")
    .replace("_syntax", "_syntax_text")
    .replace("source_digest", "_source_digest")
)


def write_check(name: str, dependencies: Sequence[Dependency]) -> str:
    """Source of the check function and its helpers; empty if there is nothing to check.

    ``torch.compile`` traces comparisons of plain values, so it recompiles when one changes. It treats all other checks as
    constants.

    Args:
        name: name of the check function.
        dependencies: only those with an ``access`` are checked.
    """
    conditions: list[str] = []
    untraced_conditions: list[str] = []
    for item in dependencies:
        if not item.access:
            continue
        if item.kind is DependencyKind.CODE:
            untraced_conditions.append(f'{IS_UNCHANGED_CODE}({item.access}, "{item.digest}")')
        elif item.kind is DependencyKind.ENVIRONMENT:
            expected = f"== {item.value!r}" if item.type else "is None"
            untraced_conditions.append(f"os.environ.get({item.access!r}) {expected}")
        elif item.kind is DependencyKind.VALUE:
            condition = value_condition(item)
            is_traced = DOTTED.fullmatch(item.access) and "repr(" not in condition
            (conditions if is_traced else untraced_conditions).append(condition)
    texts = []
    if untraced_conditions:
        conditions.append(f"{name}_code()")
        summary = (
            "Whether helper functions, closures and the environment are the same as when the kernels were verified"
        )
        texts.append(
            f"@torch.compiler.assume_constant_result\n{_function(f'{name}_code', summary, untraced_conditions)}"
        )
    if not conditions:
        return ""
    summary = "Whether the original code still reads the values with which the kernels were verified"
    texts.append(_function(name, summary, conditions))
    if any(text.startswith(IS_UNCHANGED_CODE) for text in untraced_conditions):
        texts.insert(0, CODE_HELPERS)
    return "\n\n".join(texts)


def _function(name: str, summary: str, conditions: Sequence[str]) -> str:
    body = "\n            and ".join(dict.fromkeys(conditions))
    imports = [module for module in ("os", "sys") if re.search(rf"(?<![\w.]){module}\.(environ|modules)\b", body)]
    local = "".join(f"    import {module}\n" for module in imports) + ("\n" if imports else "")
    return (
        f'def {name}() -> bool:\n    """{summary}."""\n{local}    try:\n'
        f"        return (\n            {body}\n        )\n    except {ERRORS}:\n        return False\n"
    )


def value_condition(item: Dependency) -> str:
    """Python condition: the value and its type are as recorded (2 and 2.0 promote tensors differently)."""
    access, value = item.access, item.value
    if item.type in ("NoneType", "bool"):
        return f"{access} is {value}"
    if item.type in ("int", "str"):
        return f"type({access}) is {item.type} and {access} == {value}"
    if item.type == "float":
        number = float(value)
        if math.isnan(number):
            return f"type({access}) is float and {access} != {access}"
        text = value if math.isfinite(number) else f'float("{value}")'
        # 0.0 == -0.0, so zeros are compared by their text.
        return f"repr({access}) == {value!r}" if number == 0.0 else f"type({access}) is float and {access} == {text}"
    if item.type in ("dtype", "memory_format") and value.startswith("torch."):
        return f"{access} is {value}"
    return f"repr({access}) == {value!r}"
