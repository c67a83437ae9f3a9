"""A kernel's parameters: pointers and named sizes."""

from __future__ import annotations

from collections.abc import Mapping

from mtmc_lsp.codegen.kernel.snippets import ATOM, PRODUCT, SUM, TRITON_DTYPES, UNARY, Code
from mtmc_lsp.codegen.module.conditions.tensors import size_text
from mtmc_lsp.codegen.module.naming import RESERVED, Names, identifier, value_name
from mtmc_lsp.core.graph import Ref, TensorType
from mtmc_lsp.core.protocols import CannotCode
from mtmc_lsp.core.sizes import Number, Size
from mtmc_lsp.ir.primitives import ONE, KernelIR, Prim

NUMBER_DTYPES = {"float32": "", "float64": ": tl.float64", "int64": ": tl.int64"}
"""Dtypes in which kernels take run-time numbers, and the annotation of the parameter. Triton passes floats as float32."""


class Parameters:
    """A kernel's parameters, in the order in which they are first needed."""

    def __init__(self, ir: KernelIR, buffers: Mapping[str, TensorType], reserved: frozenset[str] = RESERVED) -> None:
        """Start with no parameters.

        Args:
            buffers: type of every primitive that is stored in memory.
            reserved: names that the kernel uses for itself.
        """
        self.ir = ir
        self.buffers = buffers
        self.names = Names(reserved)
        self.tensors: dict[str, str] = {}
        """Primitive (or ``seed``) to the pointer's name."""
        self.outputs: dict[Ref, str] = {}
        self.sizes: dict[Size, str] = {}
        """Sizes that have their own parameter, such as ``n_cols``."""
        self._symbols: dict[str, str] = {}
        """Named size of the workload to the parameter that carries it."""
        self.used_sizes: dict[str, Size] = {}
        """Parameter name to the size it carries."""
        self.numbers: dict[tuple[Number, str], str] = {}
        """Run-time numbers, with the dtype in which the kernel takes them, to the parameter's name."""
        self.static_symbols: frozenset[str] = frozenset()
        """Symbols that are compile-time constants: one compiled kernel per value."""
        self.wide = False
        """Whether offsets may exceed 32 bits. Then the launcher computes sums of sizes and passes them as parameters."""

    def is_static(self, size: Size) -> bool:
        """Whether a size is a compile-time constant."""
        return self.static_symbols.issuperset(size.symbols())

    def tensor(self, name: str) -> str:
        """The pointer to the primitive's buffer."""
        if name not in self.tensors:
            prim = self.ir.prims[name]
            self.tensors[name] = self.names.unique(f"{value_name(self.ir, self.ref(prim))}_ptr")
        return self.tensors[name]

    def output(self, ref: Ref, name: str = "") -> str:
        """The pointer to an output's buffer, with a preferred name for it."""
        if ref not in self.outputs:
            self.outputs[ref] = self.names.unique(name or f"{value_name(self.ir, ref)}_ptr")
        return self.outputs[ref]

    def number(self, number: Number, dtype: str) -> Code:
        """A run-time number in the dtype that the kernel computes in."""
        if dtype == "bool":
            raise CannotCode("a number that is known at run time cannot be a boolean in a kernel; leave it to PyTorch")
        passed_as = dtype if dtype in NUMBER_DTYPES else "int64"
        if (number, passed_as) not in self.numbers:
            self.numbers[number, passed_as] = self.names.unique(number.preferred_name)
        name = self.numbers[number, passed_as]
        return Code(name if passed_as == dtype else f"{name}.to({TRITON_DTYPES[dtype]})", dtype)

    def ref(self, prim: Prim) -> Ref:
        """The graph value that a primitive represents."""
        for (name, index), prim_name in self.ir.values.items():
            if prim_name == prim.name:
                return Ref(name, index)
        raise CannotCode(
            f"{prim.origin} has no buffer, because only a part of the operation is a graph value; fuse it with its readers"
        )

    def name_size(self, size: Size, name: str) -> str:
        """Give a size its own parameter name."""
        if size not in self.sizes:
            self.sizes[size] = self.names.unique(name) if name not in ("n_rows", "n_cols", "n_outer") else name
        return self.sizes[size]

    def size(self, size: Size) -> Code:
        """A size as an expression over parameters and numbers."""
        if size in self.sizes:
            self.used_sizes[self.sizes[size]] = size
            return Code(self.sizes[size], "int64")
        if size.is_constant:
            return Code(str(size.constant), "int64")
        factors, rest = self._named_factors(size)
        if factors and rest.is_constant:
            for name in factors:
                self.used_sizes[name] = next(
                    named_size for named_size, parameter in self.sizes.items() if parameter == name
                )
            head = [] if rest == ONE else [str(rest.constant)]
            return Code(" * ".join([*head, *factors]), "int64", precedence=PRODUCT)
        is_sum = len(size.terms) > 1
        if is_sum and self.wide:
            self.name_size(size, "reach")
            return self.size(size)
        text = size_text(size, {symbol: self._symbol(symbol) for symbol in size.symbols()})
        return Code(text, "int64", precedence=SUM if is_sum else (PRODUCT if "*" in text else ATOM))

    def _symbol(self, symbol: str) -> str:
        """The parameter of a named size; renamed if the kernel uses the name for something else, such as ``rows``."""
        size = Size.symbol(symbol)
        if size not in self.sizes and symbol not in self._symbols:
            self._symbols[symbol] = self.names.unique(symbol)
        name = self.sizes.get(size) or self._symbols[symbol]
        self.used_sizes[name] = size
        return name

    def divisor(self, size: Size) -> str:
        """A size as a divisor. The launcher computes products of sizes, which may exceed 32 bits."""
        if not size.is_constant and not size.is_symbol and size not in self.sizes:
            products = [
                [*factors, *([str(coefficient)] if coefficient != 1 else [])] for factors, coefficient in size.terms
            ]
            self.name_size(size, identifier("_".join(products[0])) if len(products) == 1 else "count")
        return self.size(size).at(UNARY)

    def _named_factors(self, size: Size) -> tuple[list[str], Size]:
        """Factor ``size`` into named sizes; returns the names and the remaining factor."""
        factors: list[str] = []
        for named_size, name in sorted(self.sizes.items(), key=lambda item: -len(str(item[0]))):
            while not named_size.is_constant and (rest := size.divide_exactly(named_size)) is not None:
                factors.append(name)
                size = rest
        return factors, size
