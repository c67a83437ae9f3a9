"""The cases that a candidate is verified on: sizes, distributions of values, layouts, seeds, and calls outside its guard."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from mtmc_lsp.core.dtypes import is_float
from mtmc_lsp.core.graph import MATRIX_PRODUCTS, Graph, InputKind
from mtmc_lsp.core.workload import Capture, WorkloadSource
from mtmc_lsp.ir.attention_mask import hides_keys
from mtmc_lsp.ir.lower import lower
from mtmc_lsp.verify.sizes.block_sizes import largest_sizes
from mtmc_lsp.verify.sizes.case_sizes import (
    LARGE_ELEMENTS,
    LOOP_OPERATIONS,
    SLOW_LOOP,
    conditions_allow,
    first_allowed,
    increased_sizes,
    is_larger,
    is_network,
    iterated_work,
    loop_operations,
    raised_sizes,
    reduced_sizes,
    sizes_with_longest,
    smaller_sizes,
    with_rows,
    with_short_loops,
)
from mtmc_lsp.verify.sizes.interpreter_limits import INTERPRETER_PRODUCT, product_work, too_large

SMALL_PART = 0.2
"""Share of the interpreter's limits for the cases with unusual values and layouts, and for all cases of a foreign candidate
but the first: these cases are many."""
FULL_PRODUCT = 20 * INTERPRETER_PRODUCT
"""Limit for the multiply-adds of an interpreted call at the parameters' full sizes."""
LARGER_BYTES = 8.0e9
"""Workloads that move more bytes than this get no case with larger sizes, which might not fit in memory."""
CPU_WORK, HALF_CPU_WORK, CPU_ELEMENTS = 1.0e10, 5.0e8, 2.0e8
"""Limits for the case that runs on the CPU on machines with a GPU: operations without and with 16-bit floats, and elements of all
values. One busy core computed 11 GFLOP/s in float32 and 1.1 in float16 (a convolution with 64 channels; EfficientNet-B0 0.9)."""

MOST_NUMBER_CASES = 8
"""Limit for the cases with special values of run-time numbers."""

VALUES = "values"
"""The kernel should run: the call is inside the guard. Of a target that is trained, the gradients are compared, too."""
FORWARD = "without gradients"
"""The same for a target that is trained, called without recording gradients."""
FLOAT64 = "float64"
"""The same call in double precision. It is outside most guards, so the user's code should run."""
AUTOGRAD = "autograd"
"""The same call with gradients, which must equal those of the user's code."""
ON_CPU = "cpu"
"""The same call on CPU tensors on a machine with a GPU."""
STRIDED, ALIASED = "strided", "aliased"
"""Layouts: arguments that are not contiguous in any dimension; arguments of one type are the same tensor."""
SLICED, PACKED, TRANSPOSED = "sliced", "packed", "transposed"
"""Further ones for foreign candidates: arguments are columns of a wider tensor with unaligned rows; one of three tensors side by
side, as queries, keys and values are; another dimension than the last is innermost, as in channels-last images."""
STEPPED = "every third column"
UNALIGNED = "unaligned"
"""Contiguous arguments that begin one element after an aligned address."""
EXPANDED, EXPANDED_COLUMNS = "expanded", "expanded columns"
"""The first, or the last, dimension repeats the same memory."""
NEAR = "near "
"""The beginning of a distribution of values next to numbers, which follow: ``near 6.0, 100``. The others are normal."""
WITHIN = "within "
"""The beginning of a distribution of values that are mostly smaller than a number, which follows."""
NOT_FINITE = ("infinite", "nan")
PEAKS, PEAKS_DOWN, PEAKS_IN_PART = "peaks", "peaks down", "some peaks"
"""Distributions with the extremes of each line at its ends and around blocks, so that an element that is left out shows. The
sizes of the blocks may follow :data:`AT_BLOCKS`. In the second, positive and negative peaks change places; in the third only
every second line has peaks."""
PEAKS_EVERYWHERE = "peaks everywhere"
"""Each line has its extremes at other positions than the line before, so that together they are everywhere."""
AT_BLOCKS = " at blocks of "
RARE_LARGE = "rare large"
"""A distribution of positive values; some of the first argument are so large that a total in bfloat16 loses the others."""
FURTHER_VALUES = ("uniform", "tiny", "mixed", "constant", "large")
"""Distributions that are tried at one size, besides ``normal``. The first of them tells that size."""
SPECIAL_DISTRIBUTIONS = ("denormal", *NOT_FINITE)
"""Distributions on which the output may differ from a constant only by NaN and infinity, so they reveal no trivial answers."""
EXACT_OPERATIONS = frozenset(MATRIX_PRODUCTS) | frozenset(
    "convolution conv1d conv2d conv3d add sub rsub mul neg abs relu clamp maximum minimum where eq ne lt le gt ge sum amax "
    "amin max min cumsum view reshape _unsafe_view permute transpose t unsqueeze squeeze expand clone contiguous cat slice "
    "select flatten alias detach copy stack flip".split()
)
"""ATen operations that map small whole numbers to whole numbers without rounding."""


