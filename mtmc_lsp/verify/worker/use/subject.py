"""The reference or the candidate as a user's program sees it: something that is constructed, called and changed.

Both processes run the same steps on their subject. Tensors of the module are named as in the reference. Runs in workers.
"""

from __future__ import annotations

import ast
import contextlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from mtmc_lsp.capture.accesses import dotted
from mtmc_lsp.capture.worker.arguments.values import resolve, seed_torch
from mtmc_lsp.capture.worker.autocast.regions import under_autocast
from mtmc_lsp.capture.worker.calls import constructed, set_mode
from mtmc_lsp.core.errors import Location
from mtmc_lsp.core.graph import InputKind
from mtmc_lsp.core.workload import Capture, Target, TargetKind
from mtmc_lsp.verify.messages import CandidateSource, CaseRequest
from mtmc_lsp.verify.use.uses import Use
from mtmc_lsp.verify.worker.callers import (
    candidate_instance,
    corresponding_names,
    held_tensors,
    module_of_candidate,
    passed_arguments,
)
from mtmc_lsp.verify.worker.inputs import prepared_call, read_tensor, replace_tensor, slots_of
from mtmc_lsp.verify.worker.instances import SharedInstance
from mtmc_lsp.verify.worker.run_target import copies
from mtmc_lsp.verify.worker.values.float8 import reversed_and_scaled

Tensors = dict[str, torch.Tensor]


class NotApplicable(Exception):
    """The subject has no such parameter or submodule, so the step says nothing about it."""


@dataclass(frozen=True)
class Constructor:
    """How the subject's module is constructed."""

    kind: Any
    positional: Sequence[Any]
    named: Mapping[str, Any]
    device: str
    dtype: str
    takes_reference_arguments: bool = True

    def signature(self) -> inspect.Signature:
        """Of the class."""
        return inspect.signature(self.kind)

    def with_argument(self, use: Use) -> Constructor:
        """With the argument that a step changes.

        Raises:
            NotApplicable: the constructor has no such parameter.
        """
        if not self.takes_reference_arguments:
            raise NotApplicable("its constructor takes other arguments")
        positional, named = list(self.positional), dict(self.named)
        if use.position >= 0:
            positional[use.position] = use.value
        else:
            named[use.name] = use.value
        try:
            self.signature().bind(*positional, **named)
        except TypeError as error:
            raise NotApplicable(str(error)) from None
        return replace(self, positional=positional, named=named)

    def __call__(self) -> torch.nn.Module:
        """A new module."""
        return constructed(self.kind, self.positional, self.named, self.device, self.dtype, as_program=True)


@dataclass(frozen=True)
class ModuleTensors:
    """The parameters and buffers of the reference, by its names."""

    state: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """The values of a case."""
    parameters: tuple[str, ...] = ()
    buffers: tuple[str, ...] = ()
    """Floating-point buffers."""
    persistent: tuple[str, ...] = ()
    """Keys of the state dict."""
    is_tied: bool = False
    """Whether one parameter has two names."""


