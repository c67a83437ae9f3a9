"""Writes how a backward pass that is itself differentiated gets its gradients: from the original code, by autograd."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from mtmc_lsp.capture.accesses import dotted, quoted
from mtmc_lsp.codegen.kernel.snippets import call_text, literal, tuple_text
from mtmc_lsp.codegen.module.launchers.launcher import Launcher
from mtmc_lsp.core.graph import Graph, InputKind
from mtmc_lsp.core.workload import Capture, CapturedArgument, ContainerKind, TargetKind, is_torch_name

ORIGINAL = "original"
"""The parameter for the original function, or the module of a method."""
IS_DIFFERENTIATED, REFERENCES, REFERENCED, GRADIENTS = (
    "_is_differentiated",
    "_weak_references",
    "_referenced",
    "_original_gradients",
)
HELPERS = {
    IS_DIFFERENTIATED: f'''def {IS_DIFFERENTIATED}(tangents) -> bool:
    """Whether autograd or a transform differentiates or maps a backward pass, which kernels cannot serve."""
    return not torch.compiler.is_compiling() and (
        torch.is_grad_enabled()
        or torch._C._are_functorch_transforms_active()
        or torch.autograd.forward_ad._current_level >= 0
        or any([t is not None and torch._C._functorch.is_legacy_batchedtensor(t) for t in tangents])
    )
''',
    REFERENCES: f'''from weakref import ref as _weak_reference  # noqa: E402


def {REFERENCES}(*tensors):
    """References that keep no tensor alive, each with the tensor's version."""
    return [(_weak_reference(t), t._version) for t in tensors]
''',
    REFERENCED: f'''def {REFERENCED}(references, target):
    """The tensors of weak references, as they were."""
    tensors = [reference() for reference, _ in references]
    if any([t is None or t._version != version for t, (_, version) in zip(tensors, references)]):
        raise RuntimeError(
            f"{{target}}: second derivatives (create_graph=True) need an input that was freed or changed after the call; "
            "keep it, or leave grad= out of the directive"
        )
    return tensors
''',
    GRADIENTS: f'''def {GRADIENTS}(run, inputs, tangents, autocast=None):
    """Gradients by the original code, so that they can be differentiated again. Guards leave the calls in it to that code."""
    from torch.utils._python_dispatch import BaseTorchDispatchMode
    from torch.utils._pytree import tree_leaves

    create_graph = torch.is_grad_enabled()
    cast = torch.autocast(inputs[0].device.type, autocast, enabled=autocast is not None)
    with torch.enable_grad(), BaseTorchDispatchMode():
        inputs = [x.view_as(x) if x.requires_grad else x for x in inputs]
        with cast:
            results = [item for item in tree_leaves(run(*inputs)) if isinstance(item, torch.Tensor)]
        outputs, gradients = zip(*[(r, t) for r, t in zip(results, tangents) if r.requires_grad])
        trained = [x for x in inputs if x.requires_grad]
        found = iter(torch.autograd.grad(outputs, trained, gradients, create_graph=create_graph, allow_unused=True))
    return [next(found) if x.requires_grad else None for x in inputs]
