"""Steps about calls of a function or a module: how arguments are passed, gradients, threads, settings, what happens to results.

Runs in workers.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch._tensor_str import PRINT_OPTS

from mtmc_lsp.verify.use.uses import Use
from mtmc_lsp.verify.worker.observation.global_state import RANDOM_STATE, changed_state, global_state
from mtmc_lsp.verify.worker.run_target import flatten, gradients
from mtmc_lsp.verify.worker.use.steps import Entry, Steps, results, values
from mtmc_lsp.verify.worker.use.subject import Subject, is_number
from mtmc_lsp.verify.worker.values.float8 import reversed_and_scaled

OTHER_SCALE = 0.5
CHANGES = "global state that it changes"
"""Name of the entry with the names of what a call changes."""

OF_CALLS = Steps()


@OF_CALLS.step("positional")
def positional(subject: Subject, use: Use) -> list[Entry]:
    """Pass arguments in the reference's order, and rely on defaults."""
    return results(subject.call(subject.new(), is_positional=True))


@OF_CALLS.step("keywords")
def keywords(subject: Subject, use: Use) -> list[Entry]:
    """Pass all arguments by the reference's names: a candidate with the reference's name replaces it in each call."""
    target = subject.new()
    arguments = subject.by_keyword(target)
    torch.manual_seed(subject.seed)
    return results(subject.function_of(target)(**arguments))


@OF_CALLS.step("default")
def default(subject: Subject, use: Use) -> list[Entry]:
    """Read the default of a parameter of the call."""
    return _default(subject.signature(subject.new()).parameters, use.name)


@OF_CALLS.step("constructor_default")
def constructor_default(subject: Subject, use: Use) -> list[Entry]:
    """Read the default of a parameter of the constructor."""
    assert subject.constructor is not None
    return _default(subject.constructor.signature().parameters, use.name)


def _default(parameters: Mapping[str, Any], name: str) -> list[Entry]:
    value = parameters[name].default if name in parameters else None
    # None may stand for a number that the code computes.
    return [Entry("it", value if is_number(value) else None, is_optional=True)]


@OF_CALLS.step("number")
def number(subject: Subject, use: Use) -> list[Entry]:
    """Pass another value of a Python number."""
    return results(subject.call(subject.new(), number=use))


@OF_CALLS.step("inference_mode")
def inference_mode(subject: Subject, use: Use) -> list[Entry]:
    """Call in inference mode."""
    with torch.inference_mode():
        return results(subject.call(subject.new()))


@OF_CALLS.step("no_grad")
def no_grad(subject: Subject, use: Use) -> list[Entry]:
    """Pass arguments that require gradients, without recording them."""
    tensors = {name: value.requires_grad_(value.is_floating_point()) for name, value in subject.fresh().items()}
    return results(subject.call(subject.new(), tensors))


@OF_CALLS.step("parameter_arguments")
def parameter_arguments(subject: Subject, use: Use) -> list[Entry]:
    """Pass parameters as arguments."""
    tensors = {
        name: torch.nn.Parameter(value) if value.is_floating_point() else value
        for name, value in subject.fresh().items()
    }
    return results(subject.call(subject.new(), tensors))


@OF_CALLS.step("gradients", records_gradients=True)
def gradients_of_parameters(subject: Subject, use: Use) -> list[Entry]:
    """Call while gradients are recorded."""
    target = subject.new()
    return _with_gradients(subject.call(target), _leaves(subject, target))


@OF_CALLS.step("argument_gradients", records_gradients=True)
def gradients_of_arguments(subject: Subject, use: Use) -> list[Entry]:
    """Call with arguments that require gradients."""
    target, tensors = subject.new(), subject.fresh()
    leaves = {name: value.requires_grad_() for name, value in tensors.items() if value.is_floating_point()}
    return _with_gradients(subject.call(target, tensors), {**leaves, **_leaves(subject, target)})


def _leaves(subject: Subject, target: Any) -> dict[str, torch.Tensor]:
    held = subject.parameters(target) if subject.constructor is not None else {}
    return {name: held.get(name, torch.empty(0)) for name in subject.tensors.parameters}


