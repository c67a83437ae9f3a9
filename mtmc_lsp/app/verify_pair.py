"""``mtmc verify``: from two names to a verdict."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from mtmc_lsp.app.pipeline import OpenTarget, capture_target, open_target, parse_request
from mtmc_lsp.core.errors import EnvironmentNotAble, Location, TargetUnsupported
from mtmc_lsp.core.settings import Settings
from mtmc_lsp.measure.pair_timing import with_timing
from mtmc_lsp.process.fork_server import ForkServer, likely_variables
from mtmc_lsp.process.project_files import FOLDER, check_file
from mtmc_lsp.verify.cases import Case
from mtmc_lsp.verify.pair import Pair, PairVerdict, PairVerifier
from mtmc_lsp.verify.pair_reference import Reference
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
) -> PairVerdict:
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
        reproduction = reference.root / FOLDER / "failures" / f"{stem}.py"
    # Before minutes of checks, whose result could not be written.
    check_file(reproduction)
    with ForkServer(python, likely_variables(), preload=True) as fork_server:
        fork_server.start()
        capture = capture_target(reference, fork_server)
        for item in capture.workload.state:
            raise TargetUnsupported(
                f"{reference.target.qualname} keeps {item.access} between calls, which a candidate would have under another name",
                where=Location(str(reference.request.path), reference.target.start_line),
                remedy="Give both as an argument what they keep, and return it.",
            )
        # The candidate is judged as its file has it, also where that is our own code in the reference's place.
        pair = Pair(capture, reference.plain.decode(), candidate.target, candidate.text.decode())
        if program and not (capture.environment.gpu and capture.workload.device == "cuda"):
            raise EnvironmentNotAble(
                "--sanitize looks at kernels on a CUDA GPU, and this workload runs on none",
                remedy="Run it where there is one, or leave out --sanitize.",
            )
        own_side = Reference(
            capture, pair.own, python, seed=seed, precision=settings.precision, fork_server=fork_server
        )
        verifier = PairVerifier(
            pair,
            own_side,
            needs_kernel=needs_kernel,
            needs_sandbox=needs_sandbox,
            takes_empty=takes_empty,
            far=far,
            sanitizer=Sanitizer(program, python, str(candidate.root), gpu=True) if program else None,
        )
        try:
            found = verifier.verify(reproduction.absolute(), on_case)
            init = verifier.constructor_arguments
            return with_timing(found, pair, init, python, baselines=settings.compiled_baselines, fresh=fresh)
        finally:
            verifier.close()
            own_side.close()
