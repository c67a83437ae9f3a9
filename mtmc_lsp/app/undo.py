"""``mtmc undo``: takes what a stored run wrote into a file out again."""

from __future__ import annotations

from mtmc_lsp.app.revisions.rebase import rebase
from mtmc_lsp.app.target_file import OpenTarget, Written
from mtmc_lsp.core.errors import FileChanged, Location, RequestError
from mtmc_lsp.core.run import RunResult, original_text
from mtmc_lsp.process.project_files import FOLDER
from mtmc_lsp.source.sibling.disk import read_kernels, write_pair
from mtmc_lsp.source.sibling.pair import FilePair, without_block
from mtmc_lsp.source.sibling.statement import find_kernel_import


def undo_result(target: OpenTarget, result: RunResult) -> Written:
    """Write the file as it was before a run: its generated code removed, or its edits taken back.

    Raises:
        RequestError: the file contains nothing of the run.
        FileChanged: lines that the run edited changed since.
    """
    where = Location(str(target.path), target.definition.start_line)
    text, backups = target.text, target.project / FOLDER / "backups"
    original = next((found for step in result.steps if (found := original_text(step)) is not None), None)
    if original is not None:
        plain = rebase(result.final.source, original, text.decode())
        if plain is None and text.decode() == original:
            raise RequestError(
                f"the file contains no edits of run {result.id}", where=where, remedy="There is nothing to undo."
            )
        if plain is None:
            raise FileChanged(
                f"lines that run {result.id} edited changed since",
                where=where,
                remedy=f"Take the edits back by hand: mtmc report {result.id} shows them.",
            )
        pair = FilePair(text, None)
        return Written(write_pair(target.path, target.qualname, pair, text, FilePair(plain.encode(), None), backups))
    if target.plain == text:
        raise RequestError(
            f"the file contains no kernels of {target.qualname}", where=where, remedy="There is nothing to undo."
        )
    kernels = target.kernels if find_kernel_import(text) is None else read_kernels(target.path)
    before = FilePair(text, kernels)
    after = FilePair(target.plain, without_block(kernels, target.qualname) if kernels is not None else None)
    return Written(write_pair(target.path, target.qualname, before, target.plain, after, backups))
