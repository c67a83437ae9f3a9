"""Entry point of a worker process, run by its path under the user's interpreter.

Reads requests from standard input and writes answers to the pipe given by ``--answers``. Makes the package ``mtmc_lsp``
importable from the location of this file, without adding anything else of our environment to the user's path.
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
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from mtmc_lsp.core.errors import FailureKind

COMMANDS = {
    "capture.capture": ("CaptureRequest", "commands:capture"),
    "capture.local_values": ("LocalValuesRequest", "commands:values_of_locals"),
    "compile.prepare": ("PrepareCompilerRequest", "commands:prepare"),
    "compile.launches": ("CompileRequest", "commands:compile_launches"),
    "compile.variants": ("CompileVariantsRequest", "commands:compile_variants"),
    "timing.time": ("TimeRequest", "timing_commands:time_candidate"),
    "timing.baselines": ("BaselinesRequest", "timing_commands:compile_baselines"),
    "timing.recompilations": ("RecompilationsRequest", "timing_commands:count_recompilations"),
    "timing.prepare": ("PrepareRequest", "ranking_commands:prepare"),
    "timing.rank": ("RankRequest", "ranking_commands:rank"),
    "timing.siblings": ("SiblingsRequest", "sibling_commands:time_siblings"),
    "timing.calibration": ("CalibrationRequest", "calibration_commands:measure_device"),
    "timing.environment": ("EnvironmentRequest", "calibration_commands:read_environment"),
    "timing.profile": ("ProfileRequest", "profile_command:profile"),
    "verify.constructor": ("ConstructorRequest", "reference_commands:constructor"),
    "verify.reference": ("ReferenceRequest", "reference_commands:compute_reference"),
    "verify.oracle": ("OracleRequest", "reference_commands:compute_oracle"),
    "verify.share_inputs": ("ShareInputsRequest", "reference_commands:share_inputs"),
    "verify.unshare_inputs": ("UnshareInputsRequest", "reference_commands:unshare_inputs"),
    "verify.candidate": ("CandidateRequest", "candidate_commands:run_candidate"),
    "verify.construct": ("ConstructRequest", "load_command:construct"),
    "verify.load": ("LoadRequest", "load_command:load"),
    "verify.guard": ("GuardRequest", "guard_command:check_guard"),
    "verify.judge": ("JudgeRequest", "judge_command:judge"),
    "verify.use_reference": ("UseReferenceRequest", "use.commands:use_reference"),
    "verify.use_candidate": ("UseRequest", "use.commands:use_candidate"),
    "verify.judge_use": ("JudgeUseRequest", "use.commands:judge_use"),
    "verify.reproduce": ("ReproduceRequest", "reproduction:reproduce"),
    "verify.whole_target": ("WholeTargetRequest", "whole_target:compare_whole_target"),
    "kernels.trace": ("TraceRequest", "trace_command:trace"),
    "kernels.compile": ("KernelCompileRequest", "compile_command:compile_kernels"),
    "kernels.check": ("KernelCheckRequest", "check_command:check"),
    "kernels.program": ("ProgramRequest", "program_command:run_program"),
    "kernels.record_suite": ("SuiteRecordRequest", "suite.commands:record_suite"),
    "kernels.test_suite": ("SuiteTestRequest", "suite.commands:test_suite"),
    "kernels.time": ("KernelTimeRequest", "time_command:time_kernels"),
    "process.start": ("StartRequest", "start:start"),
    "process.release": ("ReleaseRequest", "gpu_memory:release"),
    "policies.lm.score": ("ScoreRequest", "score_command:score"),
    "training.lm.start": ("StartTrainingRequest", "training_commands:start_training"),
    "training.lm.advance": ("AdvanceTrainingRequest", "training_commands:advance_training"),
}
"""For each command ``room.verb`` its request class in ``room/messages.py`` and its handler ``module:name`` in
``room/worker/``: a worker imports only what it is asked to run. ``policies.lm`` is the folder ``policies/lm``."""
PRELOADED_MODULES = (
    "mtmc_lsp.capture.worker.commands",
    "mtmc_lsp.verify.worker.candidate_commands",
    "mtmc_lsp.verify.worker.judge_command",
    "mtmc_lsp.verify.worker.use.commands",
)
"""Modules of the commands that every run needs; a fork server imports them before it forks."""
MAX_FILE_BYTES = 64 << 30
"""Limit for one file of a sandboxed process: results may be large, but must not fill the disk."""
MEMORY_REMEDY = "Make the sizes in the workload smaller."


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


def _set_priority(*, lower: bool) -> None:
    from mtmc_lsp.process import priority

    # A child inherits the niceness of its parent, but not the CPU share of its session.
    if lower or priority.has_low_priority():
        priority.lower_priority()


def _supervise() -> None:
    from mtmc_lsp.process.supervisor import run_supervised

    run_supervised()


def _enter_sandbox(options: dict[str, Any]) -> None:
    import resource

    from mtmc_lsp.process import sandbox

    sandbox.active = sandbox.enter(**options)
    resource.setrlimit(resource.RLIMIT_FSIZE, (MAX_FILE_BYTES, MAX_FILE_BYTES))
    # Writing beyond the limit then raises OSError in the candidate, instead of killing the process by a signal.
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)


def _exit_with(parent: int) -> None:
    """End this process group once the parent is gone, whatever user code is doing."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os.killpg(0, signal.SIGKILL)


