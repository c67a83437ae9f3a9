"""``python -m mtmc_lsp``: the same as ``mtmc``."""

from mtmc_lsp.cli import main

main()
