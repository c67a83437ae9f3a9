"""One module per protocol feature; each has ``register(server)``."""

from __future__ import annotations

from mtmc_lsp.server.failures import feature as failures
from mtmc_lsp.server.features import (
    code_actions,
    commands,
    device,
    diagnostics,
    hover,
    inlay_hints,
    lifecycle,
    lineage,
    on_save,
    record,
    repair,
    reports,
    symbols,
    workloads,
)
from mtmc_lsp.server.features.steps import lenses, removal, review, review_state
from mtmc_lsp.server.server import Server


def register_all(server: Server) -> None:
    """Register every feature."""
    all_features = (
        lifecycle,
        code_actions,
        commands,
        device,
        record,
        repair,
        workloads,
        review,
        removal,
        review_state,
        reports,
        lineage,
        lenses,
        failures,
        diagnostics,
        on_save,
        hover,
        inlay_hints,
        symbols,
    )
    for feature in all_features:
        feature.register(server)
