"""The steps of the use script: what a user's program does with a function or a module besides one plain call."""

from __future__ import annotations

from dataclasses import dataclass

from mtmc_lsp.core.sizes import PlainNumber

WORDS = {
    "load_state_dict": "after load_state_dict",
    "replaced": "after its parameters were replaced by new ones",
    "in_place": "after its parameters were changed in place",
    "buffers": "after its buffers were changed in place",
    "interior": "after its parameters were changed in place except at their ends",
    "special_values": "with parameters that are partly zero, or equal",
    "toggled": "after train(), a change of its parameters in place, and eval()",
    "trained": "after calls in training mode and many changes of its parameters",
    "instances": "with a second instance that has other parameters",
    "deepcopy": "after copy.deepcopy and a change of the copy's parameters",
    "pickle": "after a pickle round trip and a change of the copy's parameters",
    "call": "called by instance(...)",
    "pre_hook": "with a forward pre-hook that changes the arguments",
    "hook": "with a forward hook that changes the result",
    "submodule_hook": "with a forward hook on {name}",
    "train": "after train()",
    "eval": "after eval()",
    "dtype": "after double() and back",
    "frozen": "after requires_grad_(False)",
    "names": "its parameters and buffers",
    "initial": "its initial parameters",
    "constructor": "constructed with {name}={value}",
    "size": "constructed with {name}={value}, and with arguments of this size",
    "attribute": "after {name} was set to {value}",
    "constructor_default": "the default of {name} in its constructor",
    "default": "the default of {name}",
    "number": "called with {name}={value}",
    "keywords": "called with keyword arguments",
    "positional": "called with positional arguments, without those that have a default",
    "inference_mode": "in torch.inference_mode",
    "gradients": "with gradients enabled",
    "argument_gradients": "with arguments that require gradients",
    "no_grad": "under torch.no_grad with arguments that require gradients",
    "parameter_arguments": "with nn.Parameter objects as arguments",
    "kept_results": "after a later call on other values",
    "changed_results": "after its results were changed in place",
    "thread": "called from two threads in turn",
    "autocast": "under torch.autocast",
    "settings": "called with other settings of torch and Python",
    "many_calls": "called many times on other values",
    "many_instances": "after many other instances were constructed",
}
"""Kinds of steps, in the order in which they run, with a phrase for messages."""
MAY_RAISE = frozenset(
    "toggled trained deepcopy pickle train eval constructor size attribute number gradients argument_gradients no_grad "
    "parameter_arguments autocast settings".split()
)
"""Kinds in which a candidate may raise an exception: users notice errors, but not other values."""


@dataclass(frozen=True)
class Use:
    """One step."""

    kind: str
    """A key of :data:`WORDS`."""
    name: str = ""
    """The parameter or submodule that it is about."""
    value: PlainNumber | bool = 0
    """The value that the parameter gets."""
    position: int = -1
    """The position of a constructor argument that is passed by position."""
    before: PlainNumber | bool = 0
    """The value that the parameter or attribute has otherwise."""

    @property
    def words(self) -> str:
        """A phrase for messages."""
        return WORDS[self.kind].format(name=self.name, value=self.value)

    @property
    def key(self) -> str:
        """A text that no other step of a script has."""
        key = f"{self.kind} {self.name}".strip()
        return f"{key}={self.value}" if self.kind in ("constructor", "size") and type(self.value) is int else key
