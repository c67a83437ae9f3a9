"""Entry point of a worker process, run by its path under the user's interpreter.

Reads requests from standard input, answers on the pipe given by ``--answers``. Makes the package ``mtmc_lsp`` importable from
where this file lies, without putting anything else of our environment on the user's path.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import importlib.util
import json
import os
import signal
import sys
import threading
import time
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any

COMMANDS = {
    "capture.capture": "mtmc_lsp.capture.worker.commands:capture",
    "measure.compare": "mtmc_lsp.verify.worker.commands:compare",
    "measure.reference": "mtmc_lsp.verify.worker.commands:reference",
    "measure.offer": "mtmc_lsp.verify.worker.commands:offer",
    "measure.take_back": "mtmc_lsp.verify.worker.commands:take_back",
    "measure.candidate": "mtmc_lsp.verify.worker.commands:candidate",
    "measure.constructor": "mtmc_lsp.verify.worker.pair_commands:constructor",
    "measure.pair": "mtmc_lsp.verify.worker.pair_commands:candidate",
    "measure.reproduce": "mtmc_lsp.verify.worker.reproduction:reproduce",
    "measure.judge": "mtmc_lsp.verify.worker.pair_commands:compare",
    "measure.compile": "mtmc_lsp.compile.worker.commands:compile_launches",
    "measure.time": "mtmc_lsp.timing.worker.timing_commands:time_candidate",
    "measure.baseline": "mtmc_lsp.timing.worker.timing_commands:baseline",
    "measure.quick": "mtmc_lsp.timing.worker.ranking_commands:quick",
    "measure.device": "mtmc_lsp.timing.worker.calibration_commands:device",
    "measure.environment": "mtmc_lsp.timing.worker.calibration_commands:machine",
    "measure.profile": "mtmc_lsp.timing.worker.profile_command:profile",
    "measure.start": "mtmc_lsp.verify.worker.commands:start",
}
"""Command to ``module:function``; each takes and returns a JSON object."""
AHEAD = ("capture.capture", "measure.candidate", "measure.pair")
"""Commands that every run asks copies of a template for."""
LARGEST_FILE = 64 << 30
"""Bytes of one file of a process that is locked in: results may be large, but the disk is not its own."""


def _register_package() -> None:
    folder = Path(__file__).resolve().parents[2]
    spec = importlib.util.spec_from_file_location(
        "mtmc_lsp", folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["mtmc_lsp"] = module
    spec.loader.exec_module(module)


def _limit_memory(size: int) -> None:
    import resource

    resource.setrlimit(resource.RLIMIT_DATA, (size, size))


def _give_way(*, asked: bool) -> None:
    from mtmc_lsp.process import priority

    # Niceness is inherited; the share of a session, which a worker has of its own, is not.
    if asked or priority.gives_way():
        priority.give_way()


def _lock_in(sandbox: dict[str, Any]) -> None:
    import resource

    from mtmc_lsp.process import sandbox as locking

    locking.active = locking.enter(**sandbox)
    resource.setrlimit(resource.RLIMIT_FSIZE, (LARGEST_FILE, LARGEST_FILE))
    # A file that grows beyond is an error of the candidate's, not its end by a signal.
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)


def _end_with(parent: int) -> None:
    """End this process and what it started once the parent is gone, whatever user code is doing."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os.killpg(0, signal.SIGKILL)


def _imported(name: str) -> ModuleType:
    """A module; what it imports is left alone by the garbage collector, for which torch alone is much to look through."""
    if name not in sys.modules:
        gc.disable()
        try:
            importlib.import_module(name)
        finally:
            gc.freeze()
            gc.enable()
    return sys.modules[name]


