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
    reports,
    review,
    review_state,
    symbols,
)
from mtmc_lsp.server.server import Server


def register_all(server: Server) -> None:
    """Register every feature."""
    every = (
        lifecycle,
        code_actions,
        commands,
        review,
        review_state,
        reports,
        lenses,
        diagnostics,
        hover,
        inlay_hints,
        symbols,
    )
    for feature in every:
        feature.register(server)
