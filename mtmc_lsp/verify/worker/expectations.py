"""The expected results of a case: the reference's results, and a float64 oracle that determines the permitted error.

Runs in workers.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from mtmc_lsp.capture.worker.arguments.strided_tensors import laid_out, shares_elements
from mtmc_lsp.core.dtypes import EPSILON, TOLERANCE
from mtmc_lsp.core.graph import Graph
from mtmc_lsp.core.workload import Capture
from mtmc_lsp.verify.cases import AUTOGRAD, FORWARD, VALUES, Case
from mtmc_lsp.verify.error_limits import FACTORS, NOISE, Draws, exceeds_tolerance
from mtmc_lsp.verify.sizes.case_sizes import has_slow_loop
from mtmc_lsp.verify.worker.choices import Choice, ChoiceRecorder, TiedChoices
from mtmc_lsp.verify.worker.comparison.batched_reads import computable, numbers
from mtmc_lsp.verify.worker.comparison.compare import agreement
from mtmc_lsp.verify.worker.comparison.discrete import Ties
from mtmc_lsp.verify.worker.comparison.distances import oracle_distance
from mtmc_lsp.verify.worker.comparison.draws import has_loops, loops_without_indices
from mtmc_lsp.verify.worker.comparison.finer_precision import finer_share
from mtmc_lsp.verify.worker.comparison.ill_conditioned import IllConditioned
from mtmc_lsp.verify.worker.comparison.scan_errors import has_equal_values, scan_errors
from mtmc_lsp.verify.worker.float64_execution import Float64Mode
from mtmc_lsp.verify.worker.gradients.cancellation import cancellation
from mtmc_lsp.verify.worker.gradients.rounding_noise import RoundingNoise
from mtmc_lsp.verify.worker.oracle import SharedRandomMode, Tf32Products, draw_seeds
from mtmc_lsp.verify.worker.run_target import copies, outcome, run_case

ResultKey = int | str
"""The number of a result, or the name of a changed input."""

_tf32_state: dict[str, bool] = {}
"""Under ``observed``: whether the reference's products ran in TF32 on the workload; empty until it has run."""
FEW, FEW_DRAWS = 32, 3
"""Rounding errors of results with at most this many elements vary by chance, so they are estimated from several draws. The L2
norm of n independent errors has a relative standard deviation of about 1 / sqrt(2 n), 12 % for 32."""
MANY_DRAWS, SMALL = 8, 1 << 22
"""The number of draws if the inputs have at most ``SMALL`` elements: the largest of eight is unlikely to be too small."""
CERTAIN = {name: NOISE if tolerance <= FACTORS["budget"] * NOISE else -1.0 for name, tolerance in TOLERANCE.items()}
"""By dtype: results with at most this error, and that rounding moves by at most this distance, are no noise. The limits of noise
are higher than all others for these dtypes."""
LEAST_DRAWS = 1
"""The number of draws that most candidates need."""
SUSPECT = 0.02
"""A reference error above this exceeds every tolerance except float8's: either rounding is magnified, or the oracle differs."""
TF32_ERROR = 2.0**-11
"""Relative error of one rounding to TF32's ten bits."""
TF32_SHARE = 0.25
"""A reference error of at least this part of the TF32 error means that TF32 was used; float32's is about a thousandth."""


