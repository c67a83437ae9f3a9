"""Which inputs a pair of callables is verified on: those of a step, and more, for nothing is known of the candidate."""

from __future__ import annotations

from dataclasses import replace

from mtmc_lsp.core.dtypes import is_float
from mtmc_lsp.core.graph import MATRIX_PRODUCTS, InputKind
from mtmc_lsp.core.workload import Capture
from mtmc_lsp.verify.cases import (
    AUTOGRAD,
    INTERPRETER_PRODUCT,
    VALUES,
    Case,
    product_work,
    reduced_sizes,
    verification_cases,
)

EXACT_OPERATIONS = frozenset(MATRIX_PRODUCTS) | frozenset(
    "convolution conv1d conv2d conv3d add sub rsub mul neg abs relu clamp maximum minimum where eq ne lt le gt ge sum amax "
    "amin max min cumsum view reshape _unsafe_view permute transpose t unsqueeze squeeze expand clone contiguous cat slice "
    "select flatten alias detach copy stack flip".split()
)
"""ATen operations that keep whole numbers whole."""
FULL_PRODUCT = 20 * INTERPRETER_PRODUCT
"""Multiply-adds that one interpreted run at the parameters' full sizes may have."""
PART = 0.2
"""Of what the interpreter runs for a step of ours in one case: there are more cases, and the user waits for them."""
VALUE_CASES = ("denormal", "infinite", "nan")


def is_exact(capture: Capture) -> bool:
    """Whether the reference's arithmetic is exact on small whole numbers."""
    return all(node.op.split(".")[1] in EXACT_OPERATIONS for node in capture.graph.nodes)


def least_that_runs(capture: Capture) -> int:
    """Down to which the sizes of arguments must be made smaller for a run at the parameters' full sizes; 0 where none will do."""
    for least in (4, 2, 1):
        if product_work(capture.graph, reduced_sizes(capture, least=least)) <= FULL_PRODUCT:
            return least
    return 0


def pair_cases(
    capture: Capture, *, interpreted: bool, seed: int, few: bool = False, empty: bool = True
) -> tuple[Case, ...]:
    """The cases of a pair; the first is the workload, the last are unusual values and layouts.

    With ``few``, each takes long: the least sizes, and what tells most. Calls outside the workload's own dtype and
    device are left out: a candidate of somebody else has no guard to test. Without ``empty`` every size is at least 1.
    """
    if few:
        least = reduced_sizes(capture, least=least_that_runs(capture))
        kinds = ["normal", "mixed", *(["integers"] if is_exact(capture) else [])]
        return tuple(Case(least, kind, seed + i) for i, kind in enumerate(kinds))
    usual = verification_cases(capture, interpreted=interpreted, seed=seed, part=PART)
    if interpreted:
        # The workload itself is as large as can be: a guard may refuse the least.
        usual = (replace(usual[0], sizes=reduced_sizes(capture)), *usual[1:])
    usual = tuple(case for case in usual if empty or all(case.sizes.values()))
    cases = [case for case in usual if case.kind == VALUES]
    asks_gradients = any(a.tensor is not None and a.tensor.requires_grad for a in capture.workload.arguments)
    if asks_gradients:
        cases += [case for case in usual if case.kind == AUTOGRAD]
    arguments = [item for item in capture.graph.inputs if item.kind is InputKind.ARGUMENT]
    # Values are tried on the sizes that constants are tried on: small where sizes can be chosen.
    model = next((case for case in cases if case.distribution == "constant"), cases[0])
    seeds = iter(range(seed + len(usual) + 1, seed + len(usual) + 100))
    # The same sizes again: whoever remembers results by address or identity meets old tensors with new contents.
    extra = [replace(model if interpreted else cases[0], distribution="normal")]
    if any(is_float(item.type.dtype) for item in arguments):
        extra += [replace(model, distribution=name) for name in VALUE_CASES]
        if is_exact(capture):
            extra += [replace(model, distribution=name) for name in ("integers", "bits")]
    extra.append(replace(model, distribution="normal", layout="strided"))
    if len({(item.type.shape, item.type.dtype) for item in arguments}) < len(arguments):
        extra.append(replace(model, distribution="normal", layout="aliased"))
    return (*cases, *(replace(case, seed=next(seeds)) for case in extra))
