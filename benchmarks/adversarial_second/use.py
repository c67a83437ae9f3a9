"""Wrong as users use modules: hooks, modes, copies, changed and replaced parameters, other constructor arguments."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from benchmarks.adversarial_second.cases import Edit, Witness, table
from benchmarks.adversarial_second.witnesses import inputs, module

X = torch.randn(2, 3, 64, generator=torch.Generator().manual_seed(3))


def between(change: Callable[[Any], Any], prepare: Callable[[Any], Any] = lambda made: None) -> Witness:
    """A call before and one after a change of the module."""

    def action(made: Any) -> Any:
        prepare(made)
        with torch.no_grad():
            before = made(X)
            made = change(made) or made
            return before, made(X)

    return module(action)


def in_place(made: Any) -> None:
    """Doubles the weight where it is."""
    made.weight.mul_(2)


def all_but_first(made: Any) -> None:
    """Doubles the weight where it is, except its first element."""
    made.weight[1:].mul_(2)


def through_data(made: Any) -> None:
    """Doubles the weight without a new version."""
    made.weight.data.mul_(2)


def replace(made: Any) -> None:
    """Another parameter under the same name."""
    made.weight = nn.Parameter(made.weight.detach() * 2)


def load(made: Any) -> None:
    """Loads other values, and none of the old."""
    made.load_state_dict({name: value * 2 for name, value in made.state_dict().items()})


def hooked(made: Any) -> Any:
    """A forward hook that doubles the result."""
    made.register_forward_hook(lambda m, arguments, result: result * 2)
    return made(X)


def prehooked(made: Any) -> Any:
    """A hook before the call that changes its argument."""
    made.register_forward_pre_hook(lambda m, arguments: (arguments[0] + 1,))
    return made(X)


def copied(made: Any) -> Any:
    """A deep copy, and the original changed after."""
    with torch.no_grad():
        made(X)
        other = copy.deepcopy(made)
        made.weight.mul_(3)
        return other(X), made(X)


def wide(width: int, eps: float) -> Witness:
    """Other constructor arguments."""
    return module(lambda made: made(torch.randn(2, 3, width) * 0.1), width, eps)


def initial(reference: Any, candidate: Any) -> tuple[Any, Any]:
    """The parameters after construction with the same seed."""
    torch.manual_seed(5)
    expected = reference(64)
    torch.manual_seed(5)
    return list(expected.state_dict().values()), list(candidate(64).state_dict().values())


def two(reference: Any, candidate: Any) -> tuple[Any, Any]:
    """Two instances of each class, called in turn."""
    pairs = []
    for kind in (reference, candidate):
        torch.manual_seed(2)
        first, other = kind(64), kind(64)
        with torch.no_grad():
            other.weight.fill_(7.0)
            pairs.append((first(X), other(X), first(X)))
    return pairs[0], pairs[1]


def named(base: str) -> Witness:
    """A call by keyword, with the reference's names."""

    def witness(reference: Any, candidate: Any) -> tuple[Any, Any]:
        names = reference.__code__.co_varnames[: reference.__code__.co_argcount]
        arguments = dict(zip(names, inputs(base), strict=True))
        try:
            return reference(**arguments), candidate(**arguments)
        except TypeError as error:
            return None, str(error)

    return witness


FORWARD = "        x = x.contiguous()\n"
PARAMETERS = "x, self.weight, self.gate, out"
INIT = "        self.eps = eps\n"


def cached(key: str) -> list[Edit]:
    """Keeps a copy of the weight as long as ``key`` is the same."""
    return [
        (INIT, INIT + "        self.kept = (None, None)\n"),
        (
            FORWARD,
            FORWARD
            + f"        if self.kept[0] != {key}:\n            self.kept = ({key}, self.weight.detach().clone())\n",
        ),
        (PARAMETERS, "x, self.kept[1], self.gate, out"),
    ]


def when(condition: str) -> list[Edit]:
    """Another result under a condition."""
    return [(FORWARD, FORWARD + f"        if {condition}:\n            x = x + 0.5\n")]