def expected_of(
    module: Any,
    capture: Capture,
    inputs: dict[str, torch.Tensor],
    device: str,
    case: Case,
    *,
    is_first: bool = False,
    wanted: Draws = Draws.ALL,
) -> dict[str, Any]:
    """The reference's results on a case's inputs, and the oracle's.

    Args:
        wanted: the draws of rounding. Where fewer than all are wanted, those are made that do more than permit larger errors.

    Returns:
        The entries of :func:`run_case`, and: ``oracle`` and ``oracle_after``, the same in float64; ``sensitivity``, by result
        (or by name of a changed input), how far rounding of inputs and operations moves the oracle; ``conditioning``, how far
        rounding of inputs alone does; ``ill_conditioned``, by result, the facts about a reference result far from the oracle;
        ``zeros``, by gradient, where it is 0 whatever rounding does; ``ties``, by result, the fields of :class:`Ties` of an
        integer result that an index of a score decides; ``has_oracle``, whether float64 fitted into memory; ``draws``, those that
        were made; ``omits_draws``, whether draws are left out that may permit larger errors.
    """
    kind, seed = case.kind, case.seed

    def random_mode() -> contextlib.AbstractContextManager[Any]:
        # In other cases the guard refuses, so the reference's code runs, with torch's random numbers.
        if kind not in (VALUES, FORWARD) or not capture.uses_random:
            return contextlib.nullcontext()
        dropouts = sum("dropout" in node.op for node in capture.graph.nodes)
        mode: contextlib.AbstractContextManager[Any] = SharedRandomMode(draw_seeds(seed, dropouts, device))
        return mode

    reference = run_case(module, capture, copies(inputs), device, random_mode(), seed, kind, before=inputs)
    # Without a float64 oracle, the reference's results are the only ones to compare with.
    defaults: dict[str, Any] = {
        "oracle": reference["results"],
        "oracle_after": reference["after"],
        "sensitivity": {},
        "conditioning": {},
        "ties": {},
        "ill_conditioned": {},
        "zeros": {},
        "has_oracle": True,
        "omits_draws": False,
        "draws": int(Draws.ALL),
    }
    if kind not in (VALUES, FORWARD) and (kind != AUTOGRAD or capture.uses_random):
        return {**reference, **defaults}
    if not case.has_oracle:
        return {
            **reference,
            **defaults,
            "sensitivity": _sensitivity_without_oracle(capture, reference),
            "has_oracle": False,
        }
    try:
        oracle = _oracle(module, capture, inputs, device, case, is_first, reference, random_mode, wanted)
        return {**reference, **defaults, **oracle}
    except torch.OutOfMemoryError:
        if is_first:
            _tf32_state["observed"] = capture.graph.runs_tf32
        sensitivity = _sensitivity_without_oracle(capture, reference)
        return {**reference, **defaults, "sensitivity": sensitivity, "has_oracle": False}


