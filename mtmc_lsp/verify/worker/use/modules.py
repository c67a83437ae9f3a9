"""Steps about instances of modules: hooks, modes, changed and replaced parameters, copies. Runs in workers."""

from __future__ import annotations

import copy
import itertools
import pickle
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from mtmc_lsp.verify.use.uses import Use
from mtmc_lsp.verify.worker.use.steps import Entry, Steps, halved, removed, results, values
from mtmc_lsp.verify.worker.use.subject import NotApplicable, Subject, is_number, other_values, owner_of

OF_MODULES = Steps()
OPTIMISER_STEPS = 25
"""Changes of the parameters in place, as an optimiser's, between calls."""
MOST_NAMES = 3
"""Names of tensors that a message contains."""


@OF_MODULES.step("call")
def call(subject: Subject, use: Use) -> list[Entry]:
    """Call the instance, not its method."""
    return results(subject.call(subject.new()))


@OF_MODULES.step("pre_hook")
def pre_hook(subject: Subject, use: Use) -> list[Entry]:
    """Halve the arguments before each call."""
    instance = subject.new()

    def hook(_: Any, positional: Any, named: Any) -> Any:
        return halved(positional), halved(named)

    with removed(instance.register_forward_pre_hook(hook, with_kwargs=True)):
        return results(subject.call(instance))


@OF_MODULES.step("hook")
def hook(subject: Subject, use: Use) -> list[Entry]:
    """Halve the result of each call."""
    instance = subject.new()
    with removed(instance.register_forward_hook(lambda module, arguments, returned: halved(returned))):
        return results(subject.call(instance))


@OF_MODULES.step("submodule_hook")
def submodule_hook(subject: Subject, use: Use) -> list[Entry]:
    """Halve the results of a submodule."""
    instance = subject.new()
    prefix = f"{use.name}."
    if any(subject.name_here(name) != name for name in subject.tensors.state if name.startswith(prefix)):
        raise NotApplicable("it has other parameters")
    try:
        part = instance.get_submodule(use.name)
    except AttributeError as error:
        raise NotApplicable(str(error)) from None
    forward, calls = part.forward, [0]

    def counted(*positional: Any, **named: Any) -> Any:
        calls[0] += 1
        return forward(*positional, **named)

    part.forward = counted
    with removed(part.register_forward_hook(lambda module, arguments, returned: halved(returned))):
        returned = subject.call(instance)
    if not calls[0]:
        raise NotApplicable("its kernels compute what the submodule computes")
    return results(returned)


@OF_MODULES.step("train")
def train(subject: Subject, use: Use) -> list[Entry]:
    """Call in training mode."""
    return _in_mode(subject, is_training=True)


@OF_MODULES.step("eval")
def evaluation(subject: Subject, use: Use) -> list[Entry]:
    """Call in evaluation mode."""
    return _in_mode(subject, is_training=False)


def _in_mode(subject: Subject, *, is_training: bool) -> list[Entry]:
    instance = subject.new(needs_all=True)
    instance.train(is_training)
    returned = subject.call(instance)
    return [*results(returned), *values(subject.buffers(instance), "buffer {} afterwards")]


@OF_MODULES.step("toggled")
def toggled(subject: Subject, use: Use) -> list[Entry]:
    """Change parameters between two calls in evaluation mode, as training does."""
    instance = subject.new(needs_all=True)
    instance.eval()
    before = results(subject.call(instance))
    instance.train()
    changed = _change(subject.parameters(instance))
    instance.eval()
    return [*before, *results(subject.call(instance), changed=changed)]


@OF_MODULES.step("trained")
def trained(subject: Subject, use: Use) -> list[Entry]:
    """Alternate the modes as training and validation do, with many changes of the parameters in between."""
    instance = subject.new(needs_all=True)
    entries = []
    for is_training in (False, True, False, True, False):
        instance.train(is_training)
        words = "training" if is_training else "evaluation"
        entries += results(subject.call(instance), f"{words} ", changed=_words(subject.parameters(instance)))
        if is_training:
            _change(subject.parameters(instance))
            # Further changes in place keep the values, which would soon overflow.
            with torch.no_grad():
                for tensor in [*subject.parameters(instance).values()] * OPTIMISER_STEPS:
                    tensor.mul_(1.0)
    return entries


@OF_MODULES.step("interior")
def interior(subject: Subject, use: Use) -> list[Entry]:
    """Change the order of parameters' elements, but neither their ends nor their sum: copies must not be kept by these."""
    instance = subject.new()
    before = results(subject.call(instance))
    with torch.no_grad():
        for tensor in subject.parameters(instance).values():
            flat = tensor.detach().flatten()
            tensor.copy_(torch.cat([flat[:1], flat[1:-1].roll(1), flat[-1:]])[: flat.numel()].view(tensor.shape))
    return [*before, *results(subject.call(instance), changed=_words(subject.parameters(instance)))]


@OF_MODULES.step("special_values")
def special_values(subject: Subject, use: Use) -> list[Entry]:
    """Give parameters the values that pruning and initialisation give them."""
    instance = subject.new()
    entries = []
    for words, of in (("pruned ", _pruned), ("equal ", _equal)):
        with torch.no_grad():
            for tensor in subject.parameters(instance).values():
                tensor.copy_(of(tensor.detach()))
        entries += results(subject.call(instance), words)
    return entries


def _pruned(value: torch.Tensor) -> torch.Tensor:
    pruned = value.clone().flatten()
    pruned[1::3] = 0
    return pruned.view(value.shape)


