"""The text of a file from a finished draft."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from mtmc_lsp.programs.draft import Draft, Tensor
from mtmc_lsp.programs.expressions import simplified

DIRECTIVE_WIDTH = 110
WIDTH = 120
INDENT = "    "
DTYPE_WORDS = {"f32": "", "bf16": "bf16,", "f16": "f16,"}


def rendered(draft: Draft, name: str, outputs: Sequence[Tensor]) -> str:
    """The text of the file: imports, the directive, and the function or module.

    Args:
        name: the name of the function or class.
    """
    body = [*draft.lines, _returned(outputs)]
    if len(outputs) == 1:
        body = _without_last_variable(body)
    body = [simplified(line) for line in body]
    lines = _module(draft, name, body) if draft.is_module else _function(draft, name, body)
    text = "\n".join(lines)
    return "\n".join([*_imports(text), "", "", *_directive(draft), text, ""])


def _returned(outputs: Sequence[Tensor]) -> str:
    return f"return {', '.join(output.text for output in outputs)}"


def _without_last_variable(body: list[str]) -> list[str]:
    """Return the last expression directly instead of its variable."""
    if len(body) < 2:
        return body
    name, _, expression = body[-2].partition(" = ")
    return [*body[:-2], f"return {expression}"] if name.isidentifier() and body[-1] == f"return {name}" else body


def _imports(text: str) -> list[str]:
    uses = {
        "import math": "math." in text,
        "import torch": True,
        "import torch.nn as nn": "nn.Module" in text,
        "import torch.nn.functional as F": "F." in text,
    }
    lines = [line for line, is_used in uses.items() if is_used]
    if lines[0] == "import math":
        lines.insert(1, "")
    return lines


def _directive(draft: Draft) -> list[str]:
    tensors = [f"{name}={spec}" for name, spec in draft.arguments.items()]
    module = [f"module={DTYPE_WORDS[draft.dtype]}eval"] if draft.is_module and draft.members else []
    sizes = [f"{name}={value}" for name, value in draft.sizes.items()]
    lines = textwrap.wrap(" ".join([*module, *tensors, *sizes]), DIRECTIVE_WIDTH, break_long_words=False)
    initial = " ".join(f"{name}={size}" for name, size in draft.constructor_sizes.items())
    if initial and draft.is_module:
        if len(lines[-1]) + len(initial) + len(" init: ") > DIRECTIVE_WIDTH:
            lines.append(f"init: {initial}")
        else:
            lines[-1] += f" init: {initial}"
    return [f"# mtmc: {line}" for line in lines]


def _function(draft: Draft, name: str, body: Sequence[str]) -> list[str]:
    head = _definition(name, [*_tensors(draft), *_numbers(draft)], "")
    return [*head, *(f"{INDENT}{line}" for line in body)]


def _module(draft: Draft, name: str, body: Sequence[str]) -> list[str]:
    kind = ": int" if draft.style.is_annotated else ""
    sizes = [f"{argument}{kind}" for argument in draft.constructor_sizes]
    lines = [f"class {name}(nn.Module):"]
    if draft.members:
        lines += _definition("__init__", ["self", *sizes, *_numbers(draft)], INDENT)
        lines += [f"{INDENT * 2}super().__init__()", *(f"{INDENT * 2}{simplified(item)}" for item in draft.members), ""]
    lines += _definition("forward", ["self", *_tensors(draft)], INDENT)
    return [*lines, *(f"{INDENT * 2}{line}" for line in body)]


def _definition(name: str, arguments: Sequence[str], indent: str) -> list[str]:
    line = f"{indent}def {name}({', '.join(arguments)}):"
    if len(line) <= WIDTH:
        return [line]
    return [f"{indent}def {name}(", *(f"{indent}{INDENT}{argument}," for argument in arguments), f"{indent}):"]


def _tensors(draft: Draft) -> list[str]:
    return [f"{name}{': torch.Tensor' if draft.style.is_annotated else ''}" for name in draft.arguments]


def _numbers(draft: Draft) -> list[str]:
    if not draft.style.is_annotated:
        return [f"{name}={value}" for name, value in draft.numbers.items()]
    kinds = {name: "float" if "." in value or "e" in value else "int" for name, value in draft.numbers.items()}
    return [f"{name}: {kinds[name]} = {value}" for name, value in draft.numbers.items()]
