"""A program while it is written: its arguments, sizes, layers and statements, in the style of one author.

A family of programs calls the methods of :class:`Draft`, which write either a function or an ``nn.Module``. What is a tensor
argument of a function is a parameter or a layer of a module.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from mtmc_lsp.programs.expressions import atom
from mtmc_lsp.programs.sizes import CONSTRUCTOR_NAMES, DTYPES, MAX_ELEMENTS, MAX_INTERMEDIATE_ELEMENTS

Choice = TypeVar("Choice")
UNKNOWN = "?"
"""A size that no argument needs, such as that of an image after a strided convolution."""


@dataclass(frozen=True)
class Tensor:
    """A tensor of the program. Formatted, it is an operand: an expression in parentheses if it needs them."""

    text: str
    """A variable or an expression."""
    dims: tuple[str, ...]
    """Sizes as in a directive: ``B``, ``2*D``, ``64``."""
    dtype: str
    """As in a directive: ``bf16``."""

    def __str__(self) -> str:
        return atom(self.text)

    def __format__(self, spec: str) -> str:
        return str(self)

    @property
    def rank(self) -> int:
        """Number of dimensions."""
        return len(self.dims)


@dataclass(frozen=True)
class Style:
    """How one author writes."""

    is_module: bool
    reuses_names: bool
    """``x = F.relu(x)`` instead of a new variable."""
    nests: bool
    """Whether values that are read once are written inside the next expression."""
    is_annotated: bool
    names_numbers: bool
    """Whether constants are keyword arguments or attributes."""
    uses_methods: bool
    """``x.sum(-1)`` instead of ``torch.sum(x, dim=-1)``."""


class Draft:
    """Writes one program."""

    def __init__(self, source: random.Random, *, is_module: bool | None = None) -> None:
        self.random = source
        self.dtype = source.choice(DTYPES)
        module = source.random() < 0.5
        self.style = Style(
            is_module=module if is_module is None else is_module,
            reuses_names=source.random() < 0.5,
            nests=source.random() < 0.3,
            is_annotated=source.random() < 0.4,
            names_numbers=source.random() < 0.5,
            uses_methods=source.random() < 0.5,
        )
        self.sizes: dict[str, int] = {}
        self.arguments: dict[str, str] = {}
        """Tensor arguments, as in a directive."""
        self.numbers: dict[str, str] = {}
        """Keyword arguments of a function, or constructor arguments of a module, with their defaults."""
        self.constructor_sizes: dict[str, str] = {}
        """Constructor arguments and the named sizes that they have."""
        self.members: list[str] = []
        """Statements of the constructor."""
        self.lines: list[str] = []
        self._values: list[tuple[str, ...]] = []
        """Sizes of the values that statements compute."""
        self._settings: dict[str, str] = {}
        self._variables: set[str] = set()
        self._attributes: set[str] = set()
        self._kept: set[str] = set()

    # Choices -----------------------------------------------------------------------------------------------------

    @property
    def is_module(self) -> bool:
        """Whether an ``nn.Module`` is written."""
        return self.style.is_module

    def choose(self, *options: Choice) -> Choice:
        """One of the options."""
        return self.random.choice(options)

    def apply(self, value: Tensor, *pieces: Callable[[Draft, Tensor], Tensor]) -> Tensor:
        """One of the pieces, applied to the value."""
        return self.random.choice(pieces)(self, value)

    def chance(self, probability: float) -> bool:
        """Whether something of this probability happens."""
        return self.random.random() < probability

    def size(self, name: str, options: Sequence[int]) -> str:
        """A named size with one of these values."""
        if name not in self.sizes:
            self.sizes[name] = self.random.choice(options)
        return name

    def value(self, size: str) -> int:
        """The value of a size expression of names, numbers and products."""
        result = 1
        for factor in size.split("*"):
            result *= self.sizes[factor] if factor in self.sizes else int(factor)
        return result

    # Arguments, parameters and layers ----------------------------------------------------------------------------

    def input(self, name: str, *dims: str, dtype: str = "", values: str = "") -> Tensor:
        """A tensor argument.

        Args:
            values: its range, as in a directive: ``0..1``.
        """
        name = self._unique(name, self._variables)
        dtype = dtype or self.dtype
        self.arguments[name] = f"{dtype}[{','.join(dims)}]{'@' + values if values else ''}"
        return Tensor(name, dims, dtype)

    def parameter(self, name: str, *dims: str, initial: str = "torch.ones", dtype: str = "") -> Tensor:
        """A learned tensor: an argument of a function, a parameter of a module."""
        if not self.is_module:
            return self.input(name, *dims, dtype=dtype)
        name = self._unique(name, self._attributes)
        self.members.append(f"self.{name} = nn.Parameter({initial}({', '.join(map(self.constructed, dims))}))")
        return Tensor(f"self.{name}", dims, dtype or self.dtype)

    def layer(self, name: str, constructor: str) -> str:
        """A layer of a module; the expression for it."""
        name = self._unique(name, self._attributes)
        self.members.append(f"self.{name} = {constructor}")
        return f"self.{name}"

    def constructed(self, size: str) -> str:
        """A size as an expression of the constructor's arguments."""

        def argument(match: re.Match[str]) -> str:
            name = CONSTRUCTOR_NAMES.get(match[0], match[0].lower())
            self.constructor_sizes[name] = match[0]
            return name

        return re.sub(r"[A-Za-z]\w*", argument, size).replace("*", " * ")

    def number(self, name: str, value: float) -> str:
        """A constant: written where it is used, or a named setting."""
        text = str(value)
        return self.setting(name, value) if self.style.names_numbers else text

    def setting(self, name: str, value: float) -> str:
        """A number that the program names: a keyword argument, or an attribute of the module."""
        if name not in self._settings:
            taken = self._attributes if self.is_module else self._variables
            unique = self._settings[name] = self._unique(name, taken)
            self.numbers[unique] = str(value)
            if self.is_module:
                self.members.append(f"self.{unique} = {unique}")
        return f"self.{self._settings[name]}" if self.is_module else self._settings[name]

    # Statements --------------------------------------------------------------------------------------------------

    def let(self, name: str, text: str, like: Tensor, *, dims: Sequence[str] | None = None, dtype: str = "") -> Tensor:
        """Assign an expression to a new variable.

        Args:
            like: has the dimensions and the dtype of the value, unless others are named.
        """
        name = self._unique(name, self._variables)
        self.lines.append(f"{name} = {text}")
        value = replace(like, text=name, dims=tuple(like.dims if dims is None else dims), dtype=dtype or like.dtype)
        self._values.append(value.dims)
        return value

    def then(
        self, value: Tensor, text: str, name: str = "", *, dims: Sequence[str] | None = None, dtype: str = ""
    ) -> Tensor:
        """The next value of a chain, which alone reads ``value``: nested, assigned to the same variable or to a new one."""
        changed = replace(value, dims=tuple(value.dims if dims is None else dims), dtype=dtype or value.dtype)
        self._values.append(changed.dims)
        if self.style.nests and len(text) < 60 and self.chance(0.5):
            return replace(changed, text=text)
        if self.style.reuses_names and value.text.isidentifier() and value.text not in self._kept:
            self.lines.append(f"{value.text} = {text}")
            return replace(changed, text=value.text)
        return self.let(name or "h", text, changed)

    def keep(self, value: Tensor, name: str = "h") -> Tensor:
        """The value as a variable that can be read several times and is not assigned again."""
        if not re.fullmatch(r"(self\.)?\w+", value.text):
            value = self.let(name, value.text, value)
        self._kept.add(value.text)
        return value

    def unpack(self, names: Sequence[str], text: str, like: Tensor, dims: Sequence[str]) -> tuple[Tensor, ...]:
        """Assign the parts of a tuple to new variables."""
        unique = [self._unique(name, self._variables) for name in names]
        self.lines.append(f"{', '.join(unique)} = {text}")
        return tuple(replace(like, text=name, dims=tuple(dims)) for name in unique)

    def call(self, value: Tensor, function: str, arguments: str = "") -> str:
        """A call of a function that is also a method, such as ``sum``."""
        if self.style.uses_methods:
            return f"{value}.{function}({arguments})"
        return f"torch.{function}({value}{', ' + arguments if arguments else ''})"

    # The end -----------------------------------------------------------------------------------------------------

    def finish(self, outputs: Sequence[Tensor]) -> None:
        """Leave out what no statement reads, and make the sizes smaller until no argument is too large."""
        self._drop_unread(outputs)
        self._fit()

    def _drop_unread(self, outputs: Sequence[Tensor]) -> None:
        read = set(re.findall(r"self\.\w+|\w+", " ".join([*self.lines, *(output.text for output in outputs)])))
        self.members = [member for member in self.members if member.partition(" = ")[0] in read]
        constructed = set(re.findall(r"\w+", " ".join(member.partition(" = ")[2] for member in self.members)))
        self.arguments = {name: spec for name, spec in self.arguments.items() if name in read}
        in_use = constructed if self.is_module else read
        self.numbers = {name: value for name, value in self.numbers.items() if name in in_use}
        self.constructor_sizes = {name: size for name, size in self.constructor_sizes.items() if name in constructed}
        texts = [*self.arguments.values(), *self.constructor_sizes.values()]
        used = set(re.findall(r"[A-Za-z]\w*", " ".join(texts)))
        self.sizes = {name: value for name, value in self.sizes.items() if name in used}

    def _fit(self) -> None:
        specs = [spec.partition("[")[2].partition("]")[0].split(",") for spec in self.arguments.values()]
        limits = [(MAX_ELEMENTS, [dim for dim in dims if dim]) for dims in specs]
        limits += [(MAX_INTERMEDIATE_ELEMENTS, dims) for dims in map(self._known, self._values) if dims]
        for limit, dims in limits:
            names = [name for dim in dims for name in dim.split("*") if name in self.sizes]
            while names and self._elements(dims) > limit:
                # The first dimension is a batch or a number of rows.
                name = next((name for name in names if self.sizes[name] > 1), names[0])
                self.sizes[name] = max(1, self.sizes[name] // 2)

    def _known(self, dims: Sequence[str]) -> list[str]:
        """The dimensions as named sizes and numbers; none if one is neither."""
        known = [self.numbers.get(dim.removeprefix("self."), dim) for dim in dims]
        factors = [factor for dim in known for factor in dim.split("*")]
        return known if all(factor in self.sizes or factor.isdigit() for factor in factors) else []

    def _elements(self, dims: Sequence[str]) -> int:
        return math.prod(self.value(dim) for dim in dims)

    def _unique(self, name: str, taken: set[str]) -> str:
        unique, number = name, 1
        while unique in taken:
            number += 1
            unique = f"{name}{number}"
        taken.add(unique)
        return unique
