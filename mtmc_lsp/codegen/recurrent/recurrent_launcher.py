"""Launcher code of recurrent layers: preparation of the buffers, and the loop over launches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mtmc_lsp.codegen.kernel.kernel import Kernel, kernel_source
from mtmc_lsp.codegen.kernel.snippets import LINE, blocks_text, call_text, filled
from mtmc_lsp.codegen.module.launchers.launcher import Launcher
from mtmc_lsp.codegen.recurrent.recurrent_kernel import RecurrentKernel
from mtmc_lsp.core.dtypes import POINTER_TYPES
from mtmc_lsp.core.graph import Ref, TensorType
from mtmc_lsp.core.protocols import CannotCode
from mtmc_lsp.core.run import KernelLaunch
from mtmc_lsp.ir.primitives import KernelIR
from mtmc_lsp.ir.recurrence import recurrence_in, recurrence_of, steps_and_batch
from mtmc_lsp.ir.regions import Region
from mtmc_lsp.schedule.configs import RecurrentConfig
from mtmc_lsp.schedule.recurrent_configs import units_of

LINEAR = "torch.nn.functional.linear"
WEIGHTS = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
"""Weight tensors per layer and direction, in PyTorch's order."""
LAUNCHER_VARIABLES = ("gates", "hidden", "memory", "sequence", "weights", *WEIGHTS, "layer", "step", "diagonal")
"""Launcher variables."""


