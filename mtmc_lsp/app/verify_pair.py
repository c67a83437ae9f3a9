"""``mtmc verify``: from two names to a verdict."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from mtmc_lsp.app.pipeline import OpenTarget, capture_target, open_target, parse_request
from mtmc_lsp.core.errors import EnvironmentNotAble, Location, TargetUnsupported
from mtmc_lsp.core.settings import Settings
from mtmc_lsp.measure.foreign_candidate import ForeignVerdict, verify_foreign, with_timing
from mtmc_lsp.process.fork_server import ForkServer, likely_variables
from mtmc_lsp.verify.adapters import ForeignCandidate
from mtmc_lsp.verify.cases import Case
from mtmc_lsp.verify.reference import Reference
from mtmc_lsp.verify.sanitizer import Sanitizer, find_sanitizer

REFERENCE, CANDIDATE = "Model", "ModelNew"
"""The names in files of KernelBench's format, taken where none is given."""


def open_pair(reference: str, candidate: str, settings: Settings | None, python: str) -> tuple[OpenTarget, OpenTarget]:
    """Both files as read, and the targets in them; each is ``FILE::NAME``, or a KernelBench-format file.

    Raises:
        RequestError: there is no such file or no such name in it.
    """
    specs = [
        spec if "::" in spec else f"{spec}::{name}" for spec, name in ((reference, REFERENCE), (candidate, CANDIDATE))
    ]
    first = parse_request(specs[0], settings, python)
    second = parse_request(specs[1], first.settings, first.python)
    return open_target(first), open_target(second)


def verify_pair(
    reference: OpenTarget,
    candidate: OpenTarget,
    *,
    reproduction: Path | None = None,
    seed: int | None = None,
    needs_kernel: bool = True,
    needs_sandbox: bool = False,
    takes_empty: bool = True,
    far: bool = False,
    sanitize: bool = False,
    on_case: Callable[[Case], None] = lambda _: None,
    fresh: bool = False,
) -> ForeignVerdict:
    """The verdict on a pair; a failure's smallest case is written as a runnable file.

    Args:
        reference: what is right; its workload gives the inputs.
        candidate: what is judged.
        reproduction: where to write; by default in the reference's project, below ``.mtmc/failures``.
        seed: of the inputs.
        needs_kernel: whether a candidate that launches no Triton kernel is refused.
        needs_sandbox: whether to refuse where the candidate's process cannot be locked in.
        takes_empty: whether it must take inputs without elements as the reference does.
        far: whether, on a GPU that has the memory, a case is run whose offsets of elements pass 2^31.
        sanitize: whether a correct candidate is also run under ``compute-sanitizer``.
        on_case: told of each case before it runs.
        fresh: whether what was timed before is timed again.

    Raises:
        EnvironmentNotAble: with ``sanitize``, where there is no GPU, or no such program.
    """
    python, settings = reference.request.python, reference.request.settings
    # Before anything else is done: it may be missing.
    program = find_sanitizer() if sanitize else ""
    if reproduction is None:
        stem = f"{candidate.request.path.stem}_{candidate.target.qualname.replace('.', '_')}"
        reproduction = reference.root / ".mtmc" / "failures" / f"{stem}.py"
    with ForkServer(python, likely_variables(), preload=True) as fork_server:
        fork_server.start()
        capture = capture_target(reference, fork_server)
        for item in capture.workload.kept:
            raise TargetUnsupported(
                f"{reference.target.qualname} keeps {item.access} between calls, which a candidate may keep under another name",
                where=Location(str(reference.request.path), reference.target.start_line),
                remedy="Pass the kept tensor to both as an argument, and return its new value.",
            )
        if program and not (capture.environment.gpu and capture.workload.device == "cuda"):
            raise EnvironmentNotAble(
                "--sanitize checks kernels on a CUDA GPU, and this workload does not run on one",
                remedy="Run it on a machine with a GPU, or leave out --sanitize.",
            )
        # The candidate is judged as its file is, even if that is our code in the reference's place.
        foreign = ForeignCandidate(
            capture, candidate.target, candidate.text.decode(), needs_kernel=needs_kernel, takes_empty=takes_empty
        )
        with Reference(
            capture,
            reference.plain.decode(),
            python,
            seed=seed,
            precision=settings.precision,
            fork_server=fork_server,
        ) as side:
            result, source = verify_foreign(
                foreign,
                side,
                needs_sandbox=needs_sandbox,
                reproduction=reproduction.absolute(),
                on_case=on_case,
                far=far,
                sanitizer=Sanitizer(program, python, str(candidate.root), gpu=True) if program else None,
            )
            return with_timing(result, source, side, baselines=settings.compiled_baselines, fresh=fresh)
