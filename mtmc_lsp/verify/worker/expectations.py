"""What is expected of a candidate: the user's own results, and a float64 oracle that says how far they may be off.

Runs in workers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

import torch

from mtmc_lsp.core.dtypes import EPSILON, TOLERANCE
from mtmc_lsp.core.graph import Graph
from mtmc_lsp.core.workload import Capture
from mtmc_lsp.verify.cases import AUTOGRAD, VALUES, Case
from mtmc_lsp.verify.worker.comparison.batched_reads import computable, numbers
from mtmc_lsp.verify.worker.comparison.compare import FACTORS, agreement
from mtmc_lsp.verify.worker.comparison.distances import NOISE, sensitivity
from mtmc_lsp.verify.worker.comparison.ill_conditioned import IllConditioned
from mtmc_lsp.verify.worker.float64_execution import Float64Mode
from mtmc_lsp.verify.worker.inputs import laid_out
from mtmc_lsp.verify.worker.oracle import IndexRecorder, NarrowProducts, SharedRandomMode, draw_seeds
from mtmc_lsp.verify.worker.run_target import copies, outcome, run_case

Place = int | str
"""A result by its number, or a changed input by its name."""

_narrow: dict[str, bool] = {}
"""Under ``seen``: whether the user's own products ran in TF32 on the workload itself; empty before it was run."""
FEW, FEW_DRAWS = 64, 3
"""Elements of a result whose rounding is so much luck that it is asked for more than once."""
MANY_DRAWS, SMALL = 8, 1 << 22
"""How often it is, where the inputs have no more elements than this: of eight draws none is small by luck."""
SUSPECT = 0.02
"""An error of the user's own code beyond the tolerance of all dtypes but float8: is it rounding, or another function?"""
TF32_ERROR = 2.0**-11
"""Of one rounding to TF32's ten bits, as a part."""
TF32_SHARE = 0.25
"""Part of the error of products in TF32 from which on the user's own code is taken to run them; float32 has a thousandth."""


def expected_of(
    module: Any,
    capture: Capture,
    inputs: dict[str, torch.Tensor],
    device: str,
    case: Case,
    *,
    is_first: bool = False,
) -> dict[str, Any]:
    """What the user's own code gives on a case's inputs, and what it gives in float64.

    Returns:
        What :func:`run_case` does; ``oracle`` and ``oracle_after``, the same in float64; by result (or by name, of inputs that
        are changed) ``near``, how far the oracle moves with rounding, and ``doubts``, where the user's own result is far from
        the oracle's; by result ``ties``, what an index of an extreme value was chosen from; ``coarse``, whether float64 did not
        fit into memory.
    """
    kind, seed = case.kind, case.seed

    def random_mode() -> contextlib.AbstractContextManager[Any]:
        # Outside the guard the user's own code runs, with torch's own random numbers.
        if kind != VALUES or not capture.uses_random:
            return contextlib.nullcontext()
        dropouts = sum("dropout" in node.op for node in capture.graph.nodes)
        mode: contextlib.AbstractContextManager[Any] = SharedRandomMode(draw_seeds(seed, dropouts, device))
        return mode

    own = run_case(module, capture, copies(inputs), device, random_mode(), seed, kind, before=inputs)
    # The same code must run where nothing better is said: its own result is all there is to compare with.
    same: dict[str, Any] = {
        "oracle": own["results"],
        "oracle_after": own["after"],
        "near": {},
        "ties": {},
        "doubts": {},
        "coarse": False,
    }
    if kind != VALUES and (kind != AUTOGRAD or capture.uses_random):
        return {**own, **same}
    try:
        return {**own, **same, **_oracle(module, capture, inputs, device, case, is_first, own, random_mode)}
    except torch.OutOfMemoryError:
        if is_first:
            _narrow["seen"] = capture.graph.runs_tf32
        return {**own, **same, "near": _tolerated(capture, own), "coarse": True}


