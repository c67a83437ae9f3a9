"""``mtmc runs``: the runs in the project's store."""

from __future__ import annotations

from mtmc_lsp.commands.options import AsJson


def runs(as_json: AsJson = False) -> int:
    """List the project's runs, newest first."""
    from mtmc_lsp.app.stored_runs import open_project_store
    from mtmc_lsp.report.console import console, show_table
    from mtmc_lsp.report.documents import document
    from mtmc_lsp.report.text import runs_table

    with open_project_store() as store:
        records = store.runs()
    if as_json:
        print(document(runs=records))
    elif records:
        show_table(console(), runs_table(records))
    else:
        print("no runs yet: start one with `mtmc optimize FILE::NAME`")
    return 0
