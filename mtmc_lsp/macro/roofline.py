"""The roofline planner: of all legal actions, the one with the most predicted time to save."""

from __future__ import annotations

from collections.abc import Mapping

from mtmc_lsp.core.action import ActionKind, Expected, MacroAction
from mtmc_lsp.core.jsonable import from_json
from mtmc_lsp.core.protocols import State
from mtmc_lsp.core.run import StepStatus
from mtmc_lsp.macro.configs import SPLIT, variants
from mtmc_lsp.macro.cost import kernel_cost
from mtmc_lsp.macro.fusion import Fusion, FusionSearch, has_fp32_product
from mtmc_lsp.macro.lower import lower
from mtmc_lsp.macro.prims import Program
from mtmc_lsp.macro.regions import Region, RegionKind, analyse, lines_of
from mtmc_lsp.macro.schedule import KernelPlan, Schedule

PRECISIONS = (SPLIT, "ieee")
"""Modes for fp32 products, fastest first."""


class RooflinePlanner:
    """Ranks legal actions by predicted time saved: bytes and operations before and after, over the device's ceilings."""

    def __init__(self, *, strict: bool = False) -> None:
        """``strict`` forbids actions that change rounding."""
        self._strict = strict

    def propose(self, state: State) -> MacroAction | None:
        """The best action that was not tried before, or None."""
        return next(iter(self.ranked(state)), None)

    def ranked(self, state: State) -> list[MacroAction]:
        """Every legal action worth trying, best first."""
        program = lower(state.capture.graph)
        schedule = from_json(Schedule, state.candidate.schedule)
        tried = {step.action.key for step in state.history}
        actions = [*self._fusions(program, schedule, state), *self._tunings(program, schedule, state)]
        fresh = [action for action in actions if action.key not in tried]
        return sorted(fresh, key=lambda action: (-action.expected.saved_us, action.key))

    def _fusions(self, program: Program, schedule: Schedule, state: State) -> list[MacroAction]:
        refused: dict[str, set[frozenset[str]]] = {mode: set() for mode in PRECISIONS}
        for step in state.history:
            config = step.action.params.get("config")
            if step.status is not StepStatus.ACCEPTED and step.action.kind in (ActionKind.FUSE, ActionKind.TENSOR_CORE):
                mode = config.get("precision") if isinstance(config, Mapping) else None
                for name in [mode] if mode in refused else PRECISIONS:
                    refused[str(name)].add(frozenset(step.action.region))
        actions: list[MacroAction] = []
        for mode in PRECISIONS[1:] if self._strict else PRECISIONS:
            search = FusionSearch(program, schedule, state.device, mode, refused[mode])
            taken = {name for action in actions for name in action.region}
            actions += [self._fuse_action(program, f) for f in search.best() if not f.nodes & taken]
        return actions

    def _fuse_action(self, program: Program, fusion: Fusion) -> MacroAction:
        region, lines = fusion.region, lines_of(program, fusion.region.nodes)
        split = has_fp32_product(program, region) and fusion.config.get("precision") == SPLIT
        kind = ActionKind.TENSOR_CORE if split else ActionKind.FUSE
        saved = fusion.before.bytes - fusion.after.bytes
        if split:
            why = (
                "Each fp32 operand is scaled and split into a high and a low float16 half, and three tensor-core products of "
                "halves are summed in fp32: several times the rate of fp32 units at a few times their error"
            )
        elif len(region.nodes) == 1:
            why = "One Triton kernel reads each input once"
        else:
            why = (
                f"{len(region.nodes)} operations run as one kernel, so {_megabytes(saved)} less "
                f"{'moves' if saved >= 0 else 'stays'} through memory"
            )
        names = _operation_names(program, region)
        return MacroAction(
            kind=kind,
            region=region.nodes,
            lines=lines,
            params={"config": fusion.config},
            rationale=f"{why}.",
            expected=Expected(
                saved_us=fusion.saved_us,
                bytes_before=fusion.before.bytes,
                bytes_after=fusion.after.bytes,
                flops_before=fusion.before.flops,
                flops_after=fusion.after.flops,
            ),
            text=f"{'run on tensor cores' if split else 'fuse'} {names} in {_lines_text(lines)}",
            changes_rounding=split,
        )

    def _tunings(self, program: Program, schedule: Schedule, state: State) -> list[MacroAction]:
        """Measured choice among configurations; only where steps are timed."""
        if not state.measured:
            return []
        actions = []
        for plan in schedule.kernels:
            region = analyse(program, plan.nodes)
            choices = variants(program, region, plan.config)
            if choices:
                actions.append(self._autotune(program, state, plan, region, choices))
        return actions

    def _autotune(
        self,
        program: Program,
        state: State,
        plan: KernelPlan,
        region: Region,
        choices: list[dict[str, int | str | bool]],
    ) -> MacroAction:
        cost = kernel_cost(program, region, plan.config, state.device)
        lines = lines_of(program, region.nodes)
        return MacroAction(
            kind=ActionKind.AUTOTUNE,
            region=region.nodes,
            lines=lines,
            params={"variants": [{"config": choice} for choice in choices]},
            rationale=f"{len(choices)} tile shapes, warp counts and stages are measured on this GPU; the fastest is kept.",
            # A well-chosen first configuration leaves about a tenth to gain.
            expected=Expected(saved_us=0.1 * cost.us, bytes_before=cost.bytes, bytes_after=cost.bytes),
            text=f"tune the {_kind_word(region.kind)} kernel of {_lines_text(lines)}",
        )


def _operation_names(program: Program, region: Region) -> str:
    names = list(dict.fromkeys(program.graph.node(n).op.split(".")[1].strip("_") for n in region.nodes))
    shown = names if len(names) <= 5 else [*names[:2], "...", *names[-2:]]
    return shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} and {shown[-1]}"


def _lines_text(lines: tuple[int, int]) -> str:
    return f"line {lines[0]}" if lines[0] == lines[1] else f"lines {lines[0]} to {lines[1]}"


def _megabytes(size: float) -> str:
    return f"{abs(size) / 1e6:.1f} MB" if abs(size) >= 1e5 else f"{abs(size) / 1e3:.1f} kB"


def _kind_word(kind: RegionKind) -> str:
    return {RegionKind.MAP: "elementwise", RegionKind.REDUCE: "reduction", RegionKind.MATMUL: "product"}.get(
        kind,
        kind.value,
    )