AUTOMATIC = re.compile(r"s\d+")
"""Names of sizes that the user gave none."""
MOST_SHAPES = 4
"""Limit for the shapes in a description."""
UNITS = 16
"""Sizes that are no multiple of this are divided by no tile; half of it is 16 bytes of two-byte elements."""


@dataclass(frozen=True)
class Case:
    """One set of inputs."""

    sizes: Mapping[str, int]
    distribution: str
    """``normal``, ``uniform``, ``large``, ``tiny``, ``mixed``, ``constant``, ``integers``, ``bits``, one of
    :data:`SPECIAL_DISTRIBUTIONS`, :data:`NEAR` or :data:`WITHIN` with numbers, :data:`PEAKS` and its like, :data:`RARE_LARGE`,
    one of :data:`~mtmc_lsp.verify.edge_cases.DISTRIBUTIONS`, or ``given`` (by ``get_inputs``)."""
    seed: int
    kind: str = VALUES
    """One of :data:`VALUES`, :data:`FLOAT64`, :data:`AUTOGRAD`, :data:`ON_CPU`."""
    layout: str = ""
    """Empty for the workload's layout, or one of :data:`STRIDED`, :data:`ALIASED`, :data:`SLICED`, :data:`PACKED`,
    :data:`TRANSPOSED`, :data:`STEPPED`, :data:`UNALIGNED`, :data:`EXPANDED` and :data:`EXPANDED_COLUMNS`."""

    numbers: Mapping[str, int | float] = field(default_factory=dict)
    """Values of run-time numbers other than the workload's, by path."""
    may_be_refused: bool = False
    """Whether a candidate may raise an exception, because the sizes are larger than the workload's."""
    has_oracle: bool = True
    """Whether the reference is also computed in float64, which takes several times as long."""
    has_all_draws: bool = False
    """Whether the limit of an error always follows from all draws of rounding, as it otherwise does if fewer refuse it."""

    @property
    def expects_kernel(self) -> bool:
        """Whether a kernel should run: the call is inside the guard and has elements."""
        return self.kind in (VALUES, FORWARD) and all(self.sizes.values())

    @property
    def label(self) -> str:
        """A description for messages."""
        return self._label([f"{name}={value}" for name, value in self.sizes.items()])

    def text(self, graph: Graph) -> str:
        """A description with the user's names."""
        return self._label(self._sizes(graph))

    def sizes_text(self, graph: Graph) -> str:
        """The sizes with the user's names."""
        return ", ".join(self._sizes(graph))

    def _sizes(self, graph: Graph) -> list[str]:
        """The sizes if they have names, or else the shapes of arguments."""
        if not any(AUTOMATIC.fullmatch(name) for name in self.sizes):
            return [f"{name}={value}" for name, value in self.sizes.items()]
        arguments = [item for item in graph.inputs if item.kind is InputKind.ARGUMENT]
        shapes = [
            f"{item.access}[{', '.join(str(size.value(self.sizes)) for size in item.type.shape)}]" for item in arguments
        ]
        return [*shapes[:MOST_SHAPES], *(["..."] if len(shapes) > MOST_SHAPES else [])]

    def _label(self, sizes: Sequence[str]) -> str:
        numbers = [f"{name}={value}" for name, value in self.numbers.items()]
        kinds = [word for word in (self.kind, self.layout) if word and word != VALUES]
        return ", ".join([*sizes, *numbers, *kinds, self.distribution, f"seed {self.seed}"])