def _oracle(
    module: Any,
    capture: Capture,
    inputs: dict[str, torch.Tensor],
    device: str,
    case: Case,
    is_first: bool,
    reference: dict[str, Any],
    random_mode: Callable[[], contextlib.AbstractContextManager[Any]],
    wanted: Draws,
) -> dict[str, Any]:
    """The oracle's results, and how far rounding moves them; ``reference`` is the reference's run on these inputs."""
    kind, seed, results = case.kind, case.seed, reference["results"]
    # If the reference changes no input, the oracle changes none either: skip the copies that would detect it.
    before: dict[str, torch.Tensor] | None = None if reference["after"] else {}
    recorder, float64_mode = ChoiceRecorder(), Float64Mode(torch.get_default_dtype())
    sensitivity = dict[ResultKey, float]()
    changed = {name: inputs[name] for name in reference["after"]}

    # The state that the code changes is known from the reference's run.
    run_unobserved = functools.partial(run_case, observes_state=False)

    def exact_run(
        choosing: contextlib.AbstractContextManager[Any], unchanged: dict[str, torch.Tensor] | None
    ) -> dict[str, Any]:
        wide_inputs = {name: in_float64(tensor) for name, tensor in inputs.items()}
        with _float64_default(), choosing, float64_mode, float64_mode.with_inputs(wide_inputs, inputs):
            return run_unobserved(module, capture, wide_inputs, device, random_mode(), seed, kind, before=unchanged)

    # Libraries choose the precision for each size and call. If they use full precision on a small size, a candidate need not.
    # On the workload itself the reference's error counts. The precision of gradients and for other layouts is chosen
    # independently, even of two calls of the same code: a transposed 3D convolution of strided images ran in either.
    has_gradients = kind == AUTOGRAD or capture.graph.backward is not None
    may_run_tf32 = capture.graph.allows_tf32 and (has_gradients or bool(case.layout))
    products_in_tf32 = runs_products_in_tf32(capture.graph, device)
    uses_tf32 = products_in_tf32 or ((may_run_tf32 or _tf32_state.get("observed", False)) and not is_first)
    wanted = max(wanted, Draws.FEW if has_gradients or uses_tf32 else Draws.NONE)
    # Autograd uses indices that the graph does not show.
    may_choose = kind == AUTOGRAD or not loops_without_indices(capture.graph)
    # To record choices waits for the GPU at each index.
    fewest = Draws.FEW if has_loops(capture.graph) else Draws.NONE
    has_strict_integers = may_choose and not has_gradients and wanted <= fewest
    records = may_choose and not has_strict_integers
    oracle = exact_run(recorder if records else contextlib.nullcontext(), before)
    if kind == FORWARD or (kind == VALUES and capture.graph.backward is None):
        # Autograd saves indices for the backward pass without an operation.
        recorder.drop_unused(outcome(oracle))
    if len(oracle["results"]) != len(results):
        # Some torch modules have fast paths that they skip under a function mode, with another number of results.
        return {}
    expected, exact = _tensors_by_key(reference), _tensors_by_key(oracle)
    errors, of_scans = reference_errors(expected, exact), scan_errors(capture.graph, case, expected)
    are_ordinary = all(error <= largest_ordinary_error(_name(expected[i])) for i, error in errors.items())
    if (wanted is Draws.NONE or has_strict_integers) and not are_ordinary:
        more = Draws.ALL if has_strict_integers else Draws.FEW
        return _oracle(module, capture, inputs, device, case, is_first, reference, random_mode, more)
    if has_strict_integers:
        # Which other index of a score is right follows from choices, so without them it must be the reference's.
        oracle = _with_integers_of(reference, oracle)
        exact = _tensors_by_key(oracle)
    if wanted is Draws.NONE:
        found = {"oracle": oracle["results"], "oracle_after": oracle["after"], "sensitivity": of_scans}
        return {**found, "omits_draws": True, "draws": int(Draws.NONE)}
    rounded_choices = list[dict[int, Choice]]()

    def perturbed_run(
        perturbation_seed: int,
        mode: contextlib.AbstractContextManager[Any],
        *,
        rounds_results: bool = False,
        shares_draw: bool = False,
    ) -> dict[ResultKey, torch.Tensor]:
        # Each run perturbs the inputs differently; random numbers that the code draws stay the same.
        perturbed = _perturbed(inputs, perturbation_seed, _finest_epsilon(outcome(reference)))
        rounding_seed = perturbation_seed if rounds_results else None
        bound = float64_mode.with_inputs(perturbed, inputs, rounding_seed=rounding_seed, shares_draw=shares_draw)
        choosing = ChoiceRecorder(recorder.choices) if recorder.choices else None
        with _float64_default(), choosing or contextlib.nullcontext(), float64_mode, bound, mode:
            run = run_unobserved(module, capture, perturbed, device, random_mode(), seed, kind, before=changed)
        if choosing is not None and choosing.count == recorder.count:
            rounded_choices.append(choosing.choices)
        return comparable_results(run)

    def comparable_results(run: Mapping[str, Any]) -> dict[ResultKey, torch.Tensor]:
        return {i: value for i, value in _tensors_by_key(run).items() if i in expected and i in exact}

    def distances(perturbed: Mapping[ResultKey, torch.Tensor]) -> dict[ResultKey, float]:
        if has_strict_integers:
            perturbed = {i: value for i, value in perturbed.items() if _is_float(expected[i])}
        values = numbers([oracle_distance(value, expected[i], exact[i]) for i, value in perturbed.items()])
        return dict(zip(perturbed, values, strict=True))

    tf32_distances = dict[ResultKey, float]()
    if is_first and capture.graph.runs_tf32:
        # The results alone may not reveal TF32, for example sums of activations far from 0.
        is_convolution_tf32 = "tf32" in capture.graph.observed_convolution_modes.values()
        tf32_distances = distances(perturbed_run(seed, tf32_products(capture.graph)))
        _tf32_state["observed"] = is_convolution_tf32 or _ran_tf32(results, oracle["results"], tf32_distances)

    def raise_sensitivity(measured: Mapping[ResultKey, float]) -> None:
        sensitivity.update({i: max(sensitivity.get(i, 0.0), distance) for i, distance in measured.items()})

    mode: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
    if uses_tf32:
        mode = Tf32Products(convolutions=False, products=True) if products_in_tf32 else tf32_products(capture.graph)
    is_small = sum(tensor.numel() for tensor in inputs.values()) <= SMALL
    draws = MANY_DRAWS if is_small else FEW_DRAWS
    for draw in range(FEW_DRAWS if recorder.choices or _has_few_elements(outcome(reference)) else 1):
        raise_sensitivity(distances(perturbed_run(seed + draw, mode)))
    # The error of TF32 products is the reference's choice, not a property of its function.
    conditioning = {} if uses_tf32 else dict(sensitivity)
    raise_sensitivity(of_scans)
    ties = dict[ResultKey, Ties]()
    following = dict[ResultKey, IllConditioned]()
    if recorder.choices:
        with ChoiceRecorder(recorder.choices) as choosing:
            run_unobserved(module, capture, copies(inputs), device, random_mode(), seed, kind, before=changed)
        if choosing.count == recorder.count:
            rounded_choices.append(choosing.choices)
        # The error of 16-bit scores is measured.
        epsilon = min(_finest_epsilon(list(inputs.values())), EPSILON["float32"])
        choices = TiedChoices(recorder.choices, rounded_choices, epsilon)
        numbers_of_noise = range(draws if choices.is_ambiguous else 0)
        others = (comparable_results(exact_run(choices.noise(seed, draw), changed)) for draw in numbers_of_noise)
        ties = {i: choices.ties_of(value) for i, value in exact.items() if i in expected and i not in errors}
        following, moved = _following(others, exact, ties, errors, distances)
        # The ordinary draws may have swapped ties too, so their distance alone does not tell.
        names = {i: _name(expected[i]) for i in following}
        following = {
            i: result
            for i, result in following.items()
            if moved[i] > min(FACTORS["budget"] * sensitivity.get(i, 0.0), TOLERANCE[names[i]])
            and moved[i] > FACTORS["budget"] * EPSILON[names[i]]
        }
        raise_sensitivity({i: moved[i] for i in following})

    def noisy_run(draw: int, units: int) -> dict[ResultKey, torch.Tensor]:
        with RoundingNoise(seed + draw, units):
            run = run_unobserved(module, capture, copies(inputs), device, random_mode(), seed, kind, before=changed)
        return comparable_results(run)

    magnified = [i for i in errors if exceeds_tolerance(conditioning.get(i, 0.0), _name(expected[i]))]
    outputs = len(reference["facts"])
    # A result that is exactly 0 everywhere, or an element of a gradient, may be 0 by chance: in the reference, rounding errors of
    # terms that cancel may be equal.
    zero_results = {i for i in errors if expected[i].numel() and not bool(exact[i].any())}
    cancels: dict[ResultKey, torch.Tensor] = {
        i: expected[i] for i in errors if i in zero_results or (is_small and isinstance(i, int) and i >= outputs)
    }
    doubtful = [
        i
        for i, value in cancels.items()
        if i in magnified or i in zero_results or errors[i] > largest_ordinary_error(_name(value))
    ]
    if capture.graph.backward is None and has_slow_loop(capture.graph):
        cancels, doubtful = {}, []
    noise = cancellation(cancels, exact, doubtful, noisy_run, draws)
    for noisy in noise.draws:
        raise_sensitivity({i: far for i, far in distances(noisy).items() if exceeds_tolerance(far, _name(expected[i]))})
    suspects = [i for i in errors if errors[i] > SUSPECT or sensitivity.get(i, 0.0) > NOISE]
    # A higher limit for the whole must not excuse single elements. The candidate's error is one more draw, so it is the largest
    # as often as each of the others and the reference's.
    chance = 1.0 / (draws + 2)
    ill_conditioned = {
        **{
            i: IllConditioned(is_uneven=True, is_partial=True, outliers=chance, edge=float64_mode.rounding_epsilon)
            for i in magnified
        },
        **{i: IllConditioned() for i in suspects},
        **following,
    }
    # In a result with many elements, the errors average out, so one draw is enough.
    has_draws = ill_conditioned or float64_mode.rounding_epsilon or (is_small and _has_few_elements(outcome(reference)))
    # Further draws can only raise the limits of a result that is no noise, also of single elements.
    is_certain = all(max(errors[i], sensitivity.get(i, 0.0)) <= CERTAIN[_name(expected[i])] for i in errors)
    omits_draws = bool(has_draws) and wanted < Draws.ALL and is_certain and not suspects and not following
    if has_strict_integers and suspects:
        return _oracle(module, capture, inputs, device, case, is_first, reference, random_mode, Draws.ALL)
    if omits_draws and has_slow_loop(capture.graph):
        # Without any draw of the rounding of operations, limits are not raised for these.
        for i in magnified:
            del ill_conditioned[i], conditioning[i]
        magnified = []
    if omits_draws:
        draws = LEAST_DRAWS if magnified else 0
        for i in magnified:
            # The part of these elements may be another one with all draws.
            ill_conditioned[i].outliers = 0.0
    if has_draws:
        for draw in range(draws):
            # Start with independent rounding of each element, which most operations do.
            perturbed = perturbed_run(seed + draw, mode, rounds_results=True, shares_draw=draw % 2 == 1)
            raise_sensitivity(distances(perturbed))
            for i, result in ill_conditioned.items():
                if i in perturbed:
                    result.add_draw(perturbed[i], exact[i])
    for noisy in noise.draws:
        for i in noisy.keys() & ill_conditioned.keys():
            ill_conditioned[i].add_draw(noisy[i], exact[i])
    for i, result in ill_conditioned.items():
        explained = max(sensitivity.get(i, 0.0), tf32_distances.get(i, 0.0))
        # A result that is exactly 0 has no relative error: the reference's is its rounding.
        is_zero = not bool(exact[i].any())
        result.is_unexplained = not is_zero and errors[i] > max(SUSPECT, FACTORS["budget"] * explained)
    if not has_equal_values(case) and not following:
        # Equal values may cancel exactly in the reference, whatever its precision.
        shares = {i: finer_share(expected[i], errors[i], conditioning.get(i, 0.0)) for i in errors}
        sensitivity, conditioning = (
            {i: shares.get(i, 1.0) * distance for i, distance in moved.items()} for moved in (sensitivity, conditioning)
        )
    return {
        "oracle": oracle["results"],
        "oracle_after": oracle["after"],
        "sensitivity": sensitivity,
        "conditioning": conditioning,
        # Plain mappings, because they may go through a file.
        "ties": {i: vars(result) for i, result in ties.items() if result.choices or result.alternatives},
        "ill_conditioned": {i: vars(result) for i, result in ill_conditioned.items()},
        "zeros": noise.zeros,
        "omits_draws": omits_draws or has_strict_integers,
        "draws": int(wanted),
    }


