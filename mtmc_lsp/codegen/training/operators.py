"""Writes the functions of both passes as operators, which torch.compile calls without tracing them."""

from __future__ import annotations

from dataclasses import dataclass

from mtmc_lsp.codegen.kernel.snippets import call_text, def_lines, tuple_text
from mtmc_lsp.codegen.module.conditions.tensors import size_text
from mtmc_lsp.codegen.module.guard import bindings
from mtmc_lsp.codegen.module.launchers.launcher import Launcher
from mtmc_lsp.codegen.module.launchers.operator import MAX_ARGUMENTS
from mtmc_lsp.core.graph import TensorType
from mtmc_lsp.core.sizes import Size

NUMBER_TYPES = {"bool", "float", "int"}
"""Types of numbers that an operator may take."""


@dataclass(frozen=True)
class PassOperator:
    """The operator of a function ``BASE_forward`` or ``BASE_backward``."""

    launcher: Launcher
    function: str

    @property
    def name(self) -> str:
        """Of the operator."""
        return f"{self.function}_triton"

    def choice(self, variable: str) -> str:
        """The statement that assigns the operator under torch.compile, and the function elsewhere."""
        return f"{variable} = {self.name} if torch.compiler.is_compiling() else {self.function}"

    @property
    def is_legal(self) -> bool:
        """Whether it changes no argument, and the results are new tensors that depend on the arguments alone."""
        launcher = self.launcher
        return (
            launcher.returns_new_tensors()
            and not launcher.ir.graph.mutations
            and not launcher.uses_seed
            and set(self._number_types()) <= NUMBER_TYPES
            and len(launcher.parameters) <= MAX_ARGUMENTS
        )

    def source(self) -> str:
        """The operator, and its results without values."""
        launcher = self.launcher
        tensors, numbers = list(launcher.input_names.values()), list(launcher.number_names.values())
        typed = [f"{name}: torch.Tensor" for name in tensors]
        typed += [f"{name}: {kind}" for name, kind in zip(numbers, self._number_types(), strict=True)]
        kinds = [launcher.ir.graph.type_of(ref) for ref in launcher.distinct_outputs]
        result = "torch.Tensor" if len(kinds) == 1 else f"tuple[{', '.join(['torch.Tensor'] * len(kinds))}]"
        lines = [
            f'@torch.library.custom_op(f"{launcher.namespace}::{self.name}", mutates_args=())',
            *def_lines(self.name, typed, result),
            f'    """``{self.function}`` as an operator for torch.compile."""',
            f"    return {call_text(self.function, [*tensors, *numbers], '    ')}",
            "",
            "",
            f"@{self.name}.register_fake",
            *def_lines(f"{self.function}_shapes", [*tensors, *numbers]),
            f'    """The results of ``{self.function}`` without values."""',
        ]
        texts = [self._empty(kind) for kind in kinds]
        lines += [f"    return {texts[0]}"] if len(texts) == 1 else [f"    return {call_text('', texts, '    ')}"]
        return "\n".join(lines) + "\n"

    def _number_types(self) -> list[str]:
        kinds = {item.name: type(item.value).__name__ for item in self.launcher.ir.graph.numbers}
        return [kinds[name] for name in self.launcher.number_names]

    def _empty(self, kind: TensorType) -> str:
        """Python for a new tensor of this type."""
        launcher = self.launcher
        names = launcher.input_names
        sizes = {symbol: binding.operand for symbol, binding in bindings(launcher.ir.graph, names).items()}

        def text(values: tuple[Size, ...]) -> str:
            return tuple_text([size_text(value, sizes) for value in values])

        first = names[launcher.ir.graph.inputs[0].name]
        if kind.is_contiguous:
            return f"{first}.new_empty({text(kind.shape)}, dtype=torch.{kind.dtype})"
        return f"{first}.new_empty_strided({text(kind.shape)}, {text(kind.stride)}, dtype=torch.{kind.dtype})"
