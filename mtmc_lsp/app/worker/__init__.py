"""Code of :mod:`mtmc_lsp.app` that runs in the user's interpreter."""
