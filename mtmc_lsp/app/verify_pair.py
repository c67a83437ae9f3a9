"""``mtmc verify``: compares any candidate with any reference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from mtmc_lsp.app.target_file import OpenTarget, open_target, parse_request
from mtmc_lsp.core.errors import EnvironmentNotAble, Location, TargetUnsupported
from mtmc_lsp.core.settings import Settings
from mtmc_lsp.core.workload import Capture
from mtmc_lsp.measure.foreign_candidate import ForeignVerdict, verify_foreign, with_timing
from mtmc_lsp.process.fork_server import ForkServer
from mtmc_lsp.process.project_files import FOLDER, check_file
from mtmc_lsp.verify.adapters import ForeignCandidate
from mtmc_lsp.verify.cases import Case
from mtmc_lsp.verify.reference import Reference
from mtmc_lsp.verify.sanitizer import Sanitizer, find_sanitizer

REFERENCE, CANDIDATE = "Model", "ModelNew"
"""The default names of the classes, as KernelBench calls them."""


@dataclass(frozen=True)
class PairOptions:
    """How a candidate is compared with its reference."""

    reproduction: Path | None = None
    """Where the smallest failing case is written; by default below ``.mtmc/failures`` in the reference's project."""
    seed: int | None = None
    """Seed of the inputs; by default a random one that the candidate cannot know."""
    needs_kernel: bool = True
    """Whether a candidate that launches no Triton kernel is refused."""
    takes_empty: bool = True
    """Whether the candidate must accept inputs without elements, as the reference does."""
    far: bool = False
    """Whether a case with element offsets beyond 2^31 runs, on a GPU with enough memory."""
    sanitize: bool = False
    """Whether a correct candidate also runs under ``compute-sanitizer``."""


@dataclass(frozen=True)
class PreparedPair:
    """A candidate and its reference, with everything that is checked before the slow part."""

    reference: OpenTarget
    """Its workload gives the inputs."""
    candidate: OpenTarget
    options: PairOptions
    reproduction: Path
    sanitizer: str
    """Path of ``compute-sanitizer``; empty if it is not used."""


def open_pair(reference: str, candidate: str, settings: Settings | None, python: str) -> tuple[OpenTarget, OpenTarget]:
    """Read both files and find the targets in them; each is ``FILE::NAME`` or a file of KernelBench's format.

    Raises:
        RequestError: a file does not exist, or does not contain the name.
    """
    specs = [
        spec if "::" in spec else f"{spec}::{name}" for spec, name in ((reference, REFERENCE), (candidate, CANDIDATE))
    ]
    first = parse_request(specs[0], settings, python)
    second = parse_request(specs[1], first.settings, first.python)
    return open_target(first), open_target(second)


def prepare_pair(reference: OpenTarget, candidate: OpenTarget, options: PairOptions) -> PreparedPair:
    """Check what could make minutes of verification useless.

    Raises:
        EnvironmentNotAble: ``compute-sanitizer`` is asked for and not installed.
        UnsafeFile: the failing case cannot be written safely.
    """
    sanitizer = find_sanitizer() if options.sanitize else ""
    reproduction = options.reproduction
    if reproduction is None:
        stem = f"{candidate.path.stem}_{candidate.qualname.replace('.', '_')}"
        reproduction = reference.project / FOLDER / "failures" / f"{stem}.py"
    check_file(reproduction)
    return PreparedPair(reference, candidate, options, reproduction.absolute(), sanitizer)


def verify_pair(
    prepared: PreparedPair,
    capture: Capture,
    fork_server: ForkServer | None,
    *,
    needs_sandbox: bool = False,
    fresh: bool = False,
    on_case: Callable[[Case], None] = lambda _: None,
) -> ForeignVerdict:
    """Compare a candidate with its reference; the smallest failing case is written as a file that runs.

    Args:
        fork_server: starts the workers; the caller closes it.
        needs_sandbox: whether to refuse if the candidate's process cannot run in a sandbox.
        fresh: whether cached timings are measured again.
        on_case: called with each case before it runs.

    Raises:
        EnvironmentNotAble: ``compute-sanitizer`` is asked for and the workload does not run on a GPU.
        TargetUnsupported: the reference keeps state between calls.
    """
    reference, candidate, options = prepared.reference, prepared.candidate, prepared.options
    settings, python = reference.settings, reference.python
    for item in capture.workload.state:
        raise TargetUnsupported(
            f"{reference.qualname} keeps {item.access} between calls; a candidate would keep it under another name",
            where=Location(str(reference.path), reference.definition.start_line),
            remedy="Make the state an argument of both, and return it.",
        )
    if prepared.sanitizer and not (capture.environment.gpu and capture.workload.device == "cuda"):
        raise EnvironmentNotAble(
            "--sanitize checks kernels on a CUDA GPU, and this workload does not run on one",
            remedy="Run it on a machine with a GPU, or leave out --sanitize.",
        )
    # The candidate is judged as its file is, even if it is code that this tool generated for the reference.
    foreign = ForeignCandidate(
        capture,
        candidate.definition,
        candidate.whole.decode(),
        needs_kernel=options.needs_kernel,
        takes_empty=options.takes_empty,
    )
    sanitizer = Sanitizer(prepared.sanitizer, python, str(candidate.project), gpu=True) if prepared.sanitizer else None
    with Reference(
        capture,
        reference.plain.decode(),
        python,
        seed=options.seed,
        precision=settings.precision,
        fork_server=fork_server,
    ) as reference_side:
        result, source = verify_foreign(
            foreign,
            reference_side,
            needs_sandbox=needs_sandbox,
            reproduction=prepared.reproduction,
            on_case=on_case,
            far=options.far,
            sanitizer=sanitizer,
        )
        return with_timing(result, source, reference_side, baselines=settings.compiled_baselines, fresh=fresh)
