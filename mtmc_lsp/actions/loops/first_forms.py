"""The first kernel of a loop, in the form with the shortest predicted time.

A step costs a verification, and for a long loop of the user's most of the budget. So the first step does not write a kernel that
runs one iteration after another if another form is predicted to be faster: :func:`mtmc_lsp.tuning.loop_forms.first_form` chooses
it. The step is of the kind of that form. If it is not accepted, the next step runs one iteration after another. The same holds if
it is accepted, because eager mode is slower still, but takes longer than predicted for one iteration after another.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from mtmc_lsp.actions.base import Situation, expected, lines_of
from mtmc_lsp.actions.loops.chunk_products import ChunkProducts
from mtmc_lsp.actions.loops.parallel_scan import ParallelScan
from mtmc_lsp.actions.titles import kernel_title, with_result
from mtmc_lsp.core.action import ActionKind, MacroAction
from mtmc_lsp.core.json_codec import to_json
from mtmc_lsp.fusion.search import Fusion
from mtmc_lsp.ir.loops.form import working_nodes
from mtmc_lsp.ir.loops.fusion import loop_in
from mtmc_lsp.ir.primitives import KernelIR
from mtmc_lsp.ir.regions import Region
from mtmc_lsp.schedule.configs import LoopConfig
from mtmc_lsp.schedule.loop_configs import loop_config
from mtmc_lsp.tuning.kernel_cost import kernel_cost
from mtmc_lsp.tuning.loop_forms import LEAST_GAIN, form_of

HANDLERS = {handler.kind: handler for handler in (ParallelScan(), ChunkProducts())}


def one_after_another(situation: Situation, fusion: Fusion) -> Fusion:
    """The fusion with the iterations of its loop one after another; the same if they are, or if it has no loop."""
    ir, region, device = situation.ir, fusion.region, situation.device
    if form_of(fusion.config) is None:
        return fusion
    config = loop_config(loop_in(ir, region), device)
    return replace(fusion, config=config, after=kernel_cost(ir, region, config, device))


def in_first_forms(
    situation: Situation, action: MacroAction, fusions: Sequence[Fusion], slower: Sequence[Fusion]
) -> MacroAction:
    """The action for fusions. Loops in another form than one iteration after another set its kind, title and reason.

    Args:
        slower: the fusions with iterations one after another.
    """
    before, after = (sum(fusion.after.us for fusion in each) for each in (slower, fusions))
    why = f"One iteration after another in one kernel is predicted to take {before:.0f} us, this {after:.0f} us."
    kinds = {form_of(fusion.config) for fusion in fusions}
    kind = kinds.pop()
    if kinds or kind is None:
        return replace(action, rationale=f"{action.rationale} Loops compute several iterations at once. {why}")
    handler, first = HANDLERS[kind], fusions[0]
    assert isinstance(first.config, LoopConfig)
    text = with_result(situation.ir, handler.title("the loop"), first.region.nodes)
    reason = handler.reason(loop_in(situation.ir, first.region), first.config, situation.device)
    several = len(fusions) > 1
    return replace(
        action,
        kind=kind,
        text=f"{text} at {len(fusions)} places" if several else text,
        rationale=(
            f"{f'The same code occurs at {len(fusions)} places. ' if several else ''}{eager_loop(situation.ir, first.region)}. "
            f"In one kernel, {reason} {why}"
        ),
    )


def slower_than_predicted(situation: Situation) -> Iterator[MacroAction]:
    """Loops whose kernel takes longer than predicted for one iteration after another: that is tried as the next step."""
    ir, device, timing = situation.ir, situation.device, situation.timing
    if timing is None:
        return
    # The host's time of the launches says nothing about the form.
    measured_us = timing.graph_us or timing.median_us
    for plan, region in situation.lone_kernels():
        if form_of(plan.config) is None:
            continue
        present = kernel_cost(ir, region, plan.config, device)
        config = loop_config(loop_in(ir, region), device)
        after = kernel_cost(ir, region, config, device)
        predicted_us = situation.present.us - present.us + after.us
        if predicted_us > (1 - LEAST_GAIN) * measured_us:
            continue
        yield MacroAction(
            kind=ActionKind.FUSE,
            region=region.nodes,
            lines=lines_of(ir, region.nodes),
            params={"config": to_json(config)},
            rationale=(
                f"The call takes {measured_us:.0f} us, predicted were {situation.present.us:.0f} us. With one iteration after "
                f"another in this kernel, {predicted_us:.0f} us are predicted."
            ),
            expected=replace(expected(present, after), saved_us=measured_us - predicted_us),
            text=f"Run the iterations of {kernel_title(ir, plan.nodes)} one after another",
        )


def eager_loop(ir: KernelIR, region: Region) -> str:
    """How eager mode runs a loop over time steps."""
    loop = next(loop for name in region.nodes if (loop := ir.graph.node(name).loop) is not None)
    steps, calls = loop.count.value(ir.graph.sizes), len(list(working_nodes(loop)))
    return f"Eager mode runs {calls} operations in each of {steps} iterations, one launch after another"
