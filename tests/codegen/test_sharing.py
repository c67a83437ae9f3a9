"""One kernel serves every place that needs the same, and no place that needs another."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from mtmc_lsp.codegen.coder import _free
from mtmc_lsp.codegen.kernel.kernel import Kernel
from mtmc_lsp.codegen.module.shared_kernels import SharedKernels
from mtmc_lsp.core.graph import Ref
from mtmc_lsp.core.sizes import Size

NAME = st.from_regex(r"[a-z]{1,6}_v[0-9]", fullmatch=True)


def kernel(name: str, read: str, written: str, local: str, number: int = 2, said: str = "It.") -> Kernel:
    source = (
        f"@triton.jit\ndef {name}({read}, {written}, n, BLOCK: tl.constexpr):\n"
        f'    """{said}"""\n'
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
def test_kernels_that_differ_in_names_and_words_are_one_with_operands_of_their_own(names, block):
    a, b, c, d, e, f = names
    known = SharedKernels()
    first = known.one_for(kernel("first", a, b, c))
    own = replace(kernel("second", d, e, f, said="Another."), constexprs={"BLOCK": block})
    second = known.one_for(own)
    assert (second.name, second.source) == (first.name, first.source)
    assert second.tensors == ((a, f"prim_{d}"),)
    assert second.outputs == ((b, Ref(f"node_{e}")),)
    assert second.constexprs == {"BLOCK": block}


@given(st.integers(0, 9), st.integers(0, 9))
def test_kernels_that_compute_something_else_stay_apart(m, n):
    known = SharedKernels()
    first, second = known.one_for(kernel("one", "x", "y", "v", m)), known.one_for(kernel("two", "x", "y", "v", n))
    assert (first.name == second.name) == (m == n)


def test_operands_in_another_order_are_another_kernel():
    """What is loaded first and stored is told apart by its place among the parameters."""
    known = SharedKernels()
    known.one_for(kernel("one", "x", "y", "v"))
    turned = kernel("two", "x", "y", "v")
    turned = replace(turned, source=turned.source.replace("(x, y, n", "(y, x, n"))
    assert known.one_for(turned).name == "two"


def test_no_kernel_takes_the_name_of_another_ones_parts() -> None:
    """Where two need the same kernel behind the one that finds their parts, only one of that is left, of the first one's name."""

    def named(name: str) -> Kernel:
        return Kernel(name, "", (), (), (), {}, (), {}, num_warps=4, num_stages=2)

    assert _free("f_kernel", []) == "f_kernel"
    assert _free("f_kernel", [named("f_kernel")]) == "f_2_kernel"
    assert _free("f_kernel", [named("f_kernel"), named("f_2_kernel_parts")]) == "f_3_kernel"