def _answer(message: dict[str, Any]) -> dict[str, Any]:
    from mtmc_lsp.core.errors import MtmcError, OutOfMemory, TargetRaises

    try:
        module, _, function = COMMANDS[message["command"]].partition(":")
        handler = getattr(_imported(module), function)
        return {"result": handler(message["request"])}
    except MtmcError as error:
        return {"error": error.to_json()}
    except MemoryError:
        return {"error": OutOfMemory("out of memory", remedy="Make the sizes in the workload smaller.").to_json()}
    except SystemExit as error:
        text = f"the file's code ends the process (SystemExit: {error})"
        return {"error": TargetRaises(text, remedy="Put it under `if __name__ == '__main__':`.").to_json()}
    except Exception as error:
        if type(error).__name__ == "OutOfMemoryError" or "CUDA error: out of memory" in str(error):
            text = "the GPU is out of memory, by what this needs or by what other programs take"
            return {"error": OutOfMemory(text, remedy="Make the sizes in the workload smaller.").to_json()}
        # A bug of ours: the whole trace goes to the log, its end to the user.
        traceback.print_exc()
        where = traceback.extract_tb(error.__traceback__)[-1]
        text = (
            f"internal error in {message['command']}: {type(error).__name__}: {error} ({where.filename}:{where.lineno})"
        )
        return {"error": MtmcError(text).to_json()}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    parser.add_argument("--answers", type=int)
    parser.add_argument("--fork-server", type=int)
    parser.add_argument("--once", type=Path)
    parser.add_argument("--profile", type=Path)
    parser.add_argument("--ahead", action="store_true")
    parser.add_argument("--give-way", action="store_true")
    parser.add_argument("--memory", type=int)
    parser.add_argument("--sandbox", type=json.loads)
    return parser


def main() -> None:
    """Serve requests until standard input ends."""
    options = _parser().parse_args()
    if os.environ.get("TRITON_INTERPRET") == "1":
        # Numpy multiplies the interpreter's tiles, for which more threads take longer than one. It reads this when imported.
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    # The folder of this file is first on the path of a script; the user's own modules must not find ours there.
    if sys.path and Path(sys.path[0]).resolve() == Path(__file__).resolve().parent:
        sys.path.pop(0)
    _register_package()
    if options.once is not None:
        sys.exit(_run_once(options))
    if options.profile is not None:
        _imported("mtmc_lsp.timing.worker.profile_command").once(str(options.profile))
        return
    _give_way(asked=options.give_way)
    if options.fork_server is None:
        _serve(options, options.answers)
        return
    from mtmc_lsp.process.worker.fork_server_loop import serve_copies

    commands = [COMMANDS[name].partition(":")[0] for name in AHEAD]
    arguments, answers = serve_copies(options.fork_server, ahead=options.ahead, commands=commands)
    code = 0
    try:
        options = _parser().parse_args(arguments)
        _give_way(asked=options.give_way)
        _serve(options, answers)
    except BaseException:
        traceback.print_exc()
        code = 1
    # A copy ends here: what the template holds is not its to clean up.
    sys.stdout.flush()
    os._exit(code)


def _serve(options: argparse.Namespace, number: int) -> None:
    parent = os.getppid()
    if options.sandbox:
        _lock_in(options.sandbox)
    # Only now: a lock holds for threads that start later.
    if os.getpgrp() == os.getpid():
        threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    if options.memory:
        _limit_memory(options.memory)
    # A process that user code starts must not hold the pipe open after our end.
    os.set_inheritable(number, False)
    answers = os.fdopen(number, "w", encoding="utf-8")
    requests = os.fdopen(os.dup(0), "r", encoding="utf-8")
    # User code that reads standard input gets nothing instead of our requests.
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for line in requests:
        message = json.loads(line)
        answers.write(json.dumps({**_answer(message), "token": message["token"]}) + "\n")
        answers.flush()


def _run_once(options: argparse.Namespace) -> int:
    """Run a file's requests, one on each line; the exit code is 0 where all of them ran."""
    messages = [json.loads(line) for line in options.once.read_text(encoding="utf-8").splitlines()]
    if options.sandbox:
        _lock_in(options.sandbox)
    answers = [_answer(message) for message in messages]
    return 0 if all(answer.get("result", {}).get("status") == "ran" for answer in answers) else 1


if __name__ == "__main__":
    main()
