"""A model edits kernels that go to a file of their own: they still name nothing of the user's file."""

from __future__ import annotations

import pytest

from mtmc_lsp.codegen.standalone import placed
from mtmc_lsp.core.errors import TargetUnsupported
from mtmc_lsp.core.run import GeneratedCode, Placement
from mtmc_lsp.llm.coder.editable_text import assemble_code, split_code
from mtmc_lsp.source.sibling.scopes import free_names
from tests.golden.pairs import FOLDER, Pair

PAIR = Pair(FOLDER / "scan")
TEXT = PAIR.before.encode()
IMPORTED = {"torch", "triton", "tl", "triton_op", "wrap_triton"}


def code() -> GeneratedCode:
    written = PAIR.versions(PAIR.stored_capture())[-1].code
    assert written is not None
    return written


def test_code_for_the_users_file_names_its_function_and_code_for_another_file_does_not() -> None:
    assert "running_mean" in free_names(code().block)
    beside = placed(code(), Placement.SIBLING, TEXT)
    assert free_names(beside.block) <= IMPORTED
    assert beside.dispatch.startswith("if running_mean_fits(x, __name__):\n")
    assert placed(beside, Placement.SIBLING, TEXT) == beside
    assert placed(code(), Placement.END, TEXT) == code()


def test_an_edit_by_a_model_keeps_the_guard_for_another_file() -> None:
    beside = placed(code(), Placement.SIBLING, TEXT)
    editable = split_code(beside)
    assert "user_module" not in editable.text
    edited = assemble_code(editable, editable.text.replace("# ", "# Edited: "))
    again = placed(edited, Placement.SIBLING, TEXT)
    assert (again.dispatch, free_names(again.block) <= IMPORTED) == (beside.dispatch, True)


def test_a_kernel_that_reads_a_name_of_the_users_file_cannot_go_to_another_file() -> None:
    block = "@triton.jit\ndef net_kernel(x_ptr):\n    tl.store(x_ptr, WIDTH)\n"
    with pytest.raises(TargetUnsupported, match="a kernel uses 'WIDTH' of the file"):
        placed(
            GeneratedCode(("import triton", "import triton.language as tl"), block, ""),
            Placement.SIBLING,
            b"WIDTH = 4\n",
        )