@dataclass(frozen=True)
class Subject:
    """The reference or the candidate, with the values of one case. What it returns is new at each call."""

    module: Any
    target: Target
    capture: Capture
    device: str
    seed: int
    inputs: Mapping[str, torch.Tensor]
    """The arguments of the call."""
    constructor: Constructor | None = None
    """``None`` for functions."""
    tensors: ModuleTensors = ModuleTensors()
    names: Mapping[str, str] = field(default_factory=dict)
    """The subject's name of each tensor of the reference."""
    states: Mapping[str, Mapping[str, torch.Tensor]] = field(default_factory=dict)
    """The tensors of modules that are constructed with other arguments, by :attr:`Use.key`."""
    rows: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """The floating-point arguments of many calls, one call in each row."""
    is_candidate: bool = False

    def new(
        self,
        state: Mapping[str, torch.Tensor] | None = None,
        constructor: Constructor | None = None,
        *,
        needs_all: bool = False,
    ) -> Any:
        """A new module with the case's tensors or others, or the function.

        Args:
            needs_all: whether the step may read tensors that the case does not read.

        Raises:
            NotApplicable: it has no tensor that corresponds to one of them.
        """
        constructor = constructor or self.constructor
        if constructor is None:
            return resolve(self.module, self.target.qualname)
        torch.manual_seed(0)
        instance = constructor()
        set_mode(instance, self.capture.workload)
        held, slots = self.held(instance), slots_of(instance)
        for name, value in (self.tensors.state if state is None else state).items():
            if name in held and held[name].shape == value.shape:
                replace_tensor(slots[id(held[name])], value.clone())
            elif name in held or (needs_all and value.is_floating_point()):
                raise NotApplicable(f"no tensor corresponds to {name}")
        return instance

    def held(self, instance: torch.nn.Module) -> Tensors:
        """The module's tensors by the reference's names."""
        named = {
            **dict(instance.named_parameters(remove_duplicate=False)),
            **dict(instance.named_buffers(remove_duplicate=False)),
        }
        held = {name: named[here] for name, here in self.names.items() if here in named}
        if not self.names:
            # Plain attributes of the reference may hold tensors, too.
            for item in self.capture.graph.inputs:
                if item.kind is not InputKind.ARGUMENT:
                    with contextlib.suppress(AttributeError, LookupError):
                        held[dotted(item.access)] = read_tensor(instance, item.access)
            held.update(named)
        return held

    def parameters(self, instance: torch.nn.Module) -> Tensors:
        """The tensors that are parameters of the reference."""
        held = self.held(instance)
        return {name: held[name] for name in self.tensors.parameters if name in held}

    def buffers(self, instance: torch.nn.Module) -> Tensors:
        """The tensors that are floating-point buffers of the reference."""
        held = self.held(instance)
        return {name: held[name] for name in self.tensors.buffers if name in held}

    def name_here(self, name: str) -> str:
        """The subject's name of a tensor of the reference."""
        return self.names.get(name, name)

    def fresh(self) -> Tensors:
        """The arguments in new tensors."""
        return copies(self.inputs)

    def resized(self, use: Use) -> Tensors:
        """The arguments, with another length of the dimensions that a constructor argument determines."""
        variable = set(self.capture.variable_sizes)
        types = {item.name: item.type for item in self.capture.graph.inputs}
        tensors = self.fresh()
        for name, value in tensors.items():
            for dim, size in enumerate(types[name].shape):
                if value.shape[dim] == use.before and variable.isdisjoint(size.symbols()):
                    value = repeated_to(value, dim, int(use.value))
            tensors[name] = value
        return tensors

    def function_of(self, instance: Any) -> Callable[..., Any]:
        """What a user calls."""
        if self.target.kind is TargetKind.METHOD and not self.is_forward:
            method: Callable[..., Any] = getattr(instance, self.target.qualname.rpartition(".")[2])
            return under_autocast(method, self.capture.workload.autocast, self.device)
        return under_autocast(instance, self.capture.workload.autocast, self.device)

    @property
    def is_forward(self) -> bool:
        """Whether the target is what a module does when it is called."""
        is_method = self.target.kind is TargetKind.METHOD and self.target.qualname.endswith(".forward")
        return self.target.kind is TargetKind.MODULE or is_method

    def signature(self, instance: Any) -> inspect.Signature:
        """The parameters of the call."""
        return inspect.signature(instance.forward if self.is_forward else self.function_of(instance))

    def by_keyword(self, instance: Any) -> dict[str, Any]:
        """All arguments of a call by the reference's names.

        Raises:
            NotApplicable: it has another name than the reference, so it need not have the same parameters, or takes ``*args``.
        """
        expected = self.capture.workload.target
        if self.target.qualname != expected.qualname:
            raise NotApplicable(f"its name is {self.target.qualname}, not {expected.qualname}")
        where = Location(self.target.path, self.target.start_line)
        parameters = self.signature(instance).parameters
        values, further = passed_arguments(self.module, parameters, self.capture, self.fresh(), where)
        if further:
            raise NotApplicable("it takes further positional arguments")
        return values

    def arguments(
        self, instance: Any, tensors: Mapping[str, torch.Tensor], *, is_positional: bool, number: Use | None
    ) -> tuple[list[Any], dict[str, Any]]:
        """The positional and the keyword arguments of a call.

        Raises:
            NotApplicable: it cannot be called in this way.
        """
        signature = self.signature(instance)
        parameters, where = signature.parameters, Location(self.target.path, self.target.start_line)
        capture = self.capture.with_numbers({number.name: number.value}) if number is not None else self.capture
        values, further = passed_arguments(self.module, parameters, capture, tensors, where)
        defaults = {name for name in values if self._is_default(name)}
        if is_positional:
            values = {name: value for name, value in values.items() if name not in defaults}
        by_name = not is_positional and not further and all(name in parameters for name in values)
        kinds = {name: parameter.kind for name, parameter in parameters.items()}
        # A candidate with other names may still have the reference's names for what the workload leaves to defaults.
        named = {
            name: value
            for name, value in values.items()
            if kinds.get(name) is inspect.Parameter.KEYWORD_ONLY
            or (kinds.get(name) is inspect.Parameter.POSITIONAL_OR_KEYWORD and (by_name or name in defaults))
        }
        if number is not None and (number.name not in values or number.name in defaults - {*named}):
            raise NotApplicable(f"it has no parameter {number.name}")
        positional = [*(value for name, value in values.items() if name not in named), *further]
        try:
            signature.bind(*positional, **named)
        except TypeError as error:
            raise NotApplicable(str(error)) from None
        return positional, named

    def _is_default(self, name: str) -> bool:
        """Whether the workload leaves an argument to its default."""
        argument = next(item for item in self.capture.arguments if item.name == name)
        specified = {spec.name for spec in self.capture.workload.arguments}
        return name not in specified and not any(leaf.input for leaf in argument.leaves)

    def call(
        self,
        instance: Any,
        tensors: Mapping[str, torch.Tensor] | None = None,
        *,
        is_positional: bool = False,
        number: Use | None = None,
    ) -> Any:
        """The return value of a call on the case's arguments, or on these.

        Args:
            is_positional: whether arguments are passed by position, without those that the workload leaves to their defaults.
            number: the step that gives a Python number another value.
        """
        tensors = self.fresh() if tensors is None else tensors
        positional, named = self.arguments(instance, tensors, is_positional=is_positional, number=number)
        seed_torch(self.seed)
        return self.function_of(instance)(*positional, **named)


