"""One module per protocol feature; each has ``register(server)``."""

from __future__ import annotations

from mtmc_lsp.server.features import (
    code_actions,
    commands,
    diagnostics,
    hover,
    inlay_hints,
    lenses,
    lifecycle,
    review,
    symbols,
)
from mtmc_lsp.server.server import Server


def register_all(server: Server) -> None:
    """Register every feature."""
    for feature in (lifecycle, code_actions, commands, review, lenses, diagnostics, hover, inlay_hints, symbols):
        feature.register(server)
