"""Writes the ``torch.autograd.Function`` that runs the forward and the backward launcher."""

from __future__ import annotations

from dataclasses import dataclass

from mtmc_lsp.codegen.kernel.snippets import call_text, tuple_text
from mtmc_lsp.codegen.module.launchers.launcher import Launcher
from mtmc_lsp.codegen.training.function_class import FunctionClass, class_name, passed_original, tangent_parameters
from mtmc_lsp.codegen.training.operators import PassOperator
from mtmc_lsp.codegen.training.original_code import OriginalCode, original_code
from mtmc_lsp.core.graph import Backward
from mtmc_lsp.core.workload import Capture
from mtmc_lsp.rewrites.saved_values import Passes


@dataclass(frozen=True)
class AutogradFunction:
    """The names and the two launchers of a target with a backward pass."""

    base: str
    qualname: str
    passes: Passes
    forward: Launcher
    backward: Launcher
    is_traced: bool
    """Whether torch.compile calls operators instead of the launchers."""
    capture: Capture

    @property
    def original(self) -> OriginalCode | None:
        """How to call the original code."""
        saved = [self.forward.variables[ref] for ref in self.passes.saved]
        return original_code(self.capture, class_name(self.base), self.passes.forward, self.forward, saved)

    @property
    def operators(self) -> tuple[PassOperator, PassOperator]:
        """Both launchers as operators."""
        return PassOperator(self.forward, f"{self.base}_forward"), PassOperator(self.backward, f"{self.base}_backward")

    def source(self) -> str:
        """The class, and the function ``BASE_launch`` that applies it."""
        parameters, original = self.forward.parameters, self.original
        arguments = [*parameters, *passed_original(original)]
        function = FunctionClass(
            self.base,
            self.qualname,
            docstring=[f'"""``{self.qualname}`` with Triton kernels in both passes."""'],
            parameters=parameters,
            tangents=tangent_parameters(self._spec, len(self.passes.whole.forward_outputs)),
            forward=self._forward(),
            backward=self._backward(),
            launch=[f"return {call_text(f'{class_name(self.base)}.apply', arguments, '    ')}"],
            original=original,
        )
        return function.source()

    @property
    def _spec(self) -> Backward:
        assert self.passes.whole.backward is not None
        return self.passes.whole.backward

    def _forward(self) -> list[str]:
        graph, launcher = self.passes.forward, self.forward
        count = len(self.passes.whole.forward_outputs)
        names = [launcher.variables[ref] for ref in graph.outputs]
        lines, function = self._run(0)
        lines.append(f"{', '.join(names)} = {call_text(function, launcher.parameters, '        ')}")
        saved = [launcher.variables[ref] for ref in self.passes.saved]
        if saved:
            lines.append(call_text("ctx.save_for_backward", saved, "        "))
        if numbers := list(self.backward.number_names):
            lines.append(f"ctx.numbers = {tuple_text([launcher.number_names[name] for name in numbers])}")
        constant = [names[i] for i in range(count) if i not in self._spec.results]
        if constant:
            lines.append(f"ctx.mark_non_differentiable({', '.join(constant)})")
        return [*lines, f"return {', '.join(names[:count])}"]

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
        # Gradients that are the same tensor, as those of both operands of a sum, get the name of the first.
        variables = [self.backward.variables[ref] for ref in self.passes.backward.outputs]
        gradients = dict[str, str]()
        for variable, name in zip(variables, self._spec.gradients, strict=True):
            gradients.setdefault(variable, f"grad_{name}")
        chosen, function = self._run(1)
        call = call_text(function, [*passed, *numbers], "        ")
        lines += [*chosen, f"{', '.join(gradients.values())} = {call}"]
        by_input = {name: gradients[variable] for variable, name in zip(variables, self._spec.gradients, strict=True)}
        returned = [by_input.get(item.name, "None") for item in self.passes.forward.inputs]
        returned += ["None"] * (len(self.forward.number_names) + (self.original is not None))
        return [*lines, f"return {', '.join(returned)}"]

    def _run(self, number: int) -> tuple[list[str], str]:
        """Statements before the call of a pass, and the function to call."""
        operator, variable = self.operators[number], f"{self.base}_pass"
        return ([operator.choice(variable)], variable) if self.is_traced else ([], operator.function)