def is_exact(capture: Capture) -> bool:
    """Whether the reference computes small whole numbers without rounding."""
    return all(node.op.split(".")[1] in EXACT_OPERATIONS for node in capture.graph.nodes)


def least_size_that_runs(capture: Capture) -> int:
    """The lower limit of the argument sizes with which the interpreter can run full-size parameters; 0 if there is none."""
    for least in (4, 2, 1):
        if product_work(capture.graph, reduced_sizes(capture, least=least)) <= FULL_PRODUCT:
            return least
    return 0


def version_cases(capture: Capture, *, interpreted: bool, seed: int) -> tuple[Case, ...]:
    """The cases for a version in the user's file: sizes and values, calls outside its guard, unusual values and layouts."""
    is_large = _runs_once(capture, interpreted)
    cases = verification_cases(capture, interpreted=interpreted, seed=seed, is_large=is_large, is_version=True)
    unusual = _unusual_cases(capture, cases, interpreted, seed + len(cases), is_large=is_large)
    numbers = _number_cases(capture, unusual[0], seed + len(cases) + len(unusual))
    expected = (*cases, *(case for case in unusual if not _is_excepted(case, capture, interpreted)), *numbers)
    return with_forward_cases(expected, capture, is_large=is_large)


def _runs_once(capture: Capture, interpreted: bool) -> bool:
    """Whether a version is too large to run several times at the workload's sizes, also in float64."""
    return not interpreted and is_larger(capture.graph, capture.graph.sizes)


def with_forward_cases(cases: Sequence[Case], capture: Capture, *, is_large: bool = False) -> tuple[Case, ...]:
    """The cases, some of them without gradients if the target is trained.

    Gradients at infinite values and NaN depend on the order of operations, also in PyTorch, so they are not compared. Those of
    a tensor that is passed twice may cancel exactly, and then rounding alone decides. The last case is a call without
    gradients, at the sizes of the second case if ``is_large``.
    """
    if capture.graph.backward is None:
        return tuple(cases)

    def compares_gradients(case: Case) -> bool:
        return case.distribution not in NOT_FINITE and case.layout != ALIASED

    cases = [
        replace(each, kind=FORWARD) if each.kind == VALUES and not compares_gradients(each) else each for each in cases
    ]
    return (*cases, replace(cases[1 if is_large and len(cases) > 1 else 0], kind=FORWARD))


def _number_cases(capture: Capture, model: Case, seed: int) -> list[Case]:
    """Cases with other values of the run-time numbers: all are changed, then one in each case is 0, 1, negative or large."""
    numbers = capture.graph.numbers
    changed = {number.access: _changed(number.value) for number in numbers}
    special = (lambda v: 0, lambda v: 1, _opposite, lambda v: 8 * v + 4)
    count = min(MOST_NUMBER_CASES, max(len(special), len(numbers))) if numbers else 0
    chosen: list[Mapping[str, int | float]] = [changed] if numbers else []
    for i in range(count):
        number = numbers[i % len(numbers)]
        value = special[i % len(special)](number.value)
        chosen.append({**changed, number.access: type(number.value)(value)})
    return [replace(model, distribution="normal", seed=seed + i, numbers=values) for i, values in enumerate(chosen)]