def _equal(value: torch.Tensor) -> torch.Tensor:
    return torch.full_like(value, 0.75)


@OF_MODULES.step("attribute")
def attribute(subject: Subject, use: Use) -> list[Entry]:
    """Set a number of the module between two calls."""
    instance = subject.new()
    value = getattr(instance, use.name, None)
    if not is_number(value) or value != use.before:
        raise NotApplicable(f"it has no attribute {use.name} with this value")
    before = results(subject.call(instance))
    setattr(instance, use.name, use.value)
    return [*before, *results(subject.call(instance), changed=use.name)]


@OF_MODULES.step("load_state_dict")
def load_state_dict(subject: Subject, use: Use) -> list[Entry]:
    """Load other values of one tensor after the other, and of all others at once."""
    instance = subject.new()
    entries = results(subject.call(instance))
    persistent = subject.tensors.persistent
    state = {name: value.clone() for name, value in instance.state_dict().items()}
    loaded: dict[str, str] = {}
    for part in [*([name] for name in persistent[:MOST_NAMES]), persistent[MOST_NAMES:]]:
        for name in part:
            here = subject.name_here(name)
            # The candidate's tensor may have another name, and may be a buffer that its state dict leaves out.
            if name in subject.held(instance) and (here == name or here in state):
                loaded[name] = here
                state[here] = other_values(subject.tensors.state[name])
        if part:
            instance.load_state_dict(state)
            entries += results(subject.call(instance), changed=", ".join(part[:MOST_NAMES]))
    held = instance.state_dict()
    kept = [
        Entry(f"state_dict()[{name!r}]", held[loaded[name]].clone() if name in loaded else None, is_optional=True)
        for name in persistent
    ]
    return [*entries, *kept]


@OF_MODULES.step("replaced")
def replaced(subject: Subject, use: Use) -> list[Entry]:
    """Assign new parameters between two calls."""
    instance = subject.new()
    before = results(subject.call(instance))
    parameters = subject.parameters(instance)
    for name, value in parameters.items():
        owner, attribute = owner_of(instance, subject.name_here(name))
        changed = other_values(value.detach())
        is_parameter = isinstance(value, torch.nn.Parameter)
        setattr(owner, attribute, torch.nn.Parameter(changed, value.requires_grad) if is_parameter else changed)
    return [*before, *results(subject.call(instance), changed=_words(parameters))]


@OF_MODULES.step("in_place")
def in_place(subject: Subject, use: Use) -> list[Entry]:
    """Change the parameters in place between two calls."""
    instance = subject.new()
    before = results(subject.call(instance))
    changed = _change(subject.parameters(instance))
    return [*before, *results(subject.call(instance), changed=changed)]


@OF_MODULES.step("buffers")
def buffers(subject: Subject, use: Use) -> list[Entry]:
    """Change the buffers in place between two calls."""
    instance = subject.new()
    before = results(subject.call(instance))
    changed = _change(subject.buffers(instance))
    return [*before, *results(subject.call(instance), changed=changed)]


def _change(tensors: Mapping[str, torch.Tensor]) -> str:
    """Give tensors other values in place; returns their names for messages."""
    with torch.no_grad():
        for tensor in tensors.values():
            tensor.copy_(other_values(tensor.detach()))
    return _words(tensors)


def _words(names: Iterable[str]) -> str:
    return ", ".join(itertools.islice(names, MOST_NAMES))


@OF_MODULES.step("deepcopy")
def deepcopy(subject: Subject, use: Use) -> list[Entry]:
    """Copy a module that was called, and change the copy."""
    return _with_copy(subject, copy.deepcopy)


@OF_MODULES.step("pickle")
def pickled(subject: Subject, use: Use) -> list[Entry]:
    """The same by pickle."""
    return _with_copy(subject, lambda instance: pickle.loads(pickle.dumps(instance)))


def _with_copy(subject: Subject, copied: Callable[[Any], Any]) -> list[Entry]:
    instance = subject.new()
    before = results(subject.call(instance))
    other = copied(instance)
    changed = _change(subject.parameters(other))
    afterwards = results(subject.call(other), "the copy's ", changed)
    return [*before, *afterwards, *results(subject.call(instance), "the original's ")]


@OF_MODULES.step("instances")
def instances(subject: Subject, use: Use) -> list[Entry]:
    """Call two modules in turn."""
    other = {name: other_values(value) for name, value in subject.tensors.state.items()}
    first, second = subject.new(), subject.new(other)
    names = ("the first module's ", "the second module's ", "the first module's later ")
    return [
        entry
        for name, instance in zip(names, (first, second, first), strict=True)
        for entry in results(subject.call(instance), name)
    ]


@OF_MODULES.step("dtype")
def dtype(subject: Subject, use: Use) -> list[Entry]:
    """Convert the module to float64 and back, which gives it new memory."""
    instance = subject.new()
    before = results(subject.call(instance))
    kinds = {tensor.dtype for tensor in subject.held(instance).values() if tensor.is_floating_point()}
    if len(kinds) != 1 or torch.float64 in kinds:
        raise NotApplicable("its tensors have several dtypes")
    instance.double().to(kinds.pop())
    changed = _change(subject.parameters(instance))
    return [*before, *results(subject.call(instance), changed=changed)]


@OF_MODULES.step("frozen", records_gradients=True)
def frozen(subject: Subject, use: Use) -> list[Entry]:
    """Freeze the parameters."""
    instance = subject.new()
    instance.requires_grad_(False)
    return results(subject.call(instance))