def _following(
    others: Iterable[Mapping[ResultKey, torch.Tensor]],
    exact: Mapping[ResultKey, torch.Tensor],
    ties: Mapping[ResultKey, Ties],
    errors: Iterable[ResultKey],
    distances: Callable[[Mapping[ResultKey, torch.Tensor]], Mapping[ResultKey, float]],
) -> tuple[dict[ResultKey, IllConditioned], dict[ResultKey, float]]:
    """How the floating-point results follow choices among ties, and how far these move each; adds integer results to ``ties``.

    Args:
        others: the oracle's results with other choices.
        errors: the keys of the floating-point results.
    """
    following = {i: IllConditioned(is_uneven=True) for i in errors}
    moved = dict.fromkeys(following, 0.0)
    for results in others:
        for i, value in results.items():
            (following[i] if i in following else ties[i]).add_draw(value, exact[i])
        moved |= {i: max(moved[i], distance) for i, distance in distances(results).items() if i in moved}
    return following, moved


def _with_integers_of(reference: Mapping[str, Any], oracle: Mapping[str, Any]) -> dict[str, Any]:
    """The oracle's results, with the reference's where they are no floating-point tensors."""

    def chosen(value: Any, exact: Any) -> Any:
        return exact if isinstance(value, torch.Tensor) and value.is_floating_point() else value

    after = {name: chosen(value, oracle["after"].get(name, value)) for name, value in reference["after"].items()}
    return {"results": list(map(chosen, reference["results"], oracle["results"])), "after": after}


