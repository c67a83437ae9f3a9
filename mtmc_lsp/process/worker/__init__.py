"""The worker's half of :mod:`mtmc_lsp.process`; it runs in the user's interpreter."""
