"""Index arithmetic: linear forms over loop variables, with symbolic division and modulo for reshapes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mtmc_lsp.core.sizes import Size, SizeLike


@dataclass(frozen=True)
class Variable:
    """A loop variable (``code`` empty; named by its axis ``id``) or an index computed in the kernel (``code``)."""

    id: int
    size: Size
    """Exclusive upper bound: values range from 0 to ``size - 1``."""
    code: str = ""
    rows: bool = False
    cols: bool = False


ZERO = Size.of(0)


@dataclass(frozen=True)
class Index:
    """``constant + sum(coefficient * variable)``."""

    terms: tuple[tuple[Variable, Size], ...] = ()
    constant: Size = ZERO

    @staticmethod
    def of(variable: Variable) -> Index:
        """The index that equals one variable."""
        return Index(((variable, Size.of(1)),))

    def __add__(self, other: Index) -> Index:
        collected: dict[Variable, Size] = dict(self.terms)
        for variable, coefficient in other.terms:
            collected[variable] = collected.get(variable, Size.of(0)) + coefficient
        terms = tuple((v, c) for v, c in collected.items() if c.terms)
        return Index(terms, self.constant + other.constant)

    def __mul__(self, factor: SizeLike) -> Index:
        size = Size.of(factor)
        if not size.terms:
            return Index()
        return Index(tuple((v, c * size) for v, c in self.terms), self.constant * size)

    def plus(self, size: SizeLike) -> Index:
        """The index shifted by a constant."""
        return Index(self.terms, self.constant + size)

    def divmod(self, size: Size) -> tuple[Index, Index] | None:
        """Quotient and remainder by ``size``, or ``None`` if they cannot be derived from the terms.

        Terms with a coefficient divisible by ``size`` form the quotient. The rest must provably stay below ``size``.
        """
        quotient: list[tuple[Variable, Size]] = []
        remainder_terms: list[tuple[Variable, Size]] = []
        for variable, coefficient in self.terms:
            exact = coefficient.divide_exactly(size)
            if exact is not None:
                quotient.append((variable, exact))
            else:
                remainder_terms.append((variable, coefficient))
        constant_quotient = self.constant.divide_exactly(size)
        if self.constant.is_constant and size.is_constant:
            whole_part, remainder = divmod(self.constant.constant, size.constant)
            constants = Size.of(whole_part), Size.of(remainder)
        elif constant_quotient is not None:
            constants = constant_quotient, Size.of(0)
        else:
            constants = Size.of(0), self.constant
        remainder_index = Index(tuple(remainder_terms), constants[1])
        if not remainder_index.stays_below(size):
            return None
        return Index(tuple(quotient), constants[0]), remainder_index

    def stays_below(self, size: Size) -> bool:
        """Whether the value is provably between 0 and ``size - 1``, if all named sizes are at least 1."""
        largest = self.constant
        for variable, coefficient in self.terms:
            if not _non_negative(coefficient):
                return False
            largest = largest + coefficient * (variable.size - 1)
        return _non_negative(self.constant) and _non_negative(size - 1 - largest)

    def extent(self, sizes: Mapping[str, int]) -> int:
        """Upper bound of the absolute value at the workload's sizes."""
        total = self.constant.value(sizes)
        return total + sum(abs(c.value(sizes)) * (v.size.value(sizes) - 1) for v, c in self.terms)


def _non_negative(size: Size) -> bool:
    """Whether a polynomial is provably >= 0 for named sizes >= 1: substitutes n + 1 for each name and checks signs."""
    shifted = size.substitute({name: Size.symbol(name) + 1 for name in set(size.symbols())})
    return all(coefficient >= 0 for _, coefficient in shifted.terms)
