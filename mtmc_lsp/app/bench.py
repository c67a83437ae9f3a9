"""``mtmc bench``: every problem of a folder by the engine of ``optimize``, each in a process of its own.

Problems are captured, compiled and verified side by side; what is timed holds the GPU alone (:mod:`measure.gpu_lock`). A
result is a line of a JSONL file, written as soon as it is there, so that a run that was ended goes on where it was.
"""

from __future__ import annotations

import contextlib
import fcntl
import fnmatch
import hashlib
import json
import os
import queue
import re
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mtmc_lsp import __version__
from mtmc_lsp.app.bench_problem import ProblemRequest, failed
from mtmc_lsp.app.export import REFERENCE
from mtmc_lsp.app.interpreter import versions
from mtmc_lsp.core.errors import EnvironmentNotAble, FailureKind, Location, MtmcError, RequestError
from mtmc_lsp.core.json_codec import to_json
from mtmc_lsp.core.run import SCHEMA
from mtmc_lsp.core.settings import Settings
from mtmc_lsp.core.workload import Target
from mtmc_lsp.process.fork_server import ForkServer
from mtmc_lsp.process.isolation import isolated_command
from mtmc_lsp.process.priority import cores_for_job, usable_cores
from mtmc_lsp.process.project_files import FOLDER
from mtmc_lsp.source.targets import find_targets
from mtmc_lsp.source.workload.directive import parse_directive

COMMAND = isolated_command("mtmc_lsp.app.bench_problem")
END_SECONDS = 10.0
"""How long a problem may take to end by itself once its time is up."""
STOP_SECONDS = 5.0
"""How long it may take to close its workers when it is told to stop."""
TOLD_LINES = 3
"""Last lines of a crashed process's output that are kept."""


@dataclass(frozen=True)
class Problem:
    """A file of KernelBench's format (``Model``, ``get_inputs``, perhaps ``get_init_inputs``), or a target with a directive."""

    name: str
    """The file's path below the folder, without ``.py``, and ``::`` with the target where it is one with a directive."""
    path: Path
    level: str
    """``level1``; empty where no folder says."""
    target: str = REFERENCE


@dataclass(frozen=True)
class Shard:
    """One of ``count`` parts of the problems, from 1."""

    index: int = 1
    count: int = 1


@dataclass(frozen=True)
class Plan:
    """How problems are worked on: whatever changes a result is part of its key."""

    settings: Settings
    python: str
    seconds: float
    """Most seconds of one problem."""
    environment: Mapping[str, str]
    """Versions of the interpreter and its packages, and the GPUs."""

    def key(self, problem: Problem) -> str:
        """Names a result by what it depends on."""
        parts = [to_json(self.settings), self.seconds, dict(self.environment), __version__, SCHEMA]
        text = json.dumps([*parts, problem.target], sort_keys=True).encode() + problem.path.read_bytes()
        return hashlib.sha256(text).hexdigest()[:20]


def find_problems(folder: Path) -> list[Problem]:
    """Every problem at or below the folder, by level and number.

    Raises:
        RequestError: there is no such folder, or no problem in it.
    """
    if not folder.is_dir():
        raise RequestError("no such folder", where=Location(str(folder)), remedy="Name a folder of problems.")
    found = []
    for path in folder.resolve().rglob("*.py"):
        inside = path.relative_to(folder.resolve())
        hidden = any(part.startswith(".") for part in inside.parts)
        if not hidden:
            found += _problems(path, str(inside.with_suffix("")))
    if not found:
        remedy = (
            "A problem is a file with a class `Model` and a function `get_inputs`, or a function below `# mtmc: ...`."
        )
        raise RequestError("no problem in this folder", where=Location(str(folder)), remedy=remedy)
    return sorted(found, key=lambda problem: _natural(problem.name))


def _problems(path: Path, name: str) -> list[Problem]:
    """The problem that a file is, else one for each target with a directive of its own."""
    level = _level(path)
    try:
        text = path.read_bytes()
        targets = find_targets(text, str(path))
    except (OSError, MtmcError):
        return []
    names = {target.qualname for target in targets}
    if {REFERENCE, "get_inputs"} <= names:
        return [Problem(name, path, level)]
    own = [target.qualname for target in targets if _has_directive(text, target)]
    # A directive above a module's forward is the module's as well.
    kept = [each for each in own if f"{each}.forward" not in own]
    return [Problem(f"{name}::{each}", path, level, each) for each in kept]


def _has_directive(text: bytes, target: Target) -> bool:
    try:
        return parse_directive(text, target, target.path) is not None
    except MtmcError:
        # The problem's result will say what is wrong with it.
        return True