def _oracle(
    module: Any,
    capture: Capture,
    inputs: dict[str, torch.Tensor],
    device: str,
    case: Case,
    is_first: bool,
    ran: dict[str, Any],
    random_mode: Callable[[], contextlib.AbstractContextManager[Any]],
) -> dict[str, Any]:
    """The oracle's results, and how far they move with rounding; ``ran`` is the user's own code on the inputs."""
    kind, seed, own = case.kind, case.seed, ran["results"]
    # Inputs that the code leaves alone in its own precision need not be copied to see whether it does in another.
    untouched: dict[str, torch.Tensor] | None = None if ran["after"] else {}
    recorder, in_wide = IndexRecorder(), Float64Mode(torch.get_default_dtype())
    near = dict[Place, float]()
    changed = {name: inputs[name] for name in ran["after"]}
    wide = {name: in_float64(tensor) for name, tensor in inputs.items()}
    with _float64_default(), recorder, in_wide, in_wide.holding(wide, inputs):
        oracle = run_case(module, capture, wide, device, random_mode(), seed, kind, before=untouched)
    del wide
    if len(oracle["results"]) != len(own):
        # Modules of torch's have shortcuts, which they take where nobody watches the calls, and some return less.
        return {}
    mine, truth = _by_place(ran), _by_place(oracle)

    def moved_run(
        moving: int, mode: contextlib.AbstractContextManager[Any], *, scattered: bool = False, together: bool = False
    ) -> dict[Place, torch.Tensor]:
        # The inputs move otherwise each time; random numbers that the code draws stay what they are.
        moved = _moved(inputs, moving, _finest(outcome(ran)))
        held = in_wide.holding(moved, inputs, scattered=moving if scattered else None, together=together)
        with _float64_default(), in_wide, held, mode:
            there = _by_place(run_case(module, capture, moved, device, random_mode(), seed, kind, before=changed))
        return {i: value for i, value in there.items() if i in mine and i in truth}

    def distances(there: Mapping[Place, torch.Tensor]) -> dict[Place, float]:
        apart = numbers([sensitivity(value, mine[i], truth[i]) for i, value in there.items()])
        return dict(zip(there, apart, strict=True))

    in_tf32 = dict[Place, float]()
    if is_first and capture.graph.runs_tf32:
        # Results may hide it, as a sum of activations far from 0 does.
        asked = "tf32" in capture.graph.observed_convolution_modes.values()
        in_tf32 = distances(moved_run(seed, narrow_products(capture.graph)))
        _narrow["seen"] = asked or _is_narrow(own, oracle["results"], in_tf32)
    # The libraries choose by the size, and by the call: what they compute in full precision on a small one is no more
    # than the user asked for. Of the workload itself the user's own error is. Gradients choose for themselves.
    may = capture.graph.allows_tf32 and kind == AUTOGRAD
    narrow = (may or _narrow.get("seen", False)) and not is_first

    def take_in(there: Mapping[Place, float]) -> None:
        near.update({i: max(near.get(i, 0.0), distance) for i, distance in there.items()})

    mode = narrow_products(capture.graph) if narrow else contextlib.nullcontext()
    for draw in range(FEW_DRAWS if _has_few(outcome(ran)) else 1):
        take_in(distances(moved_run(seed + draw, mode)))
    errors = own_errors(mine, truth)
    doubts = {i: IllConditioned() for i in errors if errors[i] > SUSPECT or near.get(i, 0.0) > NOISE}
    is_small = sum(tensor.numel() for tensor in inputs.values()) <= SMALL
    # A result of many elements is no luck: their errors meet in it.
    if doubts or in_wide.rounds or (is_small and _has_few(outcome(ran))):
        for draw in range(MANY_DRAWS if is_small else FEW_DRAWS):
            # First each element by itself, for that is what most operations do.
            there = moved_run(seed + draw, mode, scattered=True, together=draw % 2 == 1)
            take_in(distances(there))
            for i, doubt in doubts.items():
                if i in there:
                    doubt.take_in(there[i], truth[i])
    for i, doubt in doubts.items():
        explained = max(near.get(i, 0.0), in_tf32.get(i, 0.0))
        doubt.is_strange = errors[i] > max(SUSPECT, FACTORS["budget"] * explained)
    return {
        "oracle": oracle["results"],
        "oracle_after": oracle["after"],
        "near": near,
        "ties": _ties(recorder, oracle["results"], inputs),
        # Plain: it may go through a file.
        "doubts": {i: vars(doubt) for i, doubt in doubts.items()},
    }


def own_errors(mine: Mapping[Place, torch.Tensor], truth: Mapping[Place, torch.Tensor]) -> dict[Place, float]:
    """The relative L2 errors of the user's own floating point results."""
    places = [i for i, own in mine.items() if i in truth and own.is_floating_point() and own.shape == truth[i].shape]
    return dict(zip(places, numbers([sensitivity(mine[i], mine[i], truth[i]) for i in places]), strict=True))


