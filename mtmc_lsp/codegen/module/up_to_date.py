"""The run-time check that a version's globals, helper functions and environment are those that it was verified with."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Sequence

from mtmc_lsp.core import source_digest as digests
from mtmc_lsp.core.dependencies import Dependency, DependencyKind

DOTTED = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
ERRORS = "(AttributeError, IndexError, KeyError, NameError, TypeError, ValueError)"
"""What a name, attribute or cell that no longer exists raises."""
IS_UNCHANGED_CODE = "_has_source"
CODE_HELPERS = (
    f'''{inspect.getsource(digests).partition("from typing import Any")[2].strip()}


_SOURCES = {{}}


def _has_source(function, digest) -> bool:
    """Whether a function's source has this digest. It is read once for each code object: sources do not change in a process."""
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
    """Source of the check, with what it calls; empty where there is nothing to check.

    ``torch.compile`` traces the comparison of plain values, and so compiles again when one changes. It takes the rest as
    a constant.

    Args:
        name: of the function.
        dependencies: those with an ``access`` are checked.
    """
    values: list[str] = []
    others: list[str] = []
    for item in dependencies:
        if not item.access:
            continue
        if item.kind is DependencyKind.CODE:
            others.append(f'{IS_UNCHANGED_CODE}({item.access}, "{item.digest}")')
        elif item.kind is DependencyKind.ENVIRONMENT:
            expected = f"== {item.value!r}" if item.type else "is None"
            others.append(f"os.environ.get({item.access!r}) {expected}")
        elif item.kind is DependencyKind.VALUE:
            condition = value_condition(item)
            is_traced = DOTTED.fullmatch(item.access) and "repr(" not in condition
            (values if is_traced else others).append(condition)
    texts = []
    if others:
        values.append(f"{name}_code()")
        why = "Whether helper functions, closures and the environment are those that the kernels were verified with"
        texts.append(f"@torch.compiler.assume_constant_result\n{_function(f'{name}_code', why, others)}")
    if not values:
        return ""
    why = "Whether the original code would still read what the kernels were verified with"
    texts.append(_function(name, why, values))
    if any(text.startswith(IS_UNCHANGED_CODE) for text in others):
        texts.insert(0, CODE_HELPERS)
    return "\n\n".join(texts)


def _function(name: str, why: str, conditions: Sequence[str]) -> str:
    body = "\n            and ".join(dict.fromkeys(conditions))
    imports = [module for module in ("os", "sys") if re.search(rf"(?<![\w.]){module}\.(environ|modules)\b", body)]
    local = "".join(f"    import {module}\n" for module in imports) + ("\n" if imports else "")
    return (
        f'def {name}() -> bool:\n    """{why}."""\n{local}    try:\n'
        f"        return (\n            {body}\n        )\n    except {ERRORS}:\n        return False\n"
    )


def value_condition(item: Dependency) -> str:
    """Python for: the value is the one that was recorded, of the same type (2 and 2.0 promote tensors differently)."""
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
        # Signed zeros are equal.
        return f"repr({access}) == {value!r}" if number == 0.0 else f"type({access}) is float and {access} == {text}"
    if item.type in ("dtype", "memory_format") and value.startswith("torch."):
        return f"{access} is {value}"
    return f"repr({access}) == {value!r}"
