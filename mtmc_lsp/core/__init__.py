"""Shared vocabulary of the project: small frozen value types. Imports only ``mtmc_lsp.core``, and no torch."""
