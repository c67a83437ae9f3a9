"""The text of a ``torch.autograd.Function`` and of the function that applies it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mtmc_lsp.codegen.kernel.snippets import def_lines
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

    def source(self) -> str:
        """Both as text."""
        lines = [
            f"class {class_name(self.base)}(torch.autograd.Function):",
            *_indented(self.docstring),
            "",
            "    @staticmethod",
            *_indented(def_lines("forward", ["ctx", *self.parameters])),
            *_indented(_indented(self.forward)),
            "",
            "    @staticmethod",
            *_indented(def_lines("backward", ["ctx", *self.tangents])),
            *_indented(_indented([*self._checks(), *self.backward])),
            "",
            "",
            *def_lines(f"{self.base}_launch", list(self.parameters)),
            f'    """``{self.qualname}`` with Triton kernels; autograd records the call if it has to."""',
            *_indented(self.launch),
        ]
        return "\n".join(lines) + "\n"

    def _checks(self) -> list[str]:
        """Statements about the mode in which a backward pass runs."""
        return [
            "if torch.is_grad_enabled() and not torch.compiler.is_compiling():",
            f'    raise RuntimeError("{self.qualname}: {NO_SECOND_DERIVATIVES}")',
        ]


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