class RecurrentSteps:
    """Writes the kernel of recurrent layers, and its launches."""

    def __init__(self, ir: KernelIR, region: Region, config: RecurrentConfig) -> None:
        """Analyse the region."""
        self.ir = ir
        self.node = ir.graph.node(region.nodes[0])
        self.prim = recurrence_in(ir, region)
        self.form = recurrence_of(self.prim)
        self.used_outputs = {ref.index for ref in region.outputs}
        self.text = RecurrentKernel(self.form, self.prim.dtype, config, gives_sequence=0 in self.used_outputs)
        self.config = config

    # Kernel ------------------------------------------------------------------------------------------------------

    def kernel(self, name: str, docstring: str) -> Kernel:
        """The kernel for the launches that :meth:`launch` emits."""
        constexprs = self.text.constexprs()
        header = [*self.text.pointers(), *self._numbers(), *(f"{n}: tl.constexpr" for n in constexprs)]
        return Kernel(
            name=name,
            source=kernel_source(name, header, docstring, self.text.body(), (self._step,)),
            tensors=(),
            outputs=(),
            sizes=(),
            constexprs=constexprs,
            grid=(),
            grid_sizes={},
            num_warps=self.config.warps,
            num_stages=self.config.stages,
        )

    def _numbers(self) -> list[str]:
        """Names of the integer parameters, in order."""
        ends = self.text.has_diagonals or self.form.directions == 2
        return [self._step, *(["n_steps"] if ends else []), "n_batch", "step_stride", "batch_stride"]

    @property
    def _step(self) -> str:
        return "diagonal" if self.text.has_diagonals else "step"

    # Launches ----------------------------------------------------------------------------------------------------

    def launch(self, launcher: Launcher, kernel: Kernel) -> None:
        """Emit the loop of launches, and register its results."""
        self._check_layout()
        missing = [name for name in self.prim.inputs if name not in launcher.holders]
        if missing:
            raise CannotCode(f"the input {self.ir.prims[missing[0]].origin} of the recurrent layers is not in memory")
        variables = [launcher.holders[name] for name in self.prim.inputs]
        self.names = {name: launcher.names.unique(name) for name in LAUNCHER_VARIABLES}
        self.steps, self.batch = (launcher.size(size) for size in steps_and_batch(self.ir, self.prim))
        sequence = f"{variables[0]}.transpose(0, 1)" if self.form.batch_first else variables[0]
        states = variables[1 : 1 + self.form.states]
        weights = [
            [launcher.holders[name] for name in self.form.weights(self.prim, number)]
            for number in range(self.form.layers * self.form.directions)
        ]
        write = self._unidirectional if self.form.directions == 1 else self._bidirectional
        launcher.lines += write(kernel, sequence, states, weights)
        transposed = ".transpose(0, 1)" if self.form.batch_first else ""
        final_slot = f"{_atom(self.steps)} % 2"
        final_state = f"[{final_slot}]" if self.form.directions == 1 else f"[:, {final_slot}].flatten(0, 1)"
        results = (
            f"{self.names['sequence']}{transposed}",
            f"{self.names['hidden']}{final_state}",
            f"{self.names['memory']}{final_state}",
        )
        for index in sorted(self.used_outputs):
            launcher.define(Ref(self.node.name, index), results[index])
        launcher.launches.append(self._signature(kernel))

    def _check_layout(self) -> None:
        """Check that the sequence layout has steps outermost, independent of its shape's dimension order.

        Raises:
            CannotCode: the graph expects another layout of a result.
        """
        for index in self.used_outputs:
            kind = self.node.outputs[index]
            is_turned = index == 0 and self.form.batch_first
            order = (1, 0, 2) if is_turned else (0, 1, 2)
            shape = tuple(kind.shape[dim] for dim in order)
            if not TensorType(shape, kind.dtype, tuple(kind.stride[dim] for dim in order)).is_contiguous:
                raise CannotCode(
                    f"{self.node.name}: recurrent kernels support only the default layout of results; leave it to PyTorch"
                )

    def _unidirectional(
        self, kernel: Kernel, sequence: str, states: Sequence[str], weights: Sequence[Sequence[str]]
    ) -> list[str]:
        """Statements for unidirectional layers: one loop over the diagonals of layer and step."""
        names, form = self.names, self.form
        tensors = {"gates_ptr": names["gates"], "hidden_ptr": names["hidden"], "memory_ptr": names["memory"]}
        lines = [f"{names['gates']} = {LINEAR}({sequence}, {weights[0][0]})"]
        for i, name in enumerate(WEIGHTS[: len(weights[0])]):
            # The first layer's input weights are not needed here: its input term is computed in advance.
            per_layer = [layer_weights[i] for layer_weights in weights[1 if i == 0 else 0 :]]
            tensors[f"{name}_ptr"] = per_layer[0] if len(per_layer) == 1 else names[name]
            if len(per_layer) > 1:
                lines += _list_call(names[name], "torch.stack", per_layer)
        lines += self._states(states, f"2, {form.layers}", "0", "")
        if self.text.writes_sequence:
            lines.append(self._sequence(states[0]))
            tensors["steps_ptr"] = names["sequence"]
        count = self.steps if form.layers == 1 else f"{self.steps} + {form.layers - 1}"
        loop = f"for {names[self._step]} in range({count}):"
        return [*lines, loop, *self._call(kernel, tensors, "    ")]

    def _bidirectional(
        self, kernel: Kernel, sequence: str, states: Sequence[str], weights: Sequence[Sequence[str]]
    ) -> list[str]:
        """Statements for bidirectional layers: one layer after another, each with a loop over steps of both directions."""
        names, form = self.names, self.form
        tensors = {"gates_ptr": names["gates"], "steps_ptr": names["sequence"]}
        tensors |= {f"{name}_ptr": f"{names[name]}[{names['layer']}]" for name in ("hidden", "memory")}
        lines = [f"{names['sequence']} = {sequence}"]
        lines += self._states(states, f"{form.layers}, 2, 2", ":, 0", f".unflatten(0, ({form.layers}, 2))")
        rows = []
        inner = [f"{names['gates']} = {LINEAR}({names['sequence']}, torch.cat({names['weight_ih']}))"]
        layer_variables = [names[name] for name in WEIGHTS[: len(weights[0])]]
        for i, name in enumerate(layer_variables):
            tensors[f"{WEIGHTS[i]}_ptr"] = name
            if i:
                inner.append(f"{name} = torch.stack({name})")
        for layer in range(form.layers):
            pair = weights[2 * layer : 2 * layer + 2]
            rows.append(f"({', '.join(f'({a}, {b})' for a, b in zip(*pair, strict=True))})")
        lines += [f"{names['weights']} = (", *filled(rows, "    "), ")"]
        lines.append(f"for {names['layer']}, ({', '.join(layer_variables)}) in enumerate({names['weights']}):")
        inner += [self._sequence(states[0]), f"for {names['step']} in range({self.steps}):"]
        inner += self._call(kernel, tensors, "    ", call_indent="    ")
        return [*lines, *(f"    {line}" for line in inner)]

    def _states(self, states: Sequence[str], shape: str, first: str, view: str) -> list[str]:
        """Allocate double buffers for each state and fill the first with the initial state."""
        lines: list[str] = []
        for name, state in zip(("hidden", "memory"), states, strict=False):
            variable = self.names[name]
            lines.append(f"{variable} = {states[0]}.new_empty(({shape}, {self.batch}, {self.form.hidden}))")
            lines.append(f"{variable}[{first}] = {state}{view}")
        return lines

    def _sequence(self, template: str) -> str:
        width = self.form.hidden * self.form.directions
        return f"{self.names['sequence']} = {template}.new_empty(({self.steps}, {self.batch}, {width}))"

    def _call(self, kernel: Kernel, tensors: Mapping[str, str], indent: str, call_indent: str = "") -> list[str]:
        """The launch statement."""
        gates = self.names["gates"]
        numbers = {
            self._step: self.names[self._step],
            "n_steps": self.steps,
            "n_batch": self.batch,
            "step_stride": f"{gates}.stride(0)",
            "batch_stride": f"{gates}.stride(1)",
        }
        arguments = [tensors[name] for name in self.text.pointers()] + [numbers[name] for name in self._numbers()]
        arguments += [f"{name}={value}" for name, value in kernel.constexprs.items()]
        arguments += [f"num_warps={kernel.num_warps}", f"num_stages={kernel.num_stages}"]
        blocks = -(-self.form.hidden // units_of(self.form, self.config))
        grid = f"{blocks}, {self.form.parallel_layers}, {blocks_text(self.batch, self.config.block_m)}"
        return [
            f"{indent}{line}" for line in call_text(f"{kernel.name}[({grid})]", arguments, call_indent).splitlines()
        ]

    def _signature(self, kernel: Kernel) -> KernelLaunch:
        """The compilation signature of the launches."""
        pointer = POINTER_TYPES[self.prim.dtype]
        signature = dict.fromkeys(self.text.pointers(), pointer)
        numbers = dict.fromkeys(self._numbers(), "i32")
        width = self.form.gates * self.form.hidden
        divisible = [*signature, *(name for name in numbers if name.endswith("_stride") and width % 16 == 0)]
        return KernelLaunch(
            kernel.name,
            {**signature, **numbers},
            dict(kernel.constexprs),
            kernel.num_warps,
            kernel.num_stages,
            tuple(divisible),
        )


def _list_call(name: str, function: str, items: Sequence[str]) -> list[str]:
    """``name = function([items])``, on several lines if it is too long."""
    line = f"{name} = {function}([{', '.join(items)}])"
    return [line] if len(line) <= LINE else [f"{name} = {function}([", *filled(items, "    "), "])"]


def _atom(text: str) -> str:
    return text if text.isidentifier() or text.isdigit() else f"({text})"