def narrow_products(graph: Graph) -> NarrowProducts:
    """Rounds operands where the user's own products may run in TF32."""
    return NarrowProducts(convolutions=graph.fp32_convolution == "tf32", products=graph.fp32_matmul == "tf32")


def _by_place(run: Mapping[str, Any]) -> dict[Place, torch.Tensor]:
    """The tensors that a run gave, and those that it changed."""
    places = {**dict(enumerate(run["results"])), **run["after"]}
    return {place: value for place, value in places.items() if isinstance(value, torch.Tensor)}


def _is_narrow(own: list[Any], oracle: list[Any], narrow: Mapping[Place, float]) -> bool:
    """Whether the user's own results are about as far off as those of products in TF32.

    Args:
        narrow: by result, the distance of these from the oracle, as a part of its norm.
    """
    for i, distance in narrow.items():
        if isinstance(i, int) and own[i].is_floating_point() and distance > 0.0:
            error = agreement(own[i], own[i], oracle[i], 0.0, FACTORS["budget"]).own_error
            if error >= TF32_SHARE * distance:
                return True
    return False


def _tolerated(capture: Capture, ran: Mapping[str, Any]) -> dict[Place, float]:
    """Without an oracle: an error that, eight times, is the dtype's published tolerance, or what TF32 costs."""
    found = {}
    for i, result in _by_place(ran).items():
        dtype = str(result.dtype).removeprefix("torch.")
        if dtype in TOLERANCE:
            narrow = dtype == "float32" and capture.graph.runs_tf32
            found[i] = max(TOLERANCE[dtype] / FACTORS["budget"], TF32_ERROR if narrow else 0.0)
    return found


@contextlib.contextmanager
def _float64_default() -> Any:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def in_float64(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in double precision, in the same layout; of what is no float in its own dtype."""
    return laid_out(tensor, tensor.stride(), torch.float64 if tensor.is_floating_point() else None)


def _ties(recorder: IndexRecorder, results: list[Any], inputs: dict[str, torch.Tensor]) -> dict[int, dict[str, Any]]:
    """For each result that is an index of an extreme value: the values it was chosen from."""
    dtypes = {str(t.dtype).removeprefix("torch.") for t in inputs.values() if t.is_floating_point()}
    epsilon = 4 * max((EPSILON[dtype] for dtype in dtypes), default=0.0)
    found = {}
    for i, result in enumerate(results):
        for chosen in recorder.seen:
            if chosen.index is result:
                found[i] = {
                    "values": chosen.values, "dim": chosen.dim, "epsilon": epsilon, "is_order": chosen.is_order
                }  # fmt: skip
    return found


def _has_few(results: list[Any]) -> bool:
    return any(isinstance(result, torch.Tensor) and 0 < result.numel() <= FEW for result in results)


def _finest(results: list[Any]) -> float:
    """The least machine epsilon of the results: about how precisely the user's own code computes."""
    dtypes = [str(r.dtype).removeprefix("torch.") for r in results if isinstance(r, torch.Tensor)]
    return min((EPSILON[dtype] for dtype in dtypes if dtype in EPSILON), default=EPSILON["float32"])


def _moved(inputs: dict[str, torch.Tensor], seed: int, epsilon: float) -> dict[str, torch.Tensor]:
    """The inputs in float64, each element moved by up to half of ``epsilon``, as a part of it.

    On a GPU subnormal numbers become 0, as its rounding functions take them (``floor``, ``ceil`` in PTX's ``.ftz``).
    """
    result = {}
    for number, (name, tensor) in enumerate(inputs.items()):
        if not tensor.is_floating_point():
            result[name] = tensor.clone()
            continue
        generator = torch.Generator(tensor.device).manual_seed(seed + 1 + 1000 * number)
        # In place: there may be little room beside tensors of gigabytes.
        moved = torch.empty_like(tensor, dtype=torch.float64).uniform_(generator=generator)
        moved.sub_(0.5).mul_(epsilon).add_(1.0).mul_(computable(tensor))
        if tensor.is_cuda:
            moved.masked_fill_(computable(tensor).abs() < torch.finfo(tensor.dtype).tiny, 0.0)
        result[name] = moved
    return result