''',
}
"""Source of each helper, by name."""


@dataclass(frozen=True)
class OriginalCode:
    """The call of a target's original code with the tensors of a forward pass."""

    class_name: str
    qualname: str
    graph: Graph
    """The forward pass; its inputs are those of the autograd function."""
    launcher: Launcher
    call: str
    """Of the original code, as Python over the launcher's variables."""
    access: str
    """The original function, or the module, as Python in the target's body."""
    saved: tuple[str, ...]
    """Variables that the backward pass saves, in order."""

    @property
    def lines_of_forward(self) -> list[str]:
        """Statements that keep what the call needs."""
        unsaved = [name for name in self._inputs if name not in self.saved]
        kept = [ORIGINAL, *([f"{REFERENCES}({', '.join(unsaved)})"] if unsaved else [])]
        kept += self.launcher.number_names.values()
        return [f"if {ORIGINAL} is not None:", f"    ctx.{ORIGINAL} = {', '.join(kept)}"]

    def check(self, tangents: Sequence[str]) -> list[str]:
        """Statements at the beginning of the backward pass."""
        passed = tuple_text(list(tangents))
        return [
            f"if {IS_DIFFERENTIATED}({passed}):",
            f"    return {self.class_name}.{ORIGINAL}_gradients(ctx, {passed})",
        ]

    def method(self) -> list[str]:
        """The method that computes the gradients."""
        inputs, numbers = self._inputs, list(self.launcher.number_names.values())
        unsaved = [name for name in inputs if name not in self.saved]
        kept = [ORIGINAL, *(["references"] if unsaved else []), *numbers]
        lines = [f"{', '.join(kept)} = ctx.{ORIGINAL}"]
        if self.saved:
            saved = [name if name in inputs else "_" for name in self.saved]
            lines.append(f"{', '.join(saved)}{',' * (len(saved) == 1)} = ctx.saved_tensors")
        if unsaved:
            names = ", ".join(unsaved)
            lines.append(f'{names}{"," * (len(unsaved) == 1)} = {REFERENCED}(references, "{self.qualname}")')
        autocast = [f"torch.{self.graph.autocast}"] if self.graph.autocast else []
        passed = ["run", tuple_text(inputs), "tangents", *autocast]
        extra = ", ".join(["None"] * (len(numbers) + 1))
        return [
            "@staticmethod",
            f"def {ORIGINAL}_gradients(ctx, tangents):",
            '    """The gradients by the original code."""',
            *(f"    {line}" for line in lines),
            "",
            f"    def run({', '.join(inputs)}):",
            *(f"        {line}" for line in self._run()),
            "",
            f"    return *{call_text(GRADIENTS, passed, '    ')}, {extra}",
        ]

    def _run(self) -> list[str]:
        if self.access != "self":
            return [f"return {self.call}"]
        names = self.launcher.input_names
        replaced = {
            dotted(item.access): names[item.name]
            for item in self.graph.inputs
            if item.kind in (InputKind.PARAMETER, InputKind.BUFFER)
        }
        items = ", ".join(f"{quoted(path)}: {name}" for path, name in replaced.items())
        if not items:
            return [f"return {self.call}"]
        return [
            f"tensors = {{{items}}}",
            f"with torch.nn.utils.stateless._reparametrize_module({ORIGINAL}, tensors, tie_weights=True):",
            f"    return {self.call}",
        ]

    @property
    def _inputs(self) -> list[str]:
        return [self.launcher.input_names[item.name] for item in self.graph.inputs]


def original_code(
    capture: Capture, class_name: str, graph: Graph, launcher: Launcher, saved: Sequence[str]
) -> OriginalCode | None:
    """How to call the original code; ``None`` if the call cannot be repeated from the tensors of the forward pass.

    Args:
        class_name: of the autograd function.
        graph: the forward pass.
        saved: the launcher's variables that the backward pass saves.
    """
    target = capture.workload.target
    names = launcher.input_names
    numbers = {
        item.access: launcher.number_names[item.name] for item in graph.numbers if item.name in launcher.number_names
    }
    if graph.mutations or capture.uses_random or graph.receiver:
        return None
    try:
        arguments = [_argument(argument, names, numbers) for argument in capture.arguments]
    except KeyError:
        return None
    is_function = target.kind is TargetKind.FUNCTION
    method = "forward" if target.kind is TargetKind.MODULE else target.qualname.rpartition(".")[2]
    function = ORIGINAL if is_function else f"{ORIGINAL}.{method}"
    access = target.qualname if is_function else "self"
    if is_function and access.partition(".")[0] in {argument.name for argument in capture.arguments}:
        return None
    if "<locals>" in access or not access.replace(".", "").isidentifier():
        return None
    call = f"{function}({', '.join(arguments)})"
    return OriginalCode(class_name, target.qualname, graph, launcher, call, access, tuple(saved))


def _argument(argument: CapturedArgument, names: Mapping[str, str], numbers: Mapping[str, str]) -> str:
    """An argument as Python.

    Raises:
        KeyError: it contains a tensor that the forward pass does not get, or an object of the user's class.
    """
    container = argument.container
    value = _value(argument, names, numbers)
    if container is not None and container.kind is ContainerKind.POSITIONAL:
        return f"*{value}"
    if container is not None and container.kind is ContainerKind.KEYWORDS:
        return f"**{value}"
    return f"{argument.name}={value}" if argument.keyword else value


def _value(argument: CapturedArgument, names: Mapping[str, str], numbers: Mapping[str, str]) -> str:
    container = argument.container
    if container is None:
        if argument.input is not None:
            return names[argument.input]
        if is_torch_name(argument.constant):
            return str(argument.constant)
        return numbers.get(argument.name) or literal(argument.constant)
    if container.class_name:
        raise KeyError(container.class_name)
    return container.expression([_value(item, names, numbers) for item in argument.items])


def helpers_in(text: str) -> Collection[str]:
    """Sources of the helpers that a text calls."""
    return [source for name, source in HELPERS.items() if re.search(rf"\b{name}\b", text)]
