"""The values of a launcher and their variables: tensors, sizes and run-time numbers."""

from __future__ import annotations

from dataclasses import dataclass, field

from mtmc_lsp.capture.neutral_operations import earlier_tensor
from mtmc_lsp.codegen.kernel.kernel import Scratch
from mtmc_lsp.codegen.matmul.descriptors import ALLOCATOR
from mtmc_lsp.codegen.module.conditions.tensors import size_text
from mtmc_lsp.codegen.module.guard import bindings
from mtmc_lsp.codegen.module.launchers.views import View
from mtmc_lsp.codegen.module.naming import Names, value_name
from mtmc_lsp.codegen.module.side_by_side import NUMBERS
from mtmc_lsp.core.graph import Ref, TensorType
from mtmc_lsp.core.run import KernelLaunch
from mtmc_lsp.core.sizes import Number, Size, rename_symbols
from mtmc_lsp.ir.buffer_updates import call_counters
from mtmc_lsp.ir.primitives import KernelIR
from mtmc_lsp.ir.run_time_numbers import numbers_of

FLAG = "needs_gradients"
"""The parameter of functions that compute gradients only for calls that autograd records."""
RESERVED_LOCALS = frozenset(
    [
        *"ctx original references tangents run".split(),
        *"torch triton tl math seed n_rows n_cols n_outer n_batch n_m n_n n_q n_k rows_m rows_n k_pad start stop".split(),
        ALLOCATOR,
        FLAG,
        *NUMBERS,
    ]
)
"""Names that every launcher may use for its own variables."""


@dataclass
class LauncherValues:
    """The variables of a launcher: tensors, sizes and run-time numbers."""

    ir: KernelIR
    namespace: str = "{__name__.replace('.', '_')}"
    """Namespace of the operators, as the content of an f-string: the name under which the user's module is imported."""
    names: Names = field(default_factory=lambda: Names(RESERVED_LOCALS))
    lines: list[str] = field(default_factory=list)
    variables: dict[Ref, str] = field(default_factory=dict)
    """The variable of each graph value that is in memory."""
    buffers: dict[str, TensorType] = field(default_factory=dict)
    """The type of each primitive that is in memory."""
    holders: dict[str, str] = field(default_factory=dict)
    """The variable of each primitive that is in memory."""
    launches: list[KernelLaunch] = field(default_factory=list)
    uses_seed: bool = False
    makes_descriptors: bool = False
    """Whether a kernel makes tensor descriptors."""
    uses_atomics: bool = False
    """Whether a kernel uses atomic additions, so that results are non-deterministic in the last bits."""
    makes_constants: bool = False
    """Whether the launcher creates literal tensors."""
    functions: list[str] = field(default_factory=list)
    """Sources of functions that the launcher calls."""
    function_launches: list[KernelLaunch] = field(default_factory=list)
    """Launches in these functions."""
    accumulators: dict[Ref, str] = field(default_factory=dict)
    """Products that are added to a tensor instead of being returned, each with the parameter for that tensor."""
    destinations: dict[Ref, str] = field(default_factory=dict)
    """Products that are written into a tensor instead of being returned, each with the parameter for that tensor."""
    optional: frozenset[Ref] = frozenset()
    """Values that only gradients need, which calls that autograd does not record leave out."""
    flags: tuple[str, ...] = ()
    """Parameters that say which results to compute."""
    whole_sizes: tuple[str, ...] = ()
    """Named sizes that are parameters, because no input has them."""
    may_be_kept: frozenset[str] = frozenset()
    """Nodes that may become tables, if what they read does."""
    reuses_products: bool = False
    """Whether a kernel may overwrite a product that nothing else reads."""
    done: set[str] = field(default_factory=set)
    """The nodes whose kernels and calls were written."""
    recomputed: frozenset[str] = frozenset()
    """Nodes that some kernels recompute in addition to the kernel that stores them."""
    is_part: bool = False
    """Whether another launcher calls the function."""
    runs_operators: bool = False
    """Whether the launcher calls operators of torch that autocast may cast for."""

    def __post_init__(self) -> None:
        for item in self.ir.graph.inputs:
            variable = self.names.unique(item.name)
            self.register(Ref(item.name), variable, item.type)
        graph = self.ir.graph
        self.input_names = {item.name: self.variables[Ref(item.name)] for item in graph.inputs}
        used_numbers = {name for number in numbers_of(graph) for name in number.names()}
        self.number_names = {i.name: self.names.unique(i.name) for i in graph.numbers if i.name in used_numbers}
        """The launcher's parameter for each number among the arguments that the graph uses."""
        self._numbers: dict[str, str] = {}
        """Expressions for numbers that are computed from arguments, and their variables."""
        self._sizes = {symbol: binding.text for symbol, binding in bindings(graph, self.input_names).items()}
        self._size_names = {symbol: self.names.unique(symbol) for symbol in self.whole_sizes}
        self._scratch: dict[Scratch, str] = {}
        self._scratch_bytes: dict[str, float] = {}
        """Bytes of these tensors, by variable."""
        self._locals: dict[str, str] = {}
        self._table_lines: list[str] = []
        """Statements that create tables: tensors that depend only on sizes."""
        self.kept: list[str] = []
        """The nodes that these statements compute."""
        self._read_by_kernels: set[str] = set()
        """Variables that kernels get as arguments."""
        self._counts = call_counters(graph)
        self._allocated: set[str] = set()
        """Variables of tensors that the launcher allocated."""
        self.aligned: dict[str, None] = {}
        """Inputs with tensor descriptors; the guard checks their alignment."""
        self._written: dict[Ref, str] = {}
        """The variable of each value that a kernel has written so far."""
        self._overwritten: set[str] = set()
        """Products that a kernel overwrites."""
        self._views: dict[str, View] = {}
        """Views, by variable, that begin where the tensor begins on which they are based."""
        self._kernel_arguments: dict[str, int] = {}
        """How often each variable of a tensor is an argument of a kernel."""
        self._storage: dict[str, str] = {}
        """The variable of the tensor on which each view is based."""

    def register(self, ref: Ref, variable: str, kind: TensorType) -> None:
        """Note the variable of a value that is in memory."""
        self.variables[ref] = variable
        prim = self.ir.of(ref).name
        self.holders.setdefault(prim, variable)
        self.buffers.setdefault(prim, kind)

    def find(self, ref: Ref) -> None:
        """Note the variable of a value that no statement computes, since an earlier value is the same tensor."""
        earlier = earlier_tensor(self.ir.graph, ref)
        if ref not in self.variables and earlier in self.variables:
            self.register(ref, self.variables[earlier], self.ir.graph.type_of(ref))

    def size(self, size: Size) -> str:
        """A size as Python; each named size in it becomes a local variable."""
        for symbol in size.symbols():
            if symbol not in self._size_names:
                self._size_names[symbol] = self.names.unique(symbol)
        return size_text(size, self._size_names)

    def number(self, number: Number) -> str:
        """A run-time number as Python; a number that is computed from arguments becomes a local variable."""
        text = rename_symbols(number.text, self.number_names)
        if number.is_argument:
            return text
        if text not in self._numbers:
            self._numbers[text] = self.names.unique(number.preferred_name)
        return self._numbers[text]

    def define(self, ref: Ref, text: str) -> None:
        """Assign the expression ``text`` to a new variable for a value."""
        name = self.names.unique(value_name(self.ir, ref))
        self.lines.append(f"{name} = {text}")
        self.register(ref, name, self.ir.graph.type_of(ref))
