"""``python -m mtmc_lsp``: the same as ``mtmc``."""

from mtmc_lsp.process.isolation import leave_working_folder

# Python put the working folder first; a file there must not take the place of a module of ours or of the standard library.
leave_working_folder()

from mtmc_lsp.cli import main  # noqa: E402

main()
