"""From ``FILE::NAME`` to a file that was read and the target in it, and back: writing a run's result into the file."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from mtmc_lsp.app.interpreter import checked_python, find_python
from mtmc_lsp.capture.client import find_workload
from mtmc_lsp.capture.module_paths import package_of, project_root
from mtmc_lsp.capture.recorded_calls import RECORDS
from mtmc_lsp.core.errors import Location, MtmcError, RequestError
from mtmc_lsp.core.run import KEPT, Placement, RunResult, StepStatus
from mtmc_lsp.core.settings import Settings, read_settings
from mtmc_lsp.core.workload import Target, TargetKind
from mtmc_lsp.process.project_files import FOLDER
from mtmc_lsp.source.blocks import without_blocks
from mtmc_lsp.source.compose import strip_generated
from mtmc_lsp.source.sibling.disk import kernels_of, read_kernels, write_pair
from mtmc_lsp.source.sibling.pair import (
    FilePair,
    check_kernels_file,
    joined,
    kernels_path,
    module_of_kernels,
    separated,
    without_block,
)
from mtmc_lsp.source.targets import find_target, find_targets

INPUT_MAKERS = ("get_inputs", "get_init_inputs")
"""Functions that create the inputs of a file in KernelBench's format."""


@dataclass(frozen=True)
class Request:
    """A target by name, with the settings and the interpreter for it."""

    path: Path
    name: str
    settings: Settings
    python: str
    """The interpreter that runs the user's code."""


@dataclass(frozen=True)
class OpenTarget:
    """A target in the text of its file."""

    request: Request
    text: bytes
    """The whole file; an editor's unsaved text where there is one."""
    definition: Target
    """The function, method, module or kernel in ``text``."""
    kernels: bytes | None = None
    """The file of kernels beside it, if ``text`` imports any or the settings place kernels there."""

    @property
    def path(self) -> Path:
        """The file."""
        return self.request.path

    @property
    def qualname(self) -> str:
        """The target's name in the file, such as ``Block.forward``."""
        return self.definition.qualname

    @property
    def settings(self) -> Settings:
        """The settings of this request."""
        return self.request.settings

    @property
    def python(self) -> str:
        """The interpreter that runs the user's code."""
        return self.request.python

    @property
    def project(self) -> Path:
        """The project's folder."""
        return project_root(self.path)

    @property
    def source_hash(self) -> str:
        """SHA-256 of ``text``."""
        return hashlib.sha256(self.text).hexdigest()

    @property
    def plain(self) -> bytes:
        """The file without the code that an earlier run generated for this target."""
        return strip_generated(self.text, self.qualname)

    @property
    def whole(self) -> bytes:
        """The file with the target's generated code in it, also if that is in the file of kernels.

        Raises:
            SourceSyntaxError: the kernels do not parse.
        """
        return joined(FilePair(self.text, self.kernels), self.definition)

    @property
    def plain_hash(self) -> str:
        """SHA-256 of ``plain``."""
        return hashlib.sha256(self.plain).hexdigest()


def parse_request(spec: str, settings: Settings | None = None, python: str = "") -> Request:
    """Read ``FILE::NAME``, or ``FILE`` for a file with one target.

    Args:
        spec: the file and the target's name.
        settings: by default those of the file's project.
        python: the interpreter that runs the user's code; by default the project's.

    Raises:
        RequestError: ``spec`` has another form, or the file does not exist.
        EnvironmentNotAble: the interpreter lacks torch or triton.
    """
    file, _, name = spec.partition("::")
    if not file:
        raise RequestError("no file is named", remedy="Write FILE::NAME, as in model.py::Block.forward.")
    if not name:
        targets = list_targets(file)
        if len(targets) > 1:
            raise no_target_named(targets)
        name = targets[0].name
    path = Path(file).resolve()
    if not path.is_file():
        raise RequestError("no such file", where=Location(file), remedy="Check the path.")
    settings = settings or read_settings(path.parent)
    return Request(path, name, settings, checked_python(python or find_python(path, settings)))


def open_target(request: Request, text: bytes | None = None) -> OpenTarget:
    """Find the target in its file, or in ``text`` if an editor holds the file unsaved.

    Raises:
        RequestError: the file is not UTF-8, has line endings of carriage returns alone, or does not contain the target; the file
            of kernels is a link.
    """
    text = request.path.read_bytes() if text is None else text
    try:
        text.decode("utf-8")
    except UnicodeDecodeError as error:
        line = text[: error.start].count(b"\n") + 1
        raise RequestError(
            "is not UTF-8", where=Location(str(request.path), line), remedy="Save it as UTF-8."
        ) from None
    if b"\r" in text and b"\n" not in text:
        # Python reads such a file, but generated code could not be inserted without changing all of its lines.
        raise RequestError(
            "its lines end in carriage returns alone",
            where=Location(str(request.path)),
            remedy="Save the file with the line endings LF or CRLF.",
        )
    definition = find_target(text, str(request.path), request.name)
    is_beside = request.settings.place == Placement.SIBLING.value
    kernels = read_kernels(request.path) if is_beside else kernels_of(request.path, text)
    return OpenTarget(request, text, definition, kernels)