def reference_errors(
    expected: Mapping[ResultKey, torch.Tensor], exact: Mapping[ResultKey, torch.Tensor]
) -> dict[ResultKey, float]:
    """The relative L2 errors of the reference's floating-point results."""
    keys = [
        i for i, value in expected.items() if i in exact and value.is_floating_point() and value.shape == exact[i].shape
    ]
    errors = numbers([oracle_distance(expected[i], expected[i], exact[i]) for i in keys])
    return dict(zip(keys, errors, strict=True))


def largest_ordinary_error(dtype: str) -> float:
    """The relative error up to which a gradient needs no explanation: a few roundings, and an error within the tolerance."""
    return min(SUSPECT, max(TOLERANCE[dtype] / FACTORS["budget"], 4 * EPSILON[dtype]))


def tf32_products(graph: Graph) -> Tf32Products:
    """A mode that rounds operands as TF32 does, for the products that may run in TF32 in the reference."""
    return Tf32Products(convolutions=graph.fp32_convolution == "tf32", products=graph.fp32_matmul == "tf32")


def runs_products_in_tf32(graph: Graph, device: str) -> bool:
    """Whether a CPU stands in for a GPU on which the user's program runs products in TF32, which CPUs do not have."""
    return device == "cpu" and "cublas" in graph.tf32_libraries