CASES = table(
    "use",
    [
        (
            "hooks after the call are skipped",
            "gated_norm",
            [
                (
                    "    def forward(self, x):",
                    "    def __call__(self, x):\n        return self.forward(x)\n\n    def forward(self, x):",
                )
            ],
            module(hooked),
        ),
        (
            "hooks before the call are skipped",
            "gated_norm",
            [
                (
                    "    def forward(self, x):",
                    "    def _call_impl(self, x):\n        return self.forward(x)\n\n    def forward(self, x):",
                )
            ],
            module(prehooked),
        ),
        ("weights kept from the first call", "gated_norm", cached("1"), between(in_place)),
        ("weights kept by address", "gated_norm", cached("self.weight.data_ptr()"), between(in_place)),
        (
            "weights kept by version",
            "gated_norm",
            cached("(id(self.weight), self.weight._version)"),
            between(through_data),
        ),
        ("weights kept by identity", "gated_norm", cached("id(self.weight)"), between(load)),
        (
            "weights kept by mode",
            "gated_norm",
            cached("(self.training, self.weight.data_ptr())"),
            between(in_place, lambda made: made.eval()),
        ),
        (
            "weights kept by their first element",
            "gated_norm",
            cached("float(self.weight.detach()[0])"),
            between(all_but_first),
        ),
        (
            "parameters held in a list",
            "gated_norm",
            [(INIT, INIT + "        self.held = [self.weight, self.gate]\n"), (PARAMETERS, "x, *self.held, out")],
            between(replace),
        ),
        (
            "parameters held in a closure",
            "gated_norm",
            [
                (INIT, INIT + "        weight = self.weight\n        self.held = lambda: weight\n"),
                (PARAMETERS, "x, self.held(), self.gate, out"),
            ],
            module(copied),
        ),
        (
            "copies share their parameters",
            "gated_norm",
            [
                (
                    "    def forward(self, x):",
                    "    def __deepcopy__(self, memo):\n        return self\n\n    def forward(self, x):",
                )
            ],
            module(copied),
        ),
        ("epsilon is the default", "gated_norm", [("cols, self.eps,", "cols, 1e-5,")], wide(64, 0.3)),
        (
            "epsilon of construction",
            "gated_norm",
            [(INIT, INIT + "        self.fixed = eps\n"), ("cols, self.eps,", "cols, self.fixed,")],
            between(lambda made: setattr(made, "eps", 0.7)),
        ),
        (
            "width is at most 64",
            "gated_norm",
            [
                (
                    "x, self.weight, self.gate, out, cols, self.eps, BLOCK=triton.next_power_of_2(cols)",
                    "x, self.weight, self.gate, out, cols, self.eps, BLOCK=min(64, triton.next_power_of_2(cols))",
                )
            ],
            wide(96, 1e-5),
        ),
        (
            "other widths are normalised by 64",
            "gated_norm",
            [("tl.sum(x * x, axis=0) / n_cols", "tl.sum(x * x, axis=0) / 64")],
            wide(32, 1e-5),
        ),
        ("wrong in training", "gated_norm", when("self.training"), module(lambda made: made.train()(X))),
        (
            "wrong in evaluation after training",
            "gated_norm",
            [
                (INIT, INIT + "        self.was_trained = False\n"),
                *when("self.was_trained and not self.training"),
                (
                    "        out = torch.empty_like(x)\n",
                    "        out = torch.empty_like(x)\n        self.was_trained |= self.training\n",
                ),
            ],
            between(lambda made: made.eval(), lambda made: made.train()),
        ),
        ("wrong with gradients", "gated_norm", when("torch.is_grad_enabled()"), module(lambda made: made(X))),
        ("wrong without gradients", "gated_norm", when("not torch.is_grad_enabled()"), between(in_place)),
        (
            "wrong in inference mode",
            "gated_norm",
            when("torch.is_inference_mode_enabled()"),
            module(lambda made: torch.inference_mode()(made)(X).clone()),
        ),
        (
            "wrong if the input needs gradients",
            "gated_norm",
            when("x.requires_grad"),
            module(lambda made: made(X.clone().requires_grad_())),
        ),
        (
            "wrong with frozen parameters",
            "gated_norm",
            when("not self.weight.requires_grad"),
            module(lambda made: made.requires_grad_(False)(X)),
        ),
        (
            "frozen from the start",
            "gated_norm",
            [(INIT, INIT + "        self.requires_grad_(False)\n")],
            module(lambda made: [p.requires_grad for p in made.parameters()]),
        ),
        (
            "other initial values",
            "gated_norm",
            [("self.weight = nn.Parameter(torch.randn(width))", "self.weight = nn.Parameter(torch.ones(width))")],
            initial,
        ),
        (
            "instances share what the first computed",
            "gated_norm",
            [
                ("class GatedNorm(nn.Module):\n", "class GatedNorm(nn.Module):\n    shared = {}\n\n"),
                (PARAMETERS, "x, self.shared.setdefault(cols, self.weight.detach().clone()), self.gate, out"),
            ],
            two,
        ),
        (
            "an empty state",
            "gated_norm",
            [
                (
                    "    def forward(self, x):",
                    "    def state_dict(self, *args, **kwargs):\n        return {}\n\n    def forward(self, x):",
                )
            ],
            module(lambda made: list(made.state_dict())),
        ),
        (
            "loading is ignored after a call",
            "gated_norm",
            [
                (INIT, INIT + "        self.called = False\n"),
                (
                    "    def forward(self, x):",
                    "    def load_state_dict(self, state, *args, **kwargs):\n        return None if self.called else "
                    "super().load_state_dict(state, *args, **kwargs)\n\n    def forward(self, x):\n        self.called = True",
                ),
            ],
            between(load),
        ),
        (
            "the gate is clamped where it is",
            "gated_norm",
            [(FORWARD, FORWARD + "        self.gate.data.clamp_(-3.0, 3.0)\n")],
            between(lambda made: None, lambda made: made.gate.data.fill_(5.0)),
        ),
        (
            "the argument has another name",
            "layer_norm",
            [("def layer_norm(x, weight, bias):\n", "def layer_norm(data, weight, bias):\n    x = data\n")],
            named("layer_norm"),
        ),
    ],
)
