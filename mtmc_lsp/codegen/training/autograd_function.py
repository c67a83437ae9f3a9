"""Writes the ``torch.autograd.Function`` that runs the forward and the backward launcher."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mtmc_lsp.codegen.kernel.snippets import call_text, def_lines, tuple_text
from mtmc_lsp.codegen.module.launcher import Launcher
from mtmc_lsp.core.graph import Backward
from mtmc_lsp.rewrites.saved_values import Passes


@dataclass(frozen=True)
class AutogradFunction:
    """The names and the two launchers of a target with a backward pass."""

    base: str
    qualname: str
    passes: Passes
    forward: Launcher
    backward: Launcher

    @property
    def class_name(self) -> str:
        """The name of the class in the generated code."""
        return f"_{''.join(part.capitalize() for part in self.base.split('_'))}Autograd"

    def source(self) -> str:
        """The class, and the function ``BASE_launch`` that applies it."""
        parameters = self.forward.parameters
        lines = [
            f"class {self.class_name}(torch.autograd.Function):",
            f'    """``{self.qualname}`` with Triton kernels in both passes."""',
            "",
            "    @staticmethod",
            *_indented(def_lines("forward", ["ctx", *parameters])),
            *(f"        {line}" for line in self._forward()),
            "",
            "    @staticmethod",
            "    @torch.autograd.function.once_differentiable",
            *_indented(def_lines("backward", ["ctx", *self._tangent_parameters()])),
            *(f"        {line}" for line in self._backward()),
            "",
            "",
            *def_lines(f"{self.base}_launch", parameters),
            f'    """``{self.qualname}`` with Triton kernels; autograd records the call if it has to."""',
            f"    return {call_text(f'{self.class_name}.apply', parameters, '    ')}",
        ]
        return "\n".join(lines) + "\n"

    @property
    def _spec(self) -> Backward:
        assert self.passes.whole.backward is not None
        return self.passes.whole.backward

    def _forward(self) -> list[str]:
        graph, launcher = self.passes.forward, self.forward
        count = len(self.passes.whole.forward_outputs)
        names = [launcher.variables[ref] for ref in graph.outputs]
        call = call_text(f"{self.base}_forward", launcher.parameters, "        ")
        lines = [f"{', '.join(names)} = {call}"]
        saved = [launcher.variables[ref] for ref in self.passes.saved]
        if saved:
            lines.append(call_text("ctx.save_for_backward", saved, "        "))
        if numbers := list(self.backward.number_names):
            lines.append(f"ctx.numbers = {tuple_text([launcher.number_names[name] for name in numbers])}")
        constant = [names[i] for i in range(count) if i not in self._spec.results]
        if constant:
            lines.append(f"ctx.mark_non_differentiable({', '.join(constant)})")
        return [*lines, f"return {', '.join(names[:count])}"]

    def _tangent_parameters(self) -> list[str]:
        """One parameter for the gradient of each result."""
        by_result = {number: item.name for number, item in zip(self._spec.results, self._spec.tangents, strict=True)}
        count = len(self.passes.whole.forward_outputs)
        return [by_result.get(i, f"_grad_{i}") for i in range(count)]

    def _backward(self) -> list[str]:
        lines = []
        inputs = self.passes.backward.inputs
        tangents = {item.name for item in self._spec.tangents}
        names = [self.backward.input_names[item.name] for item in inputs if item.name not in tangents]
        if names:
            lines.append(f"{', '.join(names)}{',' * (len(names) == 1)} = ctx.saved_tensors")
        numbers = list(self.backward.number_names.values())
        if numbers:
            lines.append(f"{', '.join(numbers)}{',' * (len(numbers) == 1)} = ctx.numbers")
        passed = [
            f"{item.name}.contiguous()" if item.name in tangents else self.backward.input_names[item.name]
            for item in inputs
        ]
        gradients = [f"grad_{name}" for name in self._spec.gradients]
        call = call_text(f"{self.base}_backward", [*passed, *numbers], "        ")
        lines.append(f"{', '.join(gradients)} = {call}")
        by_input = dict(zip(self._spec.gradients, gradients, strict=True))
        returned = [by_input.get(item.name, "None") for item in self.passes.forward.inputs]
        returned += ["None"] * len(self.forward.number_names)
        return [*lines, f"return {', '.join(returned)}"]


def _indented(lines: Sequence[str]) -> list[str]:
    return [f"    {line}" for line in lines]