def _import(name: str) -> ModuleType:
    """Import a module without garbage collection, which would scan all of torch, and exclude it from later collections."""
    if name not in sys.modules:
        gc.disable()
        try:
            importlib.import_module(name)
        finally:
            gc.freeze()
            gc.enable()
    return sys.modules[name]


def _import_dependencies(path: str) -> bool:
    return bool(_import("mtmc_lsp.capture.worker.user_module").import_dependencies(path))


def _run(command: str, request: Any) -> object:
    from mtmc_lsp.core.json_codec import from_json

    room = f"mtmc_lsp.{command.rpartition('.')[0]}"
    request_class, handler = COMMANDS[command]
    module, _, function = handler.partition(":")
    messages, commands = _import(f"{room}.messages"), _import(f"{room}.worker.{module}")
    return getattr(commands, function)(from_json(getattr(messages, request_class), request))


def _respond(message: dict[str, Any], token: str) -> str:
    """Run the command; the line with its answer or error. Other workers then find the GPU memory that it does not keep."""
    from mtmc_lsp.core.errors import FailureKind

    # Imported first: an import excludes all objects from garbage collection, also those that the command leaves.
    gpu_memory = _import("mtmc_lsp.process.worker.gpu_memory")
    answer, failure = _outcome(message, token)
    gpu_memory.return_idle_memory(ran_out=failure is FailureKind.GPU_OUT_OF_MEMORY)
    return answer


def _outcome(message: dict[str, Any], token: str) -> tuple[str, FailureKind | None]:
    """The line with the answer or error of the command, and the kind of the error."""
    from mtmc_lsp.core.errors import MtmcError, OutOfMemory, TargetRaises
    from mtmc_lsp.process.protocol import encode_answer, encode_error
    from mtmc_lsp.process.worker.failures import classify

    command = message["command"]
    try:
        return encode_answer(_run(command, message["request"]), token), None
    except MtmcError as error:
        error.kind = classify(error)
        return encode_error(error, token), error.kind
    except SystemExit as error:
        text = f"the file's code ends the process (SystemExit: {error})"
        remedy = "Put it under `if __name__ == '__main__':`."
        return encode_error(TargetRaises(text, remedy=remedy, kind=classify(error)), token), None
    except Exception as error:
        kind = classify(error)
        if kind.is_out_of_memory:
            text = "the GPU is out of memory" if kind.is_gpu_failure else "the machine is out of memory"
            text += ", because of this workload or of other programs"
            return encode_error(OutOfMemory(text, remedy=MEMORY_REMEDY, kind=kind), token), kind
        # A bug of ours: the log gets the whole traceback, the user its last frame.
        traceback.print_exc()
        frame = traceback.extract_tb(error.__traceback__)[-1]
        text = f"internal error in {command}: {type(error).__name__}: {error} ({frame.filename}:{frame.lineno})"
        return encode_error(MtmcError(text, kind=kind), token), kind


