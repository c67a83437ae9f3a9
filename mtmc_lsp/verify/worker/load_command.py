"""Loads and constructs modules ahead of the requests that use them. Runs in workers."""

from __future__ import annotations

import contextlib

import torch

from mtmc_lsp.capture.worker.calls import build_call
from mtmc_lsp.process.protocol import NoAnswer
from mtmc_lsp.verify.messages import ConstructRequest, LoadRequest
from mtmc_lsp.verify.worker.instances import original_of
from mtmc_lsp.verify.worker.run_target import is_interpreted, loaded_once, module_of, target_source

SMALL = 4
"""Limit for the sizes of the call's arguments, which have no values: only the module is kept."""


def load(request: LoadRequest) -> NoAnswer:
    """Load the texts as the later requests do."""
    user_source = target_source(request.user_source, request.capture)
    for text in request.texts:
        with contextlib.suppress(Exception):
            module_of(request.capture, user_source, text)
    return NoAnswer()


def construct(request: ConstructRequest) -> NoAnswer:
    """Load the user's file and construct the module. Later calls use copies of it."""
    workload = request.workload
    is_on_gpu = torch.cuda.is_available() and not is_interpreted() and workload.device == "cuda"
    sizes = {name: min(value, SMALL) for name, value in workload.sizes.items()}
    with contextlib.suppress(Exception):
        module = loaded_once(workload.target.path, request.user_source, request.module_name, is_candidate=False)
        build_call(module, workload, "cuda" if is_on_gpu else "cpu", sizes, values=False, construct=original_of)
    return NoAnswer()