def _changed(value: int | float) -> int | float:
    """Another number that is probably in the target's domain as well."""
    return value + 1 if isinstance(value, int) else 0.875 * value or 0.125


def _opposite(value: int | float) -> int | float:
    return (-(value // 2) if isinstance(value, int) else -0.5 * value) or -1


def _is_excepted(case: Case, capture: Capture, interpreted: bool) -> bool:
    """Whether a version may differ from eager mode in this case, by what its steps state.

    On a GPU, Triton's square root and division may flush denormal operands to zero. A split float32 product turns an infinite
    operand into NaN, and its rounding error against the reference's varies most where both operands are the same tensor. An
    attention does not read values whose keys the mask hides from a block of queries: the weight 0 would turn their NaN into NaN.
    Torch's operations of complex values multiply infinite and NaN parts by the 0 of a real operand, which pairs leave out.
    """
    if case.distribution == "denormal":
        return not interpreted
    has_products = product_work(capture.graph, capture.graph.sizes) > 0
    if case.distribution == "nan":
        return has_products and hides_keys(lower(capture.graph))
    if case.distribution in NOT_FINITE and capture.graph.has_pairs:
        return True
    return has_products and (case.distribution == "infinite" or case.layout == ALIASED)


def foreign_cases(
    capture: Capture, *, interpreted: bool, seed: int, few: bool = False, takes_empty: bool = True
) -> tuple[Case, ...]:
    """The cases for a foreign candidate.

    There are no calls with other dtypes and devices than the workload's, since the candidate has no guard. Gradients are
    compared if the workload asks for them.

    Args:
        interpreted: whether Triton's interpreter runs the kernels.
        seed: of the first case.
        few: whether to use only the smallest sizes and the most telling values, since each call takes long.
        takes_empty: whether one case has no elements.
    """
    if few:
        least = reduced_sizes(capture, least=least_size_that_runs(capture))
        distributions = ["normal", "mixed", *(["integers"] if is_exact(capture) else [])]
        return tuple(Case(least, name, seed + i) for i, name in enumerate(distributions))
    usual = verification_cases(capture, interpreted=interpreted, seed=seed, part=SMALL_PART if interpreted else 1.0)
    if interpreted and usual:
        # The first case is as large as possible, because a candidate may refuse small sizes.
        usual = (replace(usual[0], sizes=reduced_sizes(capture)), *usual[1:])
    kinds = (VALUES, AUTOGRAD) if capture.workload.trains else (VALUES,)
    cases = tuple(case for case in usual if case.kind in kinds and (takes_empty or all(case.sizes.values())))
    return with_forward_cases((*cases, *_unusual_cases(capture, cases, interpreted, seed + len(usual))), capture)


def smallest_case(cases: Sequence[Case], capture: Capture) -> Case:
    """The case with the fewest elements, but not none."""
    candidates = [case for case in cases if case.expects_kernel] or cases[:1]
    return min(candidates, key=lambda case: argument_elements(capture, case.sizes))


def argument_elements(capture: Capture, sizes: Mapping[str, int]) -> int:
    """The number of elements of all arguments."""
    inputs = capture.graph.inputs
    return sum(item.type.numel.value(sizes) for item in inputs if item.kind is InputKind.ARGUMENT)


def _unusual_cases(
    capture: Capture, cases: Sequence[Case], interpreted: bool, seed: int, *, is_large: bool = False
) -> list[Case]:
    """Further values and layouts, at sizes of one of the ``cases``; small sizes for the interpreter."""
    arguments = [item for item in capture.graph.inputs if item.kind is InputKind.ARGUMENT]
    small = verification_cases(capture, interpreted=True, seed=seed, part=SMALL_PART) if interpreted else cases
    model = next((case for case in small if case.distribution == FURTHER_VALUES[0] and case.kind == VALUES), cases[0])
    # The same sizes as an earlier case with other contents.
    is_long = loop_operations(capture.graph, cases[0].sizes) > LOOP_OPERATIONS
    unusual = [replace(model if interpreted or is_long or is_large else cases[0], distribution="normal")]
    if any(is_float(item.type.dtype) for item in arguments):
        names = [*SPECIAL_DISTRIBUTIONS, *(("integers", "bits") if is_exact(capture) else ())]
        unusual += [replace(model, distribution=name) for name in names]
    unusual.append(replace(model, distribution="normal", layout=STRIDED))
    changed = {mutation.input for mutation in capture.graph.mutations}
    # The float64 oracle converts each argument by itself, so it cannot follow writes to a shared tensor.
    is_read_only = not changed & {item.name for item in arguments}
    if is_read_only and len({(item.type.shape, item.type.dtype) for item in arguments}) < len(arguments):
        unusual.append(replace(model, distribution="normal", layout=ALIASED))
    return [replace(case, seed=seed + 1 + i) for i, case in enumerate(unusual)]


def _has_free_values(capture: Capture) -> bool:
    """Whether an argument's values follow the distribution of a case: a floating-point tensor without a stated range."""
    specs = capture.workload.tensors
    kinds = {item.name: item.type.dtype for item in capture.graph.inputs if item.kind is InputKind.ARGUMENT}
    return any(
        is_float(kinds[leaf.input])
        and leaf.low is None
        and not (leaf.name in specs and specs[leaf.name].low is not None)
        for leaf in capture.leaves
        if leaf.input in kinds
    )


def verification_cases(
    capture: Capture,
    *,
    interpreted: bool,
    seed: int,
    part: float = 1.0,
    is_large: bool = False,
    is_version: bool = False,
) -> tuple[Case, ...]:
    """Cases of different sizes and values for a capture.

    The first is the workload, with reduced sizes for the interpreter. Then come sizes that no tile divides, small ones
    including 1 and 0, the distributions of values, and larger sizes. The last are calls outside the guard. Distributions are
    tried at multiples of eight, which TMA kernels require; at odd sizes the user's code would run instead. One case has sizes
    that the blocks of a loop do not hold, where it runs, too. If ``is_large``, only
    the first case has the workload's sizes, and none larger ones.

    A version of the user's file has no cases that repeat others: several distributions where no argument follows them, and
    the second small and the second larger size of a network whose other sizes are constant. Each new size of a network takes
    seconds on a GPU, because libraries choose an algorithm for each of its operations.
    """
    graph = capture.graph
    base = reduced_sizes(capture, part=part) if interpreted else dict(graph.sizes)
    variable = [name for name in capture.variable_sizes if name in base]
    from_get_inputs = capture.workload.source is WorkloadSource.GET_INPUTS and not interpreted
    plans: list[tuple[dict[str, int], str]] = [(base, "given")] if from_get_inputs else []
    further = FURTHER_VALUES if not is_version or _has_free_values(capture) else FURTHER_VALUES[:1]
    if not variable:
        plans += [(base, d) for d in ("normal", "normal", *further)]
        last = base
    else:
        # At the workload's length, loops run in its own case and in the one with larger sizes.
        huge = is_large or (capture.bytes > LARGER_BYTES and not interpreted)
        short = with_short_loops(graph, base, variable)
        if is_large:
            short = smaller_sizes(graph, short, variable, LARGE_ELEMENTS)
        # Kernels should run in most cases, so these sizes do not exceed what the blocks of a loop hold.
        limits = {name: limit for name, limit in largest_sizes(graph).items() if name in variable}

        def near(turn: Callable[[int, int], int], sizes: Mapping[str, int]) -> dict[str, int]:
            found = {name: turn(sizes[name], i) for i, name in enumerate(variable)}
            lower = {name: turn(sizes[name], 0) for name, limit in limits.items() if found[name] > limit}
            return found | lower

        odd = with_rows(graph, short, near(_odd, short))
        # Each size is 1 in one of the two.
        small = {**base, **{name: (1, 2, 1, 3)[i % 4] for i, name in enumerate(variable)}}
        other = {**base, **{name: (2, 1, 3, 1)[i % 4] for i, name in enumerate(variable)}}
        small, other = (raised_sizes(graph, sizes, variable) for sizes in (small, other))
        empty = {**other, variable[0]: 0}
        more = increased_sizes(graph, base, variable)
        larger = first_allowed(
            graph,
            (
                {**base, **{name: min(turn(size, 1), limits.get(name, turn(size, 1))) for name, size in more.items()}}
                for turn in (_uneven, _odd)
            ),
        )
        beyond = {**odd, **{name: limit + 1 for name, limit in limits.items()}}
        # Inputs of this size take long to create, so one case at the workload's size is enough.
        plans += [] if from_get_inputs and huge else [(base, "normal")]
        plans += [(odd, "normal")]
        if is_large and (long := sizes_with_longest(graph, base, variable)):
            plans.append((long, "normal"))
        plans += [(small, "normal")]
        leaves_out = is_version and not interpreted and len(variable) == 1 and is_network(graph)
        if not leaves_out:
            plans.append((other, "mixed"))
        # The effect of values does not depend on the size, so small sizes do.
        less = (
            {name: -(-short[name] // 2) for name in variable} if interpreted else smaller_sizes(graph, short, variable)
        )
        middle = first_allowed(
            graph,
            (with_rows(graph, base, near(turn, less)) for turn in (_uneven, _odd)),
        )
        plans += [(middle, d) for d in further] + [(empty, "normal")]
        plans += [(beyond, "normal")] if limits else []
        has_larger = leaves_out and odd[variable[0]] > base[variable[0]]
        if not (too_large(graph, larger, 2.0) if interpreted else huge or has_larger):
            plans.append((larger, "normal"))
        last = small
    cases = [Case(sizes, distribution, seed + i) for i, (sizes, distribution) in enumerate(plans)]
    cases += _outside_the_guard(capture, last, interpreted, seed + len(plans))
    return tuple(case for case in cases if conditions_allow(graph, case.sizes))


def _outside_the_guard(capture: Capture, sizes: Mapping[str, int], interpreted: bool, seed: int) -> list[Case]:
    arguments = [item for item in capture.graph.inputs if item.kind is InputKind.ARGUMENT]
    floats = {item.type.dtype for item in arguments if is_float(item.type.dtype)}
    cases = []
    if floats and "float64" not in floats:
        cases.append(Case(sizes, "normal", seed, FLOAT64))
    if floats:
        # The user's code computes the expected results, too. The oracle would record gradients of a long loop five times.
        is_short = loop_operations(capture.graph, sizes) <= LOOP_OPERATIONS
        cases.append(Case(sizes, "normal", seed + 1, AUTOGRAD, has_oracle=is_short))
    products, iterated = iterated_work(capture.graph, sizes)
    elements = iterated + sum(kind.numel.value(sizes) for node in capture.graph.nodes for kind in node.outputs)
    work = 2 * products + max(capture.flops, 2 * product_work(capture.graph, sizes))
    has_half = any(kind.dtype in ("float16", "bfloat16") for node in capture.graph.nodes for kind in node.outputs)
    is_quick = elements < CPU_ELEMENTS and loop_operations(capture.graph, sizes) < SLOW_LOOP
    if not interpreted and work < (HALF_CPU_WORK if has_half else CPU_WORK) and is_quick:
        cases.append(Case(sizes, "normal", seed + 2, ON_CPU))
    return cases


def _odd(value: int, position: int) -> int:
    """A size near ``value`` that is no multiple of 16, so that the last tile is partial."""
    wanted = value + (5 if position % 2 else -3)
    return wanted | 1 if wanted > 2 else 3


def _uneven(value: int, position: int) -> int:
    """A multiple of eight near ``value`` that no tile divides: guards that require whole units of 16 bytes accept it."""
    if value < 2 * UNITS:
        return _odd(value, position)
    return value // UNITS * UNITS + (UNITS // 2 if position % 2 else -UNITS // 2)
