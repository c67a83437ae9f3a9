"""Which inputs a pair of callables is verified on: those of a step, and more, for nothing is known of the candidate."""

from __future__ import annotations

from dataclasses import replace

from mtmc_lsp.core.dtypes import is_float
from mtmc_lsp.core.graph import InputKind
from mtmc_lsp.core.workload import Capture
from mtmc_lsp.measure.cases import AUTOGRAD, VALUES, Case, verification_cases

EXACT_OPERATIONS = frozenset(
    "mm bmm matmul linear addmm baddbmm add sub rsub mul neg abs relu clamp maximum minimum where eq ne lt le gt ge sum amax "
    "amin max min cumsum view reshape _unsafe_view permute transpose t unsqueeze squeeze expand clone contiguous cat slice "
    "select flatten alias detach copy stack flip".split()
)
"""ATen operations that keep whole numbers whole."""
LINEAR_OPERATIONS = frozenset("mm bmm matmul linear addmm baddbmm convolution conv1d conv2d conv3d".split())
VALUE_CASES = ("denormal", "infinite", "nan")


def is_exact(capture: Capture) -> bool:
    """Whether the reference's arithmetic is exact on small whole numbers."""
    allowed = EXACT_OPERATIONS | LINEAR_OPERATIONS
    return all(node.op.split(".")[1] in allowed for node in capture.graph.nodes)


def pair_cases(capture: Capture, *, interpreted: bool, seed: int) -> tuple[Case, ...]:
    """The cases of a pair; the first is the workload, the last are unusual values and layouts.

    Calls outside the workload's own dtype and device are left out: a candidate of somebody else has no guard to test.
    """
    usual = verification_cases(capture, interpreted=interpreted, seed=seed)
    cases = [case for case in usual if case.kind == VALUES]
    asks_gradients = any(a.tensor is not None and a.tensor.requires_grad for a in capture.workload.arguments)
    if asks_gradients:
        cases += [case for case in usual if case.kind == AUTOGRAD]
    arguments = [item for item in capture.graph.inputs if item.kind is InputKind.ARGUMENT]
    # Values are tried on the sizes that constants are tried on: small where sizes can be chosen.
    model = next((case for case in cases if case.distribution == "constant"), cases[0])
    seeds = iter(range(seed + len(usual) + 1, seed + len(usual) + 100))
    # The same sizes again: whoever remembers results by address or identity meets old tensors with new contents.
    extra = [replace(cases[0], distribution="normal")]
    if any(is_float(item.type.dtype) for item in arguments):
        extra += [replace(model, distribution=name) for name in VALUE_CASES]
        if is_exact(capture):
            extra += [replace(model, distribution=name) for name in ("integers", "bits")]
    extra.append(replace(model, distribution="normal", layout="strided"))
    if len({(item.type.shape, item.type.dtype) for item in arguments}) < len(arguments):
        extra.append(replace(model, distribution="normal", layout="aliased"))
    return (*cases, *(replace(case, seed=next(seeds)) for case in extra))