def _tensors_by_key(run: Mapping[str, Any]) -> dict[ResultKey, torch.Tensor]:
    """The tensors that a run returned, and the inputs that it changed."""
    values = {**dict(enumerate(run["results"])), **run["after"]}
    return {key: value for key, value in values.items() if isinstance(value, torch.Tensor)}


def _ran_tf32(reference: list[Any], oracle: list[Any], tf32_distances: Mapping[ResultKey, float]) -> bool:
    """Whether the reference's errors are about as large as those of TF32 products.

    Args:
        reference: the reference's results.
        oracle: the oracle's results.
        tf32_distances: by result, the relative distance between TF32 products and the oracle.
    """
    for i, distance in tf32_distances.items():
        if isinstance(i, int) and reference[i].is_floating_point() and distance > 0.0:
            error = agreement(reference[i], reference[i], oracle[i], 0.0, FACTORS["budget"]).reference_error
            if error >= TF32_SHARE * distance:
                return True
    return False


def _sensitivity_without_oracle(capture: Capture, reference: Mapping[str, Any]) -> dict[ResultKey, float]:
    """By result: the error that gives the dtype's tolerance when multiplied by the factor, or the error of TF32 if larger."""
    errors = {}
    for i, result in _tensors_by_key(reference).items():
        dtype = str(result.dtype).removeprefix("torch.")
        if dtype in TOLERANCE:
            uses_tf32 = dtype == "float32" and capture.graph.runs_tf32
            errors[i] = max(TOLERANCE[dtype] / FACTORS["budget"], TF32_ERROR if uses_tf32 else 0.0)
    return errors


@contextlib.contextmanager
def _float64_default() -> Any:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def in_float64(tensor: torch.Tensor) -> torch.Tensor:
    """A float64 copy in the same layout; integers and booleans keep their dtype."""
    return laid_out(tensor, tensor.stride(), torch.float64 if tensor.is_floating_point() else None)


def _has_few_elements(results: list[Any]) -> bool:
    floats = (result for result in results if isinstance(result, torch.Tensor) and result.is_floating_point())
    return any(0 < result.numel() <= FEW for result in floats)


def _is_float(tensor: torch.Tensor) -> bool:
    return bool(tensor.is_floating_point())


def _name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _finest_epsilon(results: list[Any]) -> float:
    """The smallest machine epsilon of the results, which is about the precision of the reference's computation."""
    dtypes = [str(r.dtype).removeprefix("torch.") for r in results if isinstance(r, torch.Tensor)]
    return min((EPSILON[dtype] for dtype in dtypes if dtype in EPSILON), default=EPSILON["float32"])


def _perturbed(inputs: dict[str, torch.Tensor], seed: int, epsilon: float) -> dict[str, torch.Tensor]:
    """The inputs in float64, each element changed by a relative amount of up to ``epsilon / 2``.

    On a GPU subnormal numbers become 0, because its rounding functions flush them (``floor`` and ``ceil`` as PTX's ``.ftz``).
    """
    perturbed_inputs = {}
    for number, (name, tensor) in enumerate(inputs.items()):
        if not tensor.is_floating_point():
            perturbed_inputs[name] = tensor.clone()
            continue
        generator = torch.Generator(tensor.device).manual_seed(seed + 1 + 1000 * number)
        # In place: memory for further copies of large tensors may be missing.
        perturbed = torch.empty_like(tensor, dtype=torch.float64).uniform_(generator=generator)
        perturbed.sub_(0.5).mul_(epsilon).add_(1.0).mul_(computable(tensor))
        if tensor.is_cuda:
            perturbed.masked_fill_(computable(tensor).abs() < torch.finfo(tensor.dtype).tiny, 0.0)
        # `empty_like` drops gaps between elements, and shared elements: these are perturbed one by one, as rounding treats them.
        has_same_layout = perturbed.stride() == tensor.stride() or shares_elements(tensor.shape, tensor.stride())
        perturbed_inputs[name] = perturbed if has_same_layout else laid_out(perturbed, tensor.stride())
    return perturbed_inputs