@dataclass(frozen=True)
class ListedTarget:
    """A target in the list of a file."""

    file: str
    """As the user named it."""
    name: str
    line: int
    inputs: str = ""
    """Where its example inputs come from: ``directive``; empty if it has none."""
    problem: str = ""
    """Why it cannot be optimised yet, one clause."""
    remedy: str = ""

    @property
    def spec(self) -> str:
        """``FILE::NAME``."""
        return f"{self.file}::{self.name}"

    @property
    def is_ready(self) -> bool:
        """Whether it has example inputs."""
        return bool(self.inputs)


def list_targets(file: str) -> list[ListedTarget]:
    """The targets of a file in its order: modules instead of their ``forward``, other methods only with example inputs.

    Raises:
        RequestError: there is no such file, or it defines no target.
    """
    path = Path(file).resolve()
    if not path.is_file():
        raise RequestError("no such file", where=Location(file), remedy="Check the path.")
    text = without_blocks(path.read_bytes(), marked_imports=False)
    found = [item for item in find_targets(text, str(path)) if item.kind is not TargetKind.KERNEL]
    modules = {item.qualname for item in found if item.kind is TargetKind.MODULE}
    targets = [_listed(file, path, text, item) for item in found if item.qualname not in INPUT_MAKERS]
    shown = [item for item in targets if not _is_part(item, modules)]
    if not shown:
        raise RequestError(
            "defines no function, method or module", where=Location(file), remedy="Name a file with PyTorch code."
        )
    return shown


def no_target_named(targets: Sequence[ListedTarget]) -> RequestError:
    """The error for a file that is named without a target."""
    names = ", ".join(item.name for item in targets)
    first = next((item for item in targets if item.is_ready), targets[0])
    return RequestError(f"{first.file} has {len(targets)} targets: {names}", remedy=f"Name one, as in {first.spec}.")


def _is_part(item: ListedTarget, modules: Collection[str]) -> bool:
    """Whether a method is left out, because its module is in the list."""
    owner, _, method = item.name.rpartition(".")
    return owner in modules and (method == "forward" or not item.is_ready)


def _listed(file: str, path: Path, text: bytes, target: Target) -> ListedTarget:
    try:
        workload = find_workload(str(path), text, target, project_root(path) / FOLDER / RECORDS)
    except MtmcError as error:
        return ListedTarget(file, target.qualname, target.start_line, "", error.message, error.remedy)
    return ListedTarget(file, target.qualname, target.start_line, workload.source.value)


def check_place(target: OpenTarget) -> None:
    """Refuse a place for kernels that cannot be used, before a run spends time on them.

    Raises:
        RequestError: the file of kernels is the user's own or cannot be imported.
    """
    if target.settings.place == Placement.SIBLING.value:
        check_kernels_file(target.path, target.kernels)
        module_of_kernels(target.path, package_of(target.path)[0], target.plain)


def check_inside_project(target: OpenTarget, folder: Path) -> None:
    """Refuse to write a file that a stored run names and the user does not: the store of a cloned project can name any.

    Args:
        folder: where the command runs.

    Raises:
        RequestError: the file is outside the project that ``folder`` belongs to.
    """
    if project_root(folder.resolve() / "any.py") not in target.path.parents:
        raise RequestError(
            "the run's file is outside this project, so --apply does not write it",
            where=Location(str(target.path)),
            remedy="Name it yourself: mtmc optimize FILE::NAME --apply.",
        )


@dataclass(frozen=True)
class Written:
    """What :func:`apply_result` wrote."""

    backup: Path
    """The text of the user's file before."""
    kernels: Path | None = None
    """The file of kernels, if the code is there."""


def apply_result(target: OpenTarget, result: RunResult) -> Written | None:
    """Write the accepted steps into the file, or into the file and that of its kernels.

    Returns:
        None if the run kept nothing, so nothing is written.

    Raises:
        FileChanged: a file changed since it was read.
        RequestError: the kernels cannot go where the run placed them.
    """
    if result.status not in KEPT:
        return None
    is_beside = result_place(result) is Placement.SIBLING
    # The settings of a stored run may place its kernels elsewhere than those of today.
    kernels = read_kernels(target.path) if is_beside and target.kernels is None else target.kernels
    before = FilePair(target.text, kernels)
    source, backups = result.final.source.encode(), target.project / FOLDER / "backups"
    after = (
        separated(source, target.qualname, target.path, package_of(target.path)[0], kernels)
        if is_beside
        else FilePair(source, without_block(kernels, target.qualname) if kernels is not None else None)
    )
    backup = write_pair(target.path, target.qualname, before, target.plain, after, backups)
    return Written(backup, kernels_path(target.path) if is_beside else None)


def result_place(result: RunResult) -> Placement:
    """Where the code of a run's result goes."""
    accepted = [step.candidate for step in result.steps if step.status is StepStatus.ACCEPTED and step.candidate]
    return next((item.code.place for item in reversed(accepted) if item.code is not None), Placement.END)