def _level(path: Path) -> str:
    return next((part for part in reversed(path.parts[:-1]) if re.fullmatch(r"level\d+", part)), "")


def _natural(name: str) -> list[tuple[int, str]]:
    """Orders ``2_x`` before ``10_x``."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]


def chosen(problems: Sequence[Problem], pattern: str, limit: int | None, shard: Shard) -> list[Problem]:
    """Those whose name has the pattern (``level2/*``, or a part of the name); then a shard, then the first so many.

    A limit takes the same number from each level in turn, so that a sample is one of all levels.
    """
    kept = [p for p in problems if not pattern or pattern in p.name or fnmatch.fnmatch(p.name, pattern)]
    kept = kept[shard.index - 1 :: shard.count]
    if limit is None or limit >= len(kept):
        return kept
    levels: dict[str, list[Problem]] = {}
    for problem in kept:
        levels.setdefault(problem.level, []).append(problem)
    rounds = max(len(items) for items in levels.values())
    dealt = [items[i] for i in range(rounds) for items in levels.values() if i < len(items)][:limit]
    return [problem for problem in kept if problem in dealt]


def parse_shard(text: str) -> Shard:
    """Read ``2/4``.

    Raises:
        RequestError: it has another form.
    """
    found = re.fullmatch(r"(\d+)/(\d+)", text)
    if not found or not 1 <= int(found[1]) <= int(found[2]):
        raise RequestError(f"cannot read --shard {text}", remedy="Write i/n with i from 1 to n, as in 2/4.")
    return Shard(int(found[1]), int(found[2]))


def describe_environment(python: str) -> dict[str, str]:
    """What a result depends on beside the problem: versions, and the GPUs by name with their driver."""
    return {**versions(python), "gpus": ", ".join(_gpus())}


def _gpus() -> list[str]:
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return [line.strip() for line in done.stdout.splitlines() if line.strip()]


def visible_devices() -> list[str]:
    """Values of ``CUDA_VISIBLE_DEVICES``, one GPU each; empty without any."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    if given is not None:
        return [name for name in given.split(",") if name.strip()]
    return [str(index) for index in range(len(_gpus()))]


# The file of results ----------------------------------------------------------------------------------------------


def read_results(path: Path) -> list[dict[str, Any]]:
    """The results in the file, the newest of each problem; a line that was cut off by the end of a run is left out.

    Raises:
        RequestError: it cannot be read, or holds something else.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return []
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"cannot be read: {error}", where=Location(str(path)), remedy="Name another file.") from None
    newest: dict[str, dict[str, Any]] = {}
    lines = text.split("\n")
    for number, line in enumerate(lines, 1):
        if not line:
            continue
        try:
            record = json.loads(line)
            newest.pop(record["problem"], None)
            newest[record["problem"]] = record
        except (ValueError, KeyError, TypeError):
            if number == len(lines) or not line.endswith("}"):
                continue
            remedy = "Name a file that `mtmc bench` wrote."
            raise RequestError("this line is no result", where=Location(str(path), number), remedy=remedy) from None
    return list(newest.values())


def append_result(path: Path, record: Mapping[str, Any]) -> None:
    """Add a line. Several runs may write to one file; a line that was cut off before is left behind on its own.

    Raises:
        EnvironmentNotAble: it cannot be written.
    """
    try:
        with path.open("a+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            size = file.seek(0, os.SEEK_END)
            if size:
                file.seek(size - 1)
            broken = bool(size) and file.read(1) != b"\n"
            file.write(b"\n" * broken + json.dumps(record).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        where = Location(str(path))
        raise EnvironmentNotAble(f"cannot be written: {error.strerror}", where=where, remedy="Make room.") from None


# Running ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Place:
    """Where one of the problems that run side by side does."""

    device: str
    """The value of ``CUDA_VISIBLE_DEVICES``; empty without a GPU."""
    cores: tuple[int, ...]


class Bench:
    """Works through problems, several at a time."""

    def __init__(
        self,
        plan: Plan,
        out: Path,
        *,
        jobs: int = 1,
        devices: Sequence[str] = (),
        command: Sequence[str] = COMMAND,
        fork_server: ForkServer | None = None,
    ) -> None:
        """Prepare.

        Args:
            plan: how each problem is worked on.
            out: the file of results.
            jobs: problems at a time.
            devices: GPUs that the problems are dealt to; empty without any.
            command: what works on one problem: it reads the request and writes to the file that is its last argument.
            template: what the workers of all problems become copies of, where there is one; the caller closes it.
        """
        self._fork_server = fork_server
        self._plan, self._out, self._jobs, self._command = plan, out, max(1, jobs), command
        self._store = out.resolve().parent / FOLDER
        self._has_devices = bool(devices)
        self._places: queue.SimpleQueue[_Place] = queue.SimpleQueue()
        cores = usable_cores()
        for job in range(self._jobs):
            device = devices[job % len(devices)] if devices else ""
            self._places.put(_Place(device, tuple(cores_for_job(job, self._jobs, cores))))
        self._running: set[subprocess.Popen[bytes]] = set()

    def run(
        self,
        problems: Sequence[Problem],
        *,
        fresh: bool = False,
        on_start: Callable[[Problem], None] = lambda problem: None,
    ) -> Iterator[tuple[Problem, dict[str, Any], bool]]:
        """Each problem's result as it comes, and whether it was there from before.

        Args:
            problems: in the order to start them.
            fresh: whether results from before are made again.
            on_start: is told of each problem that is started.
        """
        known = {record["key"]: record for record in read_results(self._out)}
        todo = []
        for problem in problems:
            record = known.get(self._plan.key(problem))
            if record is not None and not fresh:
                yield problem, record, True
            else:
                todo.append(problem)
        with ThreadPoolExecutor(self._jobs) as pool:
            try:
                pending = {pool.submit(self._one, problem, on_start): problem for problem in todo}
                short = []
                while pending:
                    for future in wait(pending, return_when=FIRST_COMPLETED).done:
                        problem = pending.pop(future)
                        record = future.result()
                        if self._jobs > 1 and self._has_devices and lacked_memory(record):
                            short.append(problem)
                            continue
                        append_result(self._out, record)
                        yield problem, record, False
                for problem in short:
                    # Beside others there was no room for it on the GPU; alone there may be.
                    record = self._one(problem, on_start)
                    append_result(self._out, record)
                    yield problem, record, False
            finally:
                pool.shutdown(wait=False, cancel_futures=True)
                for process in list(self._running):
                    _stop(process)

    def _one(self, problem: Problem, on_start: Callable[[Problem], None]) -> dict[str, Any]:
        on_start(problem)
        began = time.monotonic()
        place = self._places.get()
        try:
            answer = self._answer(problem, place)
        finally:
            self._places.put(place)
        head = {"schema": SCHEMA, "problem": problem.name, "level": problem.level, "key": self._plan.key(problem)}
        return {**head, "wall_seconds": round(time.monotonic() - began, 3), **answer}

    @contextlib.contextmanager
    def _lent(self) -> Iterator[tuple[dict[str, str], tuple[int, ...]]]:
        """Variables and descriptors for a problem's process, by which it copies the template."""
        if self._fork_server is None:
            yield {}, ()
            return
        with self._fork_server.lend() as offer:
            yield offer

    def _answer(self, problem: Problem, place: _Place) -> dict[str, Any]:
        plan = self._plan
        request = ProblemRequest(
            str(problem.path), problem.target, plan.python, plan.settings, plan.seconds, str(self._store), place.cores
        )
        environment = {**os.environ, **({"CUDA_VISIBLE_DEVICES": place.device} if place.device else {})}
        with tempfile.TemporaryDirectory(prefix="mtmc-bench-") as folder:
            answer, output = Path(folder) / "answer.json", Path(folder) / "output"
            with output.open("wb") as told, self._lent() as (offer, lines):
                process = subprocess.Popen(
                    [*self._command, str(answer)],
                    stdin=subprocess.PIPE,
                    stdout=told,
                    stderr=subprocess.STDOUT,
                    env={**environment, **offer},
                    pass_fds=lines,
                    start_new_session=True,
                )
            self._running.add(process)
            try:
                process.communicate(json.dumps(to_json(request)).encode(), timeout=plan.seconds + END_SECONDS)
            except subprocess.TimeoutExpired:
                _stop(process)
                text = f"took longer than the {plan.seconds:.0f} s that a problem may take, and was ended"
                return failed("timeout", text)
            finally:
                self._running.discard(process)
            try:
                found: dict[str, Any] = json.loads(answer.read_bytes())
            except (OSError, ValueError):
                last = " / ".join(output.read_text("utf-8", "replace").strip().splitlines()[-TOLD_LINES:])
                text = f"its process ended with code {process.returncode}: {last or 'it said nothing'}"
                return failed("crashed", text)
            return found


def lacked_memory(record: Mapping[str, Any]) -> bool:
    """Whether a problem or one of its steps ran out of memory."""
    kinds = [step.get("failure") for step in record.get("steps") or ()]
    kinds.append((record.get("error") or {}).get("kind"))
    return any(kind is not None and FailureKind(kind).is_out_of_memory for kind in kinds)


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End a problem's process: by itself, so that its workers are closed, or else by force."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            # Workers see that their parent is gone, and end themselves.
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
