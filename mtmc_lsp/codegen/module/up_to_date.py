"""The run-time check that globals, helper functions and the environment still match the verified state."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Sequence

from mtmc_lsp.core import source_digest as digests
from mtmc_lsp.core.dependencies import Dependency, DependencyKind

DOTTED = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
IMPORTED = re.compile(r"sys\.modules\['([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)'\]")
ERRORS = "(AttributeError, ImportError, IndexError, KeyError, NameError, TypeError, ValueError)"
"""Exceptions of a lookup that no longer exists."""
IS_UNCHANGED_CODE = "_has_source"
_DIGEST = inspect.getsource(digests.source_digest).replace(": Any", "").replace("source_digest", "_source_digest")
_RAISES = re.compile(r'\n\n    Raises:\n.*?\n    (?=""")', re.DOTALL)
CODE_HELPERS = f'''{_RAISES.sub("", _DIGEST, count=1)}

_SOURCES = {{}}


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
'''


def write_check(name: str, dependencies: Sequence[Dependency]) -> str:
    """Source of the check and its helpers; empty if there is nothing to check.

    ``torch.compile`` traces comparisons of plain values, and recompiles when one changes. Other checks are constants
    for it.

    Args:
        dependencies: the recorded dependencies; those without ``access`` are skipped.
    """
    values: list[str] = []
    untraced: list[str] = []
    for item in dependencies:
        if not item.access:
            continue
        if item.kind is DependencyKind.CODE:
            untraced.append(f'{IS_UNCHANGED_CODE}({item.access}, "{item.digest}")')
        elif item.kind is DependencyKind.ENVIRONMENT:
            expected = f"== {item.value!r}" if item.type else "is None"
            untraced.append(f"os.environ.get({item.access!r}) {expected}")
        elif item.kind is DependencyKind.VALUE:
            condition = value_condition(item)
            is_traced = DOTTED.fullmatch(item.access) and "repr(" not in condition
            (values if is_traced else untraced).append(condition)
    summary = "Whether globals, helper functions and the environment match those of the verification"
    constant = "@torch.compiler.assume_constant_result\n"
    if not values and not untraced:
        return ""
    if not values:
        texts = [constant + _function(name, summary, untraced)]
    elif untraced:
        of_code = "Whether helper functions, closures and the environment match those of the verification"
        texts = [constant + _function(f"{name}_code", of_code, untraced)]
        texts.append(_function(name, summary, [*values, f"{name}_code()"]))
    else:
        texts = [_function(name, summary, values)]
    if any(text.startswith(IS_UNCHANGED_CODE) for text in untraced):
        texts.insert(0, CODE_HELPERS)
    return "\n\n".join(texts)


def _function(name: str, summary: str, conditions: Sequence[str]) -> str:
    body = "\n            and ".join(unique := list(dict.fromkeys(conditions)))
    returned = f"return {body}" if len(unique) == 1 else f"return (\n            {body}\n        )"
    imports = [module for module in ("os", "sys") if re.search(rf"(?<![\w.]){module}\.(environ|modules)\b", body)]
    import_lines = "".join(f"    import {module}\n" for module in imports) + ("\n" if imports else "")
    # The kernels may run before the code that imports these modules when it is first called.
    modules = sorted(set(IMPORTED.findall(body)) - {"__main__"})
    module_lines = "".join(f"        import {module}\n" for module in modules) + ("\n" if modules else "")
    return (
        f'def {name}() -> bool:\n    """{summary}."""\n{import_lines}    try:\n{module_lines}'
        f"        {returned}\n    except {ERRORS}:\n        return False\n"
    )


def value_condition(item: Dependency) -> str:
    """Python condition that a value equals the recorded one, with the same type (2 and 2.0 promote tensors differently)."""
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
        # 0.0 == -0.0, so compare the text.
        return f"repr({access}) == {value!r}" if number == 0.0 else f"type({access}) is float and {access} == {text}"
    if item.type in ("dtype", "memory_format") and value.startswith("torch."):
        return f"{access} is {value}"
    return f"repr({access}) == {value!r}"