class _Recording:
    """Constructs modules, and remembers how the first one was constructed."""

    def __init__(self) -> None:
        self._constructors: list[Constructor] = []

    @property
    def first(self) -> Constructor:
        return self._constructors[0]

    def __call__(self, kind: Any, positional: Any, named: Any, device: str, dtype: str = "") -> torch.nn.Module:
        self._constructors.append(Constructor(kind, positional, named, device, dtype))
        return self._constructors[-1]()


def reference_subject(module: Any, data: CaseRequest, inputs: Mapping[str, torch.Tensor], device: str) -> Subject:
    """The user's code."""
    capture, target = data.call, data.call.workload.target
    construct = _Recording()
    call, _ = prepared_call(module, capture, copies(inputs), device, shared=SharedInstance(construct))
    subject = Subject(module, target, capture, device, data.case.seed, _arguments_of(capture, inputs))
    if call.instance is None:
        return subject
    parameters, buffers = (dict(named()) for named in (call.instance.named_parameters, call.instance.named_buffers))
    held = subject.held(call.instance)
    tensors = ModuleTensors(
        {name: tensor.detach().clone() for name, tensor in held.items()},
        tuple(name for name, tensor in parameters.items() if tensor.is_floating_point()),
        tuple(name for name, tensor in buffers.items() if tensor.is_floating_point()),
        tuple(call.instance.state_dict()),
        len(parameters) < len([*call.instance.named_parameters(remove_duplicate=False)]),
    )
    return replace(subject, constructor=construct.first, tensors=tensors)


def candidate_subject(
    source: CandidateSource,
    data: CaseRequest,
    inputs: Mapping[str, torch.Tensor],
    device: str,
    tensors: ModuleTensors,
    states: Mapping[str, Mapping[str, torch.Tensor]],
    rows: Mapping[str, torch.Tensor],
) -> Subject:
    """A separate candidate.

    Args:
        tensors: of the reference.
        states: as :attr:`Subject.states`.
        rows: as :attr:`Subject.rows`.
    """
    assert source.separate is not None
    target, init, capture = source.separate.target, source.separate.init, data.call
    module = module_of_candidate(target, source.text)
    arguments = _arguments_of(capture, inputs)
    subject = Subject(module, target, capture, device, data.case.seed, arguments, rows=rows, is_candidate=True)
    if target.kind not in (TargetKind.MODULE, TargetKind.METHOD):
        return subject
    construct = _Recording()
    instance = candidate_instance(module, target, capture, device, init, construct)
    shapes = {name: value.shape for name, value in inputs.items()}
    by_input = corresponding_names(instance, capture, shapes, target)
    accesses = {item.name: dotted(item.access) for item in capture.graph.inputs}
    names = {accesses[name]: here for name, here in by_input.items()}
    held = held_tensors(instance)
    # The graph lacks tensors that another mode reads.
    names |= {
        name: name
        for name, value in tensors.state.items()
        if name not in names and name not in names.values() and name in held and held[name].shape == value.shape
    }
    positional, named = ast.literal_eval(init)
    expected = (len(positional), {*named, *(spec.name for spec in capture.workload.init_arguments)})
    constructor = construct.first
    takes_same = expected == (len(constructor.positional), {*constructor.named})
    constructor = replace(constructor, takes_reference_arguments=takes_same)
    return replace(subject, constructor=constructor, tensors=tensors, names=names, states=states)


def repeated_to(value: torch.Tensor, dim: int, length: int) -> torch.Tensor:
    """A tensor with another length of one dimension, in which its values repeat."""
    return value.index_select(dim, torch.arange(length, device=value.device) % value.shape[dim])


def other_values(value: torch.Tensor) -> torch.Tensor:
    """Other values of a parameter, in another order, so that no normalisation hides them."""
    return reversed_and_scaled(value, 1.5) if value.is_floating_point() else value.clone()


def _arguments_of(capture: Capture, inputs: Mapping[str, torch.Tensor]) -> Tensors:
    names = {item.name for item in capture.graph.inputs if item.kind is InputKind.ARGUMENT}
    return {name: value for name, value in inputs.items() if name in names}


def owner_of(instance: torch.nn.Module, name: str) -> tuple[torch.nn.Module, str]:
    """The submodule and its attribute that hold a tensor."""
    path, _, attribute = name.rpartition(".")
    return instance.get_submodule(path), attribute


def is_number(value: Any) -> bool:
    """Whether a value is a Python number or a truth value."""
    return isinstance(value, (bool, int, float))


def changed_number(value: Any) -> Any:
    """Another number that is probably valid as well: a float between 0 and 1 stays between them."""
    if isinstance(value, bool):
        return not value
    return value + 1 if isinstance(value, int) else 0.5 * value + (0.25 if value >= 0 else -0.25)
