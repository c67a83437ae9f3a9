"""Files with generated code of several targets: the last definition of a helper counts for all of them."""

from __future__ import annotations

from mtmc_lsp.codegen.module.guard_helpers import GUARD_HELPERS
from mtmc_lsp.verify.worker.interpreter.source import on_cpu

HELPER = "def _is_plain_gpu_call(tensors) -> bool:\n    return all([t.is_cuda for t in tensors])\n"
OTHER = f"# mtmc: begin other\n{HELPER}\n\ndef other_fits(x) -> bool:\n    return x.is_cuda\n# mtmc: end other\n"
NEW = f"# mtmc: begin new\n{HELPER}\n\ndef new_fits(x) -> bool:\n    return _is_plain_gpu_call((x,))\n# mtmc: end new\n"
USERS = "def helper(x):\n    return x.is_cuda\n"


class OnCpu:
    """A tensor for guards."""

    is_cuda, is_cpu = False, True


def test_the_interpreter_runs_kernels_whose_block_is_above_that_of_another_target() -> None:
    for candidate in (NEW + OTHER + USERS, OTHER + NEW + USERS):
        names: dict[str, object] = {}
        exec(on_cpu(candidate, OTHER + USERS), names)
        new_fits, other_fits, helper = (names[name] for name in ("new_fits", "other_fits", "helper"))
        assert callable(new_fits) and new_fits(OnCpu())
        assert callable(other_fits) and not other_fits(OnCpu()), "code of other targets is the user's"
        assert callable(helper) and not helper(OnCpu())


def test_helpers_that_check_more_than_in_earlier_versions_have_other_names() -> None:
    """A block of an earlier version may be the last one of a file."""
    assert not {"_is_plain_call", "_have_type_and_shape"} & GUARD_HELPERS.keys()
