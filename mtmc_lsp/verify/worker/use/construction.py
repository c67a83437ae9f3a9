"""Steps about the construction of modules: initial parameters, other arguments, many instances. Runs in workers."""

from __future__ import annotations

from time import process_time

import torch

from mtmc_lsp.verify.use.uses import Use
from mtmc_lsp.verify.worker.observation.kept_state import kept_state, move_forward
from mtmc_lsp.verify.worker.use.steps import Entry, Steps, results
from mtmc_lsp.verify.worker.use.subject import NotApplicable, Subject

OF_CONSTRUCTION = Steps()
DISTRIBUTION = "the distribution of "
"""Begin of the names of entries with the mean, the standard deviation and the number of random initial values."""
DRAWS, LARGE_DRAWS = 4, 2
"""Instances whose initial values are compared; fewer of large modules."""
LARGE = 1 << 18
"""Elements of a large module. Of each of its tensors, as many values are compared."""
LEAST_VALUES = 32
"""With fewer random values, chance decides how they are distributed."""
INSTANCES, INSTANCES_SECONDS = 64, 0.3


@OF_CONSTRUCTION.step("names")
def names(subject: Subject, use: Use) -> list[Entry]:
    """Say which tensors are parameters, and which of these are trained."""
    assert subject.constructor is not None
    held = subject.held(subject.constructor())
    return [
        Entry(name, _kind(held[name]) if name in held and subject.name_here(name) == name else None, is_optional=True)
        for name in (*subject.tensors.parameters, *subject.tensors.buffers)
    ]


def _kind(tensor: torch.Tensor) -> str:
    if not isinstance(tensor, torch.nn.Parameter):
        return "a buffer"
    return "a parameter" if tensor.requires_grad else "a parameter that is not trained"


@OF_CONSTRUCTION.step("initial")
def initial(subject: Subject, use: Use) -> list[Entry]:
    """Read the initial values of tensors, and how those that depend on chance are distributed."""
    assert subject.constructor is not None
    is_large = sum(tensor.numel() for tensor in subject.tensors.state.values()) > LARGE
    drawn = []
    for seed in range(LARGE_DRAWS if is_large else DRAWS):
        torch.manual_seed(seed)
        drawn.append({name: value.detach() for name, value in subject.held(subject.constructor()).items()})
    entries = []
    for name in (*subject.tensors.parameters, *subject.tensors.buffers):
        values = [held[name] for held in drawn if name in held]
        # The memory of torch.empty holds NaN here; such a module is for parameters that are loaded.
        is_known = bool(values) and subject.name_here(name) == name and not bool(values[0].isnan().any())
        is_fixed = is_known and all(bool((value == values[0]).all()) for value in values)
        entries.append(Entry(name, values[0].clone() if is_fixed else None, is_optional=True))
        entries.append(Entry(f"{DISTRIBUTION}{name}", _distribution(values) if is_known else None, is_optional=True))
    return entries


def _distribution(values: list[torch.Tensor]) -> torch.Tensor | None:
    sample = torch.cat([value.flatten()[:LARGE].double() for value in values])
    if sample.numel() < LEAST_VALUES:
        return None
    return torch.stack([sample.mean(), sample.std(), torch.full_like(sample[0], sample.numel())])


def distribution_problem(expected: torch.Tensor, observed: torch.Tensor) -> str:
    """How the distribution of initial values differs from the reference's; empty if the difference may be chance."""
    mean, spread, count = expected.tolist()
    its_mean, its_spread, _ = observed.tolist()
    if not spread:
        # Fixed values are compared one by one.
        return ""
    far = abs(mean - its_mean) > spread * (0.5 + 4.0 * (2.0 / count) ** 0.5)
    if not far and 0.5 <= its_spread / spread <= 2.0:
        return ""
    return f"mean {its_mean:.2g} and standard deviation {its_spread:.2g} instead of {mean:.2g} and {spread:.2g}"


@OF_CONSTRUCTION.step("constructor")
def constructed_otherwise(subject: Subject, use: Use) -> list[Entry]:
    """Construct the module with another argument."""
    assert subject.constructor is not None
    instance = subject.new(subject.states[use.key], subject.constructor.with_argument(use), needs_all=True)
    return results(subject.call(instance))


@OF_CONSTRUCTION.step("size")
def of_another_size(subject: Subject, use: Use) -> list[Entry]:
    """Construct the module for another size, and call it with arguments of this size."""
    assert subject.constructor is not None
    instance = subject.new(subject.states[use.key], subject.constructor.with_argument(use), needs_all=True)
    return results(subject.call(instance, subject.resized(use)))


@OF_CONSTRUCTION.step("many_instances")
def many_instances(subject: Subject, use: Use) -> list[Entry]:
    """Call one of many instances; what counts them in a candidate is then moved forward, as by many more."""
    if subject.constructor is None:
        raise NotApplicable("it is a function")
    before = kept_state(subject.module, None)
    end = process_time() + INSTANCES_SECONDS
    for _ in range(INSTANCES):
        if process_time() > end:
            break
        subject.constructor()
    entries = results(subject.call(subject.new()))
    if subject.is_candidate:
        after = kept_state(subject.module, None)
        counts = {name for name, value in after.items() if before.get(name, value) != value}
        move_forward(subject.module, None, counts)
    return [*entries, *results(subject.call(subject.new()), "later ")]