def _shared_response(message: dict[str, Any], answers: TextIO) -> str:
    """The answer of a command that shares the GPU, after the line that says that it starts."""
    from mtmc_lsp.process.gpu_lock import sharing
    from mtmc_lsp.process.protocol import encode_start

    # A timing that this command lets pass may need the memory that torch's allocator keeps.
    return_memory = _import("mtmc_lsp.process.worker.gpu_memory").return_idle_memory
    gpu, folder = message["lock"]
    with sharing(gpu, folder, return_memory):
        answers.write(encode_start(message["token"]))
        answers.flush()
        return _respond(message, message["token"])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    parser.add_argument("--answers", type=int)
    parser.add_argument("--fork-server", type=int)
    parser.add_argument("--once", type=Path)
    parser.add_argument("--profile", type=Path)
    parser.add_argument("--preload", action="store_true")
    parser.add_argument("--low-priority", action="store_true")
    parser.add_argument("--memory", type=int)
    parser.add_argument("--sandbox", type=json.loads)
    return parser


def main() -> None:
    """Serve requests until standard input ends."""
    options = _parser().parse_args()
    if os.environ.get("TRITON_INTERPRET") == "1":
        # Numpy multiplies the small tiles of the interpreter fastest in one thread. It reads this variable at import.
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    # Python puts the folder of a script first on the path; the user's modules must not find ours there.
    if sys.path and Path(sys.path[0]).resolve() == Path(__file__).resolve().parent:
        sys.path.pop(0)
    _register_package()
    if os.environ.get("TRITON_INTERPRET") == "1":
        _import("mtmc_lsp.process.worker.host_memory").keep_freed_memory()
    if options.once is not None:
        sys.exit(_run_once(options))
    if options.profile is not None:
        _import("mtmc_lsp.timing.worker.profile_command").once(str(options.profile))
        return
    _set_priority(lower=options.low_priority)
    _supervise()
    if options.fork_server is None:
        _serve(options, options.answers)
        return
    from mtmc_lsp.process.worker.fork_server_loop import serve_forks

    arguments, answers = serve_forks(
        options.fork_server, _import_dependencies, preload=options.preload, command_modules=PRELOADED_MODULES
    )
    code = 0
    try:
        options = _parser().parse_args(arguments)
        _set_priority(lower=options.low_priority)
        _serve(options, answers)
    except BaseException:
        traceback.print_exc()
        code = 1
    # A forked worker must not run the exit handlers of the fork server.
    sys.stdout.flush()
    os._exit(code)


def _serve(options: argparse.Namespace, answers_file: int) -> None:
    parent = os.getppid()
    # Guards that warn are slower; workers measure what the user's program runs otherwise.
    os.environ.pop("MTMC_GUARD", None)
    if options.sandbox:
        _enter_sandbox(options.sandbox)
    # After entering the sandbox, which applies only to threads that start later.
    if os.getpgrp() == os.getpid():
        threading.Thread(target=_exit_with, args=(parent,), daemon=True).start()
    if options.memory:
        _limit_memory(options.memory)
    # A process that user code starts must not keep the pipe open after our end.
    os.set_inheritable(answers_file, False)
    answers = os.fdopen(answers_file, "w", encoding="utf-8")
    requests = os.fdopen(os.dup(0), "r", encoding="utf-8")
    # User code that reads standard input gets nothing, instead of our requests.
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for line in requests:
        message = json.loads(line)
        answer = _shared_response(message, answers) if message["lock"] else _respond(message, message["token"])
        answers.write(answer)
        answers.flush()


def _run_once(options: argparse.Namespace) -> int:
    """Run the requests in a file, one per line; the exit code is 0 if all of them succeeded."""
    messages = [json.loads(line) for line in options.once.read_text(encoding="utf-8").splitlines()]
    if options.sandbox:
        _enter_sandbox(options.sandbox)
    answers = [json.loads(_respond(message, "")) for message in messages]
    return 0 if all(answer.get("result", {}).get("status") == "ran" for answer in answers) else 1


if __name__ == "__main__":
    main()
