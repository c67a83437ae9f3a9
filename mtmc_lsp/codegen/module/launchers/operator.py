"""A launcher as an operator of PyTorch, which ``torch.compile`` and ``torch.export`` can trace."""

from __future__ import annotations

from mtmc_lsp.codegen.kernel.snippets import call_text, def_lines, filled
from mtmc_lsp.codegen.module.launchers.values import LauncherValues

MAX_ARGUMENTS = 64
"""Maximum number of arguments of a PyTorch operator."""


def operator_lines(values: LauncherValues, launcher: str, name: str, kernels: list[str]) -> list[str]:
    """The definition of an operator that calls a launcher.

    Args:
        launcher: name of the launcher.
        name: of the operator.
        kernels: names of the kernels, which the operator passes to the launcher.
    """
    results = len(values.ir.graph.outputs)
    inputs = list(values.input_names.values())
    kinds = {item.name: type(item.value).__name__ for item in values.ir.graph.numbers}
    numbers = list(values.number_names.values())
    typed_numbers = [f"{variable}: {kinds[name]}" for name, variable in values.number_names.items()]
    mutated = [values.input_names[mutation.input] for mutation in values.ir.graph.mutations]
    mutates = "{" + ", ".join(repr(m) for m in mutated) + "}" if mutated else "()"
    result_type = "torch.Tensor" if results == 1 else f"tuple[{', '.join(['torch.Tensor'] * results)}]"
    result_type, return_keyword = (result_type, "return ") if results else ("None", "")
    qualified = f'f"{values.namespace}::{name}"'
    wrapped = [f"wrap_triton({kernel})" for kernel in kernels]
    docstring = f'    """``{launcher}`` as an operator for torch.compile, torch.export and CUDA graphs."""'
    if len(inputs) + len(numbers) <= MAX_ARGUMENTS:
        call = f"    {return_keyword}{call_text(launcher, [*inputs, *numbers, *wrapped], '    ')}"
        head = def_lines(name, [*(f"{n}: torch.Tensor" for n in inputs), *typed_numbers], result_type)
        return [f"@triton_op({qualified}, mutates_args={mutates})", *head, docstring, call]
    # Too many arguments for an operator: pass the tensors as lists, with updated tensors in a separate list.
    lists = {values.names.unique("updated"): mutated} if mutated else {}
    lists[values.names.unique("tensors")] = [n for n in inputs if n not in mutated]
    element_of = {n: f"{list_name}[{i}]" for list_name, items in lists.items() for i, n in enumerate(items)}
    passed = [*(element_of[n] for n in inputs), *numbers, *wrapped]
    call = f"    {return_keyword}{call_text(launcher, passed, '    ')}"
    mutates = f"{{{next(iter(lists))!r}}}" if mutated else "()"
    list_statements = [
        line
        for list_name, items in lists.items()
        for line in (f"    {list_name} = [", *filled(items, "        "), "    ]")
    ]
    return [
        f"@triton_op({qualified}, mutates_args={mutates})",
        *def_lines(
            f"{name}_of_list",
            [*(f"{list_name}: list[torch.Tensor]" for list_name in lists), *typed_numbers],
            result_type,
        ),
        docstring,
        call,
        "",
        "",
        *def_lines(name, [*inputs, *numbers]),
        f'    """Call ``{name}_of_list`` with these tensors."""',
        *list_statements,
        f"    {return_keyword}{name}_of_list({', '.join([*lists, *numbers])})",
    ]
