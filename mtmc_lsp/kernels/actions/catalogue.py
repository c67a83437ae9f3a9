"""All optimisations of a kernel's source, and the order in which they are tried."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from mtmc_lsp.kernels.actions.base import Facts, Proposal, SourceAction
from mtmc_lsp.kernels.actions.coalesce import swapped_index
from mtmc_lsp.kernels.actions.descriptors.edits import descriptors
from mtmc_lsp.kernels.actions.empty import empty_results
from mtmc_lsp.kernels.actions.even import even_loops, even_offsets
from mtmc_lsp.kernels.actions.fusion.launches import fuse_launches
from mtmc_lsp.kernels.actions.fusion.neighbours import fuse_following, fuse_preceding
from mtmc_lsp.kernels.actions.hoist import equal_loads, hoist
from mtmc_lsp.kernels.actions.launch.direct import direct_launch, together, tuned_and_direct
from mtmc_lsp.kernels.actions.one_pass import online_softmax
from mtmc_lsp.kernels.actions.persist import persist
from mtmc_lsp.kernels.actions.products import split_float32, stored_operands
from mtmc_lsp.kernels.actions.schedule import cache_policies, grouped_order, pipeline
from mtmc_lsp.kernels.actions.split_k import split_k
from mtmc_lsp.kernels.actions.tuning.autotune import autotune
from mtmc_lsp.kernels.actions.variance import one_pass_variance

ACTIONS: tuple[SourceAction, ...] = (
    fuse_following,
    fuse_preceding,
    fuse_launches,
    empty_results,
    direct_launch,
    online_softmax,
    one_pass_variance,
    swapped_index,
    stored_operands,
    split_float32,
    hoist,
    equal_loads,
    even_offsets,
    even_loops,
    grouped_order,
    split_k,
    persist,
    descriptors,
    cache_policies,
    pipeline,
    autotune,
)
LAST = "autotune"
"""It tunes the kernel that the other edits leave."""

CHANGE_ROUNDING = frozenset({"fuse", "one-pass", "split-k"})
"""Kinds that round otherwise than the author's code: they are left out with ``precision = "strict"``."""

WHEN_IT_PAYS = {
    "fuse": "Elementwise PyTorch operations on a tensor that only one launch reads or writes, and results that only the next "
    "launch reads.",
    "empty": "Results of ``torch.zeros`` that the launch writes completely: filling them moves as many bytes as storing them.",
    "direct-launch": "Kernels that take less time than their launch on the host.",
    "one-pass": "A softmax that reads its row for the maximum and again for the sum, and a variance that reads it for the mean.",
    "precision": "Products of 16-bit operands that the kernel converts to float32, and exact float32 products on a GPU with "
    "fast TF32.",
    "hoist": "Loads in loops whose pointers do not change, and the same load written twice.",
    "vectorize": "Offsets with a modulo, as in Triton's own matrix product: the compiler cannot prove that they are contiguous.",
    "even-blocks": "Loops over a length that blocks usually divide.",
    "coalesce": "A flat index that is divided into rows and columns so that neighbouring lanes are rows apart.",
    "grouped-order": "Products whose operands are larger than the L2 cache.",
    "split-k": "Products with fewer tiles than the GPU has multiprocessors, and a long inner dimension.",
    "persist": "Kernels with many more programs than the GPU runs at a time.",
    "descriptors": "Loops that read tiles by block pointers, on a GPU that copies tiles by descriptors.",
    "cache": "Kernels that read one tensor many times and stream another one.",
    "pipeline": "Loops that wait for loads, without a product that Triton pipelines by itself.",
    "autotune": "Fixed block sizes, warps and stages that were never measured on the GPU.",
}


def excluded_kinds(excluded: Collection[str], only: Collection[str], *, is_strict: bool) -> frozenset[str]:
    """The kinds of edits that a run does not propose.

    Args:
        excluded: those of the settings.
        only: the kinds that the user asks for; empty for all.
        is_strict: whether rounding stays as it is.
    """
    others = frozenset(WHEN_IT_PAYS) - frozenset(only) if only else frozenset()
    return others | frozenset(excluded) | (CHANGE_ROUNDING if is_strict else frozenset())


def proposals(facts: Sequence[Facts], *, has_gpu: bool, tries_all: bool = False) -> list[Proposal]:
    """The legal edits of several kernels, those with the largest estimate first.

    Args:
        has_gpu: whether times are measured; without it, edits that only a measurement can judge are left out.
        tries_all: whether they are kept all the same.
    """
    each_alone = [item for each in facts for action in ACTIONS for item in action(each)]
    found = together(each_alone) + (tuned_and_direct(each_alone) if has_gpu else [])
    kept = [item for item in found if has_gpu or tries_all or not item.needs_timing]
    return sorted(kept, key=lambda item: (item.name == LAST, -item.saved_us))
