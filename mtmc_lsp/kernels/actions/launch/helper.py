"""The helper that launches compiled kernels directly. Workers read its name, so this module needs no third-party package."""

from __future__ import annotations

from mtmc_lsp.codegen.module.direct_launches import launch_helper

NAME = "DirectLaunch"
HELPER = launch_helper(NAME, on_one_gpu=False)
"""Source of the helper, which the file gets once."""
