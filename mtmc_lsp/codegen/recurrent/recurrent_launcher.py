"""The launcher's part of recurrent layers: what is made ready before, and the loop over launches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mtmc_lsp.codegen.kernel.kernel import Kernel, kernel_source
from mtmc_lsp.codegen.kernel.snippets import LINE, blocks_text, call_text, filled
from mtmc_lsp.codegen.module.launcher import Launcher
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
"""The tensors of a layer and direction, in PyTorch's order."""
LOCALS = ("gates", "hidden", "memory", "sequence", "weights", *WEIGHTS, "layer", "step", "diagonal")
"""Variables of the launcher."""


class RecurrentSteps:
    """Writes the kernel of recurrent layers and its launches."""

    def __init__(self, ir: KernelIR, region: Region, config: RecurrentConfig) -> None:
        """Take what decides both.

        Args:
            ir: what the layers are part of.
            region: the layers.
            config: the kernel's choices.
        """
        self.ir = ir
        self.node = ir.graph.node(region.nodes[0])
        self.prim = recurrence_in(ir, region)
        self.form = recurrence_of(self.prim)
        self.wanted = {ref.index for ref in region.outputs}
        self.text = RecurrentKernel(self.form, self.prim.dtype, config, gives_sequence=0 in self.wanted)
        self.config = config

    # Kernel ------------------------------------------------------------------------------------------------------

    def kernel(self, name: str, docstring: str) -> Kernel:
        """The kernel, for the launches that :meth:`launch` writes."""
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
        """Parameters that are numbers, in order."""
        ends = self.text.climbs or self.form.directions == 2
        return [self._step, *(["n_steps"] if ends else []), "n_batch", "step_stride", "batch_stride"]

    @property
    def _step(self) -> str:
        return "diagonal" if self.text.climbs else "step"

    # Launches ----------------------------------------------------------------------------------------------------

    def launch(self, launcher: Launcher, kernel: Kernel) -> None:
        """Emit the loop, and say where its results are."""
        self._check_layout()
        missing = [name for name in self.prim.inputs if name not in launcher.holders]
        if missing:
            raise CannotCode(f"{self.ir.prims[missing[0]].origin} is not in memory")
        held = [launcher.holders[name] for name in self.prim.inputs]
        self.names = {name: launcher.names.unique(name) for name in LOCALS}
        self.steps, self.batch = (launcher.size(size) for size in steps_and_batch(self.ir, self.prim))
        sequence = f"{held[0]}.transpose(0, 1)" if self.form.batch_first else held[0]
        states = held[1 : 1 + self.form.states]
        weights = [
            [launcher.holders[name] for name in self.form.weights(self.prim, number)]
            for number in range(self.form.layers * self.form.directions)
        ]
        write = self._one_way if self.form.directions == 1 else self._both_ways
        launcher.lines += write(kernel, sequence, states, weights)
        turned = ".transpose(0, 1)" if self.form.batch_first else ""
        slot = f"{_atom(self.steps)} % 2"
        place = f"[{slot}]" if self.form.directions == 1 else f"[:, {slot}].flatten(0, 1)"
        results = (
            f"{self.names['sequence']}{turned}",
            f"{self.names['hidden']}{place}",
            f"{self.names['memory']}{place}",
        )
        for index in sorted(self.wanted):
            launcher.define(Ref(self.node.name, index), results[index])
        launcher.launches.append(self._signature(kernel))

    def _check_layout(self) -> None:
        """The sequence lies with steps outermost, whatever comes first in its shape.

        Raises:
            CannotCode: a result is to lie otherwise.
        """
        for index in self.wanted:
            kind = self.node.outputs[index]
            is_turned = index == 0 and self.form.batch_first
            order = (1, 0, 2) if is_turned else (0, 1, 2)
            shape = tuple(kind.shape[dim] for dim in order)
            if not TensorType(shape, kind.dtype, tuple(kind.stride[dim] for dim in order)).is_contiguous:
                raise CannotCode("recurrent layers write their results in the order that PyTorch's own have")

    def _one_way(
        self, kernel: Kernel, sequence: str, states: Sequence[str], weights: Sequence[Sequence[str]]
    ) -> list[str]:
        """All layers in one loop over diagonals."""
        names, form = self.names, self.form
        tensors = {"gates_ptr": names["gates"], "hidden_ptr": names["hidden"], "memory_ptr": names["memory"]}
        lines = [f"{names['gates']} = {LINEAR}({sequence}, {weights[0][0]})"]
        for i, name in enumerate(WEIGHTS[: len(weights[0])]):
            # The first layer's input weights have done their part.
            own = [each[i] for each in weights[1 if i == 0 else 0 :]]
            tensors[f"{name}_ptr"] = own[0] if len(own) == 1 else names[name]
            if len(own) > 1:
                lines += _joined(names[name], "torch.stack", own)
        lines += self._states(states, f"2, {form.layers}", "0", "")
        if self.text.writes_sequence:
            lines.append(self._sequence(states[0]))
            tensors["steps_ptr"] = names["sequence"]
        count = self.steps if form.layers == 1 else f"{self.steps} + {form.layers - 1}"
        loop = f"for {names[self._step]} in range({count}):"
        return [*lines, loop, *self._call(kernel, tensors, "    ")]

    def _both_ways(
        self, kernel: Kernel, sequence: str, states: Sequence[str], weights: Sequence[Sequence[str]]
    ) -> list[str]:
        """Layer after layer, each a loop over steps of both directions."""
        names, form = self.names, self.form
        tensors = {"gates_ptr": names["gates"], "steps_ptr": names["sequence"]}
        tensors |= {f"{name}_ptr": f"{names[name]}[{names['layer']}]" for name in ("hidden", "memory")}
        lines = [f"{names['sequence']} = {sequence}"]
        lines += self._states(states, f"{form.layers}, 2, 2", ":, 0", f".unflatten(0, ({form.layers}, 2))")
        rows = []
        inner = [f"{names['gates']} = {LINEAR}({names['sequence']}, torch.cat({names['weight_ih']}))"]
        own = [names[name] for name in WEIGHTS[: len(weights[0])]]
        for i, name in enumerate(own):
            tensors[f"{WEIGHTS[i]}_ptr"] = name
            if i:
                inner.append(f"{name} = torch.stack({name})")
        for layer in range(form.layers):
            pair = weights[2 * layer : 2 * layer + 2]
            rows.append(f"({', '.join(f'({a}, {b})' for a, b in zip(*pair, strict=True))})")
        lines += [f"{names['weights']} = (", *filled(rows, "    "), ")"]
        lines.append(f"for {names['layer']}, ({', '.join(own)}) in enumerate({names['weights']}):")
        inner += [self._sequence(states[0]), f"for {names['step']} in range({self.steps}):"]
        inner += self._call(kernel, tensors, "    ", inside="    ")
        return [*lines, *(f"    {line}" for line in inner)]

    def _states(self, states: Sequence[str], shape: str, first: str, view: str) -> list[str]:
        """The two places of each state, the first of them with what is given."""
        lines: list[str] = []
        for name, state in zip(("hidden", "memory"), states, strict=False):
            own = self.names[name]
            lines.append(f"{own} = {states[0]}.new_empty(({shape}, {self.batch}, {self.form.hidden}))")
            lines.append(f"{own}[{first}] = {state}{view}")
        return lines

    def _sequence(self, like: str) -> str:
        width = self.form.hidden * self.form.directions
        return f"{self.names['sequence']} = {like}.new_empty(({self.steps}, {self.batch}, {width}))"

    def _call(self, kernel: Kernel, tensors: Mapping[str, str], indent: str, inside: str = "") -> list[str]:
        """The launch."""
        gates = self.names["gates"]
        numbers = {
            self._step: self.names[self._step],
            "n_steps": self.steps,
            "n_batch": self.batch,
            "step_stride": f"{gates}.stride(0)",
            "batch_stride": f"{gates}.stride(1)",
        }
        passed = [tensors[name] for name in self.text.pointers()] + [numbers[name] for name in self._numbers()]
        passed += [f"{name}={value}" for name, value in kernel.constexprs.items()]
        passed += [f"num_warps={kernel.num_warps}", f"num_stages={kernel.num_stages}"]
        blocks = -(-self.form.hidden // units_of(self.form, self.config))
        grid = f"{blocks}, {self.form.parallel_layers}, {blocks_text(self.batch, self.config.block_m)}"
        return [f"{indent}{line}" for line in call_text(f"{kernel.name}[({grid})]", passed, inside).splitlines()]

    def _signature(self, kernel: Kernel) -> KernelLaunch:
        """What the launches compile."""
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


def _joined(name: str, function: str, items: Sequence[str]) -> list[str]:
    """``name = function([items])``, over several lines where it is long."""
    line = f"{name} = {function}([{', '.join(items)}])"
    return [line] if len(line) <= LINE else [f"{name} = {function}([", *filled(items, "    "), "])"]


def _atom(text: str) -> str:
    return text if text.isidentifier() or text.isdigit() else f"({text})"
