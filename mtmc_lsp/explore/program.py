"""Explores one program in a process of ``mtmc explore``: if it crashes the process, the other programs go on.

The process reads an :class:`ExploreRequest` as JSON from standard input and writes its answer to the file that is its argument.
"""

from __future__ import annotations

import json
import sys
import time
import traceback
from collections import Counter
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

from mtmc_lsp.app.provenance import current_build
from mtmc_lsp.app.regions.capture import capture_whole
from mtmc_lsp.app.target_file import OpenTarget, Request, open_target
from mtmc_lsp.app.why import refuse_calls_without_kernels
from mtmc_lsp.codegen.coder import BuiltinCoder
from mtmc_lsp.core.errors import FailureKind, MtmcError
from mtmc_lsp.core.json_codec import from_json, to_json
from mtmc_lsp.core.learning.transitions import Program
from mtmc_lsp.core.settings import Settings
from mtmc_lsp.core.workload import Capture
from mtmc_lsp.explore.choices import RooflineActions
from mtmc_lsp.explore.growth import Grower, Growth
from mtmc_lsp.explore.identity import environment_text, portable, program_id, reason_of
from mtmc_lsp.explore.measuring import Place, open_measurer
from mtmc_lsp.explore.parquet import Writer, read_transitions, read_versions
from mtmc_lsp.planners.roofline import RooflinePlanner
from mtmc_lsp.process.fork_server import ForkServer, likely_variables
from mtmc_lsp.process.parent_watch import end_with_parent
from mtmc_lsp.process.priority import limit_to_cores

CAPTURE_SECONDS = 120.0
BATCH_SECONDS = 20.0
"""Time for the last batch after the program's time is over."""
STARTING, CAPTURING, LOADING = "starting", "capturing", "loading"
"""Stages before the tree grows: the workers, the graph, and what was measured before."""


@dataclass(frozen=True)
class ExploreRequest:
    """A program, and how its tree grows."""

    path: str
    target: str
    suite: str
    """The suite's folder."""
    name: str
    family: str
    origin: str
    stores_source: bool
    python: str
    settings: Settings
    out: str
    """The folder of transitions."""
    seconds: float
    """Time after which no further version is expanded."""
    depth: int
    width: int
    seed: int
    cores: tuple[int, ...] = ()
    """The CPU cores that it may use; empty for all."""


@dataclass(frozen=True)
class ExploreAnswer:
    """What came of exploring one program."""

    added: int = 0
    """Transitions that were added."""
    total: int = 0
    """Transitions of the program in the folder."""
    outcomes: dict[str, int] = field(default_factory=dict)
    """How many of the added transitions have each outcome."""
    stages: dict[str, float] = field(default_factory=dict)
    """Seconds of each stage."""
    reason: str = ""
    """Why the program was not explored to the end of its time; empty if it was."""


def explore(request: ExploreRequest) -> ExploreAnswer:
    """Capture the program and grow its tree.

    Raises:
        MtmcError: the program cannot be captured, or cannot run here.
    """
    began = time.monotonic()
    target = open_target(Request(Path(request.path), request.target, request.settings, request.python))
    with (
        ForkServer(request.python, likely_variables(), preload=True) as fork_server,
        # It imports what the file imports while the target is captured.
        closing(fork_server.branch(str(target.path), str(target.project))) as branch,
    ):
        started = time.monotonic()
        capture = capture_whole(target, fork_server, min(CAPTURE_SECONDS, request.seconds))
        refuse_calls_without_kernels(target, capture)
        stages = {STARTING: started - began, CAPTURING: time.monotonic() - started}
        return _grow(request, target, capture, branch, began + request.seconds, stages)


def _grow(
    request: ExploreRequest,
    target: OpenTarget,
    capture: Capture,
    fork_server: ForkServer,
    deadline: float,
    stages: dict[str, float],
) -> ExploreAnswer:
    began = time.monotonic()
    identity, folder, settings = program_id(capture), Path(request.out), request.settings
    source = target.plain.decode()
    stored = source if request.stores_source else ""
    place = Place(capture, source, request.python, settings.archs, fork_server, deadline + BATCH_SECONDS)
    with Writer(folder) as writer, closing(open_measurer(place)) as measurer:
        versions, earlier = read_versions(folder, identity), read_transitions(folder, identity)
        writer.add_program(Program(identity, request.name, request.family, request.origin, portable(capture), stored))
        environment = environment_text(capture.environment, current_build())
        grower = Grower(
            identity,
            capture,
            source,
            actions=RooflineActions(RooflinePlanner.of(settings), has_gpu=measurer.has_gpu),
            coder=BuiltinCoder(measurer.device()),
            measurer=measurer,
            rows=writer,
            growth=Growth(request.depth, request.width, deadline, request.seed, environment),
        )
        grower.load(versions, earlier)
        stages[LOADING] = time.monotonic() - began
        reason = ""
        try:
            grower.run()
        except MtmcError as error:
            # What was measured before is stored.
            reason = "" if error.kind is FailureKind.DEADLINE else reason_of(error, Path(request.suite))
    stages = {name: round(seconds, 3) for name, seconds in {**stages, **grower.seconds}.items()}
    outcomes = Counter(transition.outcome.value for transition in grower.added)
    return ExploreAnswer(len(grower.added), len(earlier) + len(grower.added), dict(outcomes), stages, reason)


def main() -> None:
    """Explore the program and write the answer."""
    end_with_parent()
    request = from_json(ExploreRequest, json.load(sys.stdin))
    limit_to_cores(request.cores)
    try:
        answer = explore(request)
    except MtmcError as error:
        answer = ExploreAnswer(reason=reason_of(error, Path(request.suite)))
    except Exception as error:  # a bug of ours ends one program; the answer says where it is
        frame = traceback.extract_tb(error.__traceback__)[-1]
        text = f"{type(error).__name__}: {error} ({Path(frame.filename).name}:{frame.lineno})"
        answer = ExploreAnswer(reason=text)
    Path(sys.argv[1]).write_text(json.dumps(to_json(answer)), encoding="utf-8")


if __name__ == "__main__":
    main()
