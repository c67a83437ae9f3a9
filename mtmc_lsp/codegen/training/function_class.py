"""The text of a ``torch.autograd.Function`` and of the function that applies it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mtmc_lsp.codegen.kernel.snippets import def_lines, tuple_text
from mtmc_lsp.codegen.training.original_code import IS_DIFFERENTIATED, ORIGINAL, OriginalCode
from mtmc_lsp.core.graph import Backward


@dataclass(frozen=True)
class FunctionClass:
    """The class of a target, and the function ``BASE_launch``."""

    base: str
    """The target's name in generated functions."""
    qualname: str
    docstring: Sequence[str]
    """Lines of the class's docstring, with its quotes."""
    parameters: Sequence[str]
    """Of the forward pass and of the launch function."""
    tangents: Sequence[str]
    """Parameters of the backward pass: one for the gradient of each result."""
    forward: Sequence[str]
    backward: Sequence[str]
    launch: Sequence[str]
    """Statements of the launch function."""
    original: OriginalCode | None = None
    """How to call the original code; ``None`` if it cannot be called again."""

    def source(self) -> str:
        """Both as text."""
        further = [ORIGINAL] if self.original is not None else []
        lines = [
            f"class {class_name(self.base)}(torch.autograd.Function):",
            *_indented(self.docstring),
            "",
            "    @staticmethod",
            *_indented(def_lines("forward", ["ctx", *self.parameters, *further])),
            *_indented(_indented([*(self.original.lines_of_forward if self.original else ()), *self.forward])),
            "",
            "    @staticmethod",
            *_indented(def_lines("backward", ["ctx", *self.tangents])),
            *_indented(_indented([*self._checks(), *self.backward])),
            *([] if self.original is None else ["", *_indented(self.original.method())]),
            "",
            "",
            *def_lines(f"{self.base}_launch", [*self.parameters, *(f"{name}=None" for name in further)]),
            f'    """``{self.qualname}`` with Triton kernels; autograd records the call if it has to."""',
            *_indented(self.launch),
        ]
        return "\n".join(lines) + "\n"

    def _checks(self) -> list[str]:
        """Statements about the mode in which a backward pass runs."""
        if self.original is not None:
            return self.original.check(self.tangents)
        return [
            f"if {IS_DIFFERENTIATED}({tuple_text(list(self.tangents))}):",
            f'    raise RuntimeError("{self.qualname}: {NO_SECOND_DERIVATIVES}")',
        ]


def passed_original(original: OriginalCode | None) -> list[str]:
    """The last argument of the autograd function, if it needs the original code."""
    return [f"None if torch.compiler.is_compiling() else {ORIGINAL}"] if original is not None else []


NO_SECOND_DERIVATIVES = "its kernels have no second derivatives (create_graph=True); leave grad= out of its directive"


def class_name(base: str) -> str:
    """The name of the class in the generated code."""
    return f"_{''.join(part.capitalize() for part in base.split('_'))}Autograd"


def tangent_parameters(backward: Backward, count: int) -> list[str]:
    """One parameter for the gradient of each of ``count`` results."""
    by_result = {number: item.name for number, item in zip(backward.results, backward.tangents, strict=True)}
    return [by_result.get(i, f"_grad_{i}") for i in range(count)]


def _indented(lines: Sequence[str]) -> list[str]:
    return [f"    {line}" if line else "" for line in lines]
