"""Kernel deduplication: equivalent kernels share one function, others do not."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from mtmc_lsp.codegen.kernel.kernel import Kernel
from mtmc_lsp.codegen.module.shared_kernels import KernelNames, SharedKernels
from mtmc_lsp.core.graph import Ref
from mtmc_lsp.core.sizes import Size

NAME = st.from_regex(r"[a-z]{1,6}_v[0-9]", fullmatch=True)


def kernel(name: str, read: str, written: str, local: str, number: int = 2, docstring: str = "It.") -> Kernel:
    source = (
        f"@triton.jit\ndef {name}({read}, {written}, n, BLOCK: tl.constexpr):\n"
        f'    """{docstring}"""\n'
        f"    {local} = tl.load({read} + tl.arange(0, BLOCK), mask=tl.arange(0, BLOCK) < n)\n"
        f"    tl.store({written} + tl.arange(0, BLOCK), {local} * {number})\n"
    )
    return Kernel(
        name=name,
        source=source,
        tensors=((read, f"prim_{read}"),),
        outputs=((written, Ref(f"node_{written}")),),
        sizes=(("n", Size.symbol("s0")),),
        constexprs={"BLOCK": 64},
        grid=("1",),
        grid_sizes={},
        num_warps=4,
        num_stages=1,
    )


@given(st.lists(NAME, min_size=6, max_size=6, unique=True), st.integers(16, 128))
def test_kernels_that_differ_only_in_names_and_docstrings_are_shared(names, block):
    a, b, c, d, e, f = names
    kernels = SharedKernels()
    first = kernels.shared(kernel("first", a, b, c))
    second_kernel = replace(kernel("second", d, e, f, docstring="Another."), constexprs={"BLOCK": block})
    second = kernels.shared(second_kernel)
    assert (second.name, second.source) == (first.name, first.source)
    assert second.tensors == ((a, f"prim_{d}"),)
    assert second.outputs == ((b, Ref(f"node_{e}")),)
    assert second.constexprs == {"BLOCK": block}


@given(st.integers(0, 9), st.integers(0, 9))
def test_kernels_that_compute_something_else_are_not_shared(m, n):
    kernels = SharedKernels()
    first, second = kernels.shared(kernel("one", "x", "y", "v", m)), kernels.shared(kernel("two", "x", "y", "v", n))
    assert (first.name == second.name) == (m == n)


def test_operands_in_another_order_are_another_kernel():
    """The parameter order distinguishes the loaded and the stored operand."""
    kernels = SharedKernels()
    kernels.shared(kernel("one", "x", "y", "v"))
    swapped = kernel("two", "x", "y", "v")
    swapped = replace(swapped, source=swapped.source.replace("(x, y, n", "(y, x, n"))
    assert kernels.shared(swapped).name == "two"


def test_no_kernel_takes_a_name_that_another_extends() -> None:
    """Names that extend a kernel's name count as taken, since shared kernels keep their first name."""
    names = KernelNames("def f_4_kernel(): pass", {"kept": "f_5_kernel"})
    assert names.choose("a", "f_kernel") == "f_kernel"
    names.written("a", "f_kernel", ["f_kernel", "f_2_kernel_parts"])
    assert names.choose("b", "f_kernel") == "f_3_kernel"
    assert names.choose("c", "f_kernel") == "f_6_kernel", "4 is in the file, 5 belongs to a kernel of an earlier step"
    assert names.choose("kept", "f_kernel") == "f_5_kernel"