def _with_gradients(returned: Any, leaves: Mapping[str, torch.Tensor]) -> list[Entry]:
    """The results and their gradients. A candidate may return results without gradients, or raise an error for them."""
    flat = flatten(returned)
    entries = results(returned)
    found: list[torch.Tensor | None] = [None] * len(leaves)
    has_gradients = any(isinstance(value, torch.Tensor) and value.requires_grad for value in flat)
    is_connected: bool | None = None
    if has_gradients:
        used = [leaf.requires_grad for leaf in leaves.values()]
        try:
            computed = iter(gradients(flat, [leaf for leaf in leaves.values() if leaf.requires_grad]))
            found = [next(computed) if is_used else None for is_used in used]
            is_connected = any(gradient is not None for gradient in found)
        except (RuntimeError, NotImplementedError):
            is_connected = None
    connected = Entry("whether the result has gradients of any input", is_connected, is_optional=True)
    by_leaf = [
        Entry(f"gradient of {name}", gradient.detach() if gradient is not None else None, is_optional=True)
        for name, gradient in zip(leaves, found, strict=True)
    ]
    return [*entries, connected, *by_leaf]


@OF_CALLS.step("kept_results")
def kept_results(subject: Subject, use: Use) -> list[Entry]:
    """Call again on other values, and look at the first results afterwards."""
    target = subject.new()
    first = subject.call(target)
    other = {
        name: reversed_and_scaled(value, OTHER_SCALE) if value.is_floating_point() else value
        for name, value in subject.fresh().items()
    }
    second = subject.call(target, other)
    return [*results(first, "first "), *results(second, "second ")]


@OF_CALLS.step("changed_results")
def changed_results(subject: Subject, use: Use) -> list[Entry]:
    """Change the results in place, and call again."""
    target, tensors = subject.new(), subject.fresh()
    for value in flatten(subject.call(target, tensors)):
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            value.add_(1)
    return [*results(subject.call(target)), *values(tensors, "argument {}")]


@OF_CALLS.step("thread")
def thread(subject: Subject, use: Use) -> list[Entry]:
    """Call from the main thread, from another one, and from the main thread again."""
    target = subject.new()
    other: list[Any] = []

    def run() -> None:
        try:
            with torch.no_grad():
                other.append(subject.call(target))
        except Exception as error:
            other.append(error)

    first = subject.call(target)
    running = threading.Thread(target=run)
    running.start()
    running.join()
    if isinstance(other[0], Exception):
        raise other[0]
    return [*results(first, "first "), *results(other[0], "second "), *results(subject.call(target), "third ")]


@OF_CALLS.step("autocast")
def autocast(subject: Subject, use: Use) -> list[Entry]:
    """Call under autocast, and without it: a kernel need not compute in the lower precision."""
    with torch.autocast(subject.device, torch.bfloat16):
        lower = subject.call(subject.new())
    return [*results(lower), *results(subject.call(subject.new()), "usual ")]


@OF_CALLS.step("settings")
def settings(subject: Subject, use: Use) -> list[Entry]:
    """Call with other settings than in the other steps: a call may set what is set there already."""
    target = subject.new()
    changed = set[str]()
    for other in (_other_settings(), _other_dtype()):
        with other:
            torch.manual_seed(subject.seed)
            before = global_state()
            # Only what it changes counts: a call that fails may change as much.
            with contextlib.suppress(Exception):
                subject.call(target)
            changed.update(changed_state(before))
    return [Entry(CHANGES, ", ".join(sorted(changed - {RANDOM_STATE})))]


@contextlib.contextmanager
def _other_settings() -> Iterator[None]:
    """Settings on which no result depends."""
    recursion, interval, precision = sys.getrecursionlimit(), sys.getswitchinterval(), PRINT_OPTS.precision
    sys.setrecursionlimit(recursion + 500)
    sys.setswitchinterval(interval * 0.8)
    PRINT_OPTS.precision = precision + 2
    try:
        with torch.enable_grad():
            yield
    finally:
        sys.setrecursionlimit(recursion)
        sys.setswitchinterval(interval)
        PRINT_OPTS.precision = precision


@contextlib.contextmanager
def _other_dtype() -> Iterator[None]:
    usual = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64 if usual is torch.float32 else torch.float32)
    try:
        yield
    finally:
        torch.set_default_dtype(usual)
