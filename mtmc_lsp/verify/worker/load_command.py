"""Loads modules ahead of the requests that use them. Runs in workers."""

from __future__ import annotations

import contextlib

from mtmc_lsp.process.protocol import NoAnswer
from mtmc_lsp.verify.messages import LoadRequest
from mtmc_lsp.verify.worker.run_target import module_of, target_source


def load(request: LoadRequest) -> NoAnswer:
    """Load the texts as the later requests do."""
    user_source = target_source(request.user_source, request.capture)
    for text in request.texts:
        with contextlib.suppress(Exception):
            module_of(request.capture, user_source, text)
    return NoAnswer()
