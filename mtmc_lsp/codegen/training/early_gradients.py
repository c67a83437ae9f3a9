"""Writes the ``torch.autograd.Function`` of a target whose forward pass computes the gradients."""

from __future__ import annotations

from dataclasses import dataclass

from mtmc_lsp.codegen.kernel.snippets import call_text
from mtmc_lsp.codegen.module.launchers.launcher import Launcher
from mtmc_lsp.codegen.module.launchers.values import FLAG
from mtmc_lsp.codegen.training.function_class import FunctionClass, class_name, passed_original, tangent_parameters
from mtmc_lsp.codegen.training.operators import PassOperator
from mtmc_lsp.codegen.training.original_code import OriginalCode, original_code
from mtmc_lsp.core.graph import Graph
from mtmc_lsp.core.workload import Capture


@dataclass(frozen=True)
class EarlyGradients:
    """The names and the launcher of a target whose forward pass computes the gradients."""

    base: str
    qualname: str
    graph: Graph
    launcher: Launcher
    is_traced: bool
    """Whether torch.compile calls an operator instead of the launcher."""
    capture: Capture

    @property
    def original(self) -> OriginalCode | None:
        """How to call the original code."""
        saved = list(self.launcher.input_names.values())
        return original_code(self.capture, class_name(self.base), self.graph, self.launcher, saved)

    @property
    def operator(self) -> PassOperator:
        """The launcher as an operator."""
        return PassOperator(self.launcher, f"{self.base}_forward")

    def source(self) -> str:
        """The class, and the function ``BASE_launch`` that applies it."""
        parameters, backward, original = self.launcher.parameters, self.graph.backward, self.original
        assert backward is not None
        trained = [self.launcher.input_names[name] for name in backward.gradients]
        requires = " or ".join(f"{name}.requires_grad" for name in trained)
        requires = f"({requires})" if len(trained) > 1 else requires
        arguments = [*parameters, *passed_original(original)]
        function = FunctionClass(
            self.base,
            self.qualname,
            docstring=[
                f'"""``{self.qualname}`` with Triton kernels.',
                "",
                "The forward pass computes the gradients for an upstream gradient of 1, so that each logit is computed once.",
                "The backward pass multiplies them by the upstream gradient.",
                '"""',
            ],
            parameters=parameters,
            tangents=tangent_parameters(backward, len(self.graph.forward_outputs)),
            forward=self._forward(),
            backward=self._backward(),
            launch=[
                f"if torch.is_grad_enabled() and {requires}:",
                f"    return {call_text(f'{class_name(self.base)}.apply', arguments, '        ')}",
                f"return {call_text(f'{self.base}_forward', [*parameters, f'{FLAG}=False'], '    ')}",
            ],
            original=original,
        )
        return function.source()

    def _forward(self) -> list[str]:
        launcher, count = self.launcher, len(self.graph.forward_outputs)
        backward = self.graph.backward
        assert backward is not None
        names = [launcher.variables[ref] for ref in self.graph.forward_outputs]
        function = f"{self.base}_pass" if self.is_traced else self.operator.function
        lines = [self.operator.choice(function)] if self.is_traced else []
        call = call_text(function, launcher.parameters, "        ")
        lines.append(f"{', '.join(names)}, *ctx.gradients = {call}")
        lines.append(call_text("ctx.save_for_backward", list(launcher.input_names.values()), "        "))
        if launcher.number_names:
            numbers = list(launcher.number_names.values())
            lines.append(f"ctx.numbers = ({', '.join(numbers)}{',' if len(numbers) == 1 else ''})")
        constant = [names[i] for i in range(count) if i not in backward.results]
        if constant:
            lines.append(f"ctx.mark_non_differentiable({', '.join(constant)})")
        return [*lines, f"return {', '.join(names)}"]

    def _backward(self) -> list[str]:
        backward, launcher = self.graph.backward, self.launcher
        assert backward is not None
        count = len(self.graph.forward_outputs)
        numbers = ", *ctx.numbers" if launcher.number_names else ""
        gradients = {name: f"grad_{name}" for name in backward.gradients}
        returned = [gradients.get(item.name, "None") for item in self.graph.inputs]
        returned += ["None"] * (len(launcher.number_names) + (self.original is not None))
        names = ", ".join(gradients.values())
        comma = "," if len(gradients) == 1 else ""
        return [
            "gradients, ctx.gradients = ctx.gradients, None",
            "if gradients is None:",
            "    # A further backward pass of the same call: the first one has given the gradients away.",
            f"    gradients = {self.base}_forward(*ctx.saved_tensors{numbers})[{count}:]",
            f"{names}{comma} = [gradient.mul_({backward.tangents[0].name}) for gradient in gradients]",
            f"return {', '.join(returned)}",
        ]
