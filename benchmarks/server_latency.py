"""How fast the language server answers on a 10,000-line file while a run is under way.

    python benchmarks/server_latency.py [--rounds N] [--starts N] [--compare-with COMMAND] [--turns N] [--out FILE]

``--compare-with`` names another language server that gets the same requests on the same file in the same run, in turns with ours.
For example, jedi-language-server in a separate environment::

    python -m venv jedi && jedi/bin/pip install jedi-language-server
    python benchmarks/server_latency.py --compare-with jedi/bin/jedi-language-server

It takes about a minute for one round of such a file, so it has a turn in ``--turns`` of the rounds alone, spread over all.
Only what both answer is compared, and the ratio is that of the medians of those very rounds. The exit code is 1 where a budget is
not kept or the other server is faster at anything.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import random
import shlex
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from mtmc_lsp.process.isolation import isolated_command

ROOT = Path(__file__).resolve().parent.parent
LINES = 10_000
WAIT_SECONDS = 900
"""For one answer; others have taken nearly a minute for the code actions of such a file."""
TARGET = """\
# mtmc: x=f32[64,384] weight=f32[384]
def busy(x, weight):
    y = torch.relu(x) * weight
    return torch.softmax(y + 1, -1) * y


"""
STARTS = ("ready", "first answer")
BUDGETS_MS = {"ready": 500, "codeAction": 30, "hover": 30, "codeLens": 30, "keystroke to diagnostics": 60}
"""95th percentiles; of a start the median."""
BUDGET_MB = 120


def main() -> None:
    """Measure, print a table, and write the numbers where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--starts", type=int, default=5, help="how often each server is started, to time that")
    parser.add_argument("--compare-with", default="", metavar="COMMAND")
    parser.add_argument("--turns", type=int, default=5, help="rounds in which the other server is asked too")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    commands = {"mtmc-lsp": list(isolated_command("mtmc_lsp.server.app"))}
    if options.compare_with:
        commands["other"] = shlex.split(options.compare_with)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.py"
        (Path(folder) / "pyproject.toml").write_text('[tool.mtmc]\narchs = ["sm_90"]\n')
        path.write_text(source())
        starts = started(commands, path, options.starts)
        servers = {name: Server(command, path) for name, command in commands.items()}
        try:
            underway = measure(servers, options.rounds, options.turns)
            results = {name: {**starts[name], **server.result()} for name, server in servers.items()}
        finally:
            for server in servers.values():
                server.close()
    results["mtmc-lsp"]["rounds_with_a_run_under_way"] = underway
    load = os.getloadavg()[0]
    show(results, load)
    if options.out is not None:
        options.out.write_text(json.dumps({"load": load, **results}, indent=1) + "\n")
    sys.exit(1 if failures(results) else 0)


def started(commands: dict[str, list[str]], path: Path, starts: int) -> dict[str, dict[str, dict[str, float]]]:
    """Milliseconds from the start of the process, in turns: to the answer to ``initialize``, and to a first one about a file.

    The file of the second is short: how long a long one takes is measured by the other requests.
    """
    small = path.with_name("small.py")
    small.write_text("import torch\n\n\n" + TARGET)
    times: dict[str, dict[str, list[float]]] = {name: {"ready": [], "first answer": []} for name in commands}
    for _ in range(starts):
        for name, command in commands.items():
            server = Server(command, small)
            times[name]["ready"].append(server.ready_ms)
            times[name]["first answer"].append(server.first_answer_ms())
            server.close()
    return {name: {what: summary(values) for what, values in table.items()} for name, table in times.items()}


def measure(servers: dict[str, Server], rounds: int, turns: int) -> int:
    """Ask everything in turns while a run is under way; in how many rounds one was."""
    ours = servers["mtmc-lsp"]
    optimize = {"command": "mtmc.optimize", "arguments": [ours.target("busy")]}
    ours.request("workspace/executeCommand", optimize)
    for server in servers.values():
        for _ in range(5 if server is ours else 1):
            server.round(None)
    shared = {round(turn * rounds / turns) for turn in range(turns)} if len(servers) > 1 else set()
    underway = 0
    for number in range(rounds):
        ours.round(ours.samples, ours.shared if number in shared else None)
        if number in shared:
            servers["other"].round(servers["other"].samples)
        jobs = ours.request("workspace/executeCommand", {"command": "mtmc.jobs", "arguments": []})[1]
        underway += bool(jobs["result"])
        if not jobs["result"]:
            ours.request("workspace/executeCommand", optimize)
    return underway


def source() -> str:
    """A file of 10,000 lines of real code."""
    text = "import torch\nimport triton\nimport triton.language as tl\n\n\n" + TARGET
    files = [*sorted((ROOT / "examples").glob("*.py")), *sorted((ROOT / "mtmc_lsp").rglob("*.py"))]
    number = 0
    while text.count("\n") < LINES:
        part = files[number % len(files)].read_text()
        # Only the first `from __future__` of a file is allowed.
        text += part.replace("from __future__ import annotations\n", "") + "\n\n"
        number += 1
    return text


class Server:
    """A language server and its client."""

    def __init__(self, command: list[str], path: Path) -> None:
        self._began = time.perf_counter()
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd=path.parent
        )
        self._answers: queue.Queue[dict[str, Any]] = queue.Queue()
        self._published: queue.Queue[dict[str, Any]] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()
        self._number = 0
        self._version = 1
        self._random = random.Random(0)
        self.uri = path.as_uri()
        self._lines = path.read_text().split("\n")
        self.samples: dict[str, list[float]] = {}
        self.shared: dict[str, list[float]] = {}
        """Those of rounds in which the other server was asked too."""
        text = {"publishDiagnostics": {"versionSupport": True}, "codeAction": {}, "hover": {}, "codeLens": {}}
        text["codeAction"] = {"codeActionLiteralSupport": {"codeActionKind": {"valueSet": []}}}
        text["documentSymbol"] = {"hierarchicalDocumentSymbolSupport": True}
        initialize = {
            "processId": None,
            "rootUri": path.parent.as_uri(),
            "capabilities": {"textDocument": text},
            "initializationOptions": {"trusted": True},
        }
        answer = self.request("initialize", initialize)[1]
        self._provided = answer["result"]["capabilities"]
        self.ready_ms = 1000 * (time.perf_counter() - self._began)
        self._notify("initialized", {})
        item = {"uri": self.uri, "languageId": "python", "version": 1, "text": "\n".join(self._lines)}
        self._notify("textDocument/didOpen", {"textDocument": item})

    def first_answer_ms(self) -> float:
        """Milliseconds from the start of the process until it has told the symbols of the file."""
        answer = self.request("textDocument/documentSymbol", {"textDocument": {"uri": self.uri}})[1]
        assert answer["result"], "a file with a function has symbols"
        return 1000 * (time.perf_counter() - self._began)

    def target(self, name: str) -> dict[str, str]:
        """The argument of our commands."""
        return {"uri": self.uri, "target": name}

    def round(self, *kept: dict[str, list[float]] | None) -> None:
        """Each request once, at a random place, and one keystroke; milliseconds are added to all of ``kept``."""
        line = self._random.randrange(10, len(self._lines) - 2)
        at = {"line": line, "character": min(4, len(self._lines[line]))}
        document = {"textDocument": {"uri": self.uri}}
        asked = {
            "codeAction": {**document, "range": {"start": at, "end": at}, "context": {"diagnostics": []}},
            "hover": {**document, "position": at},
            "codeLens": document,
            "documentSymbol": document,
        }
        for name, params in asked.items():
            if not self._provided.get(f"{name}Provider"):
                continue
            seconds, answer = self.request(f"textDocument/{name}", params)
            if "error" not in answer:
                _add(kept, name, seconds)
        _add(kept, "keystroke to diagnostics", self._keystroke(line))

    def _keystroke(self, line: int) -> float:
        """Type a character at the end of a line's comment, and wait for the diagnostics of the new text."""
        while not self._published.empty():
            self._published.get_nowait()
        self._version += 1
        end = {"line": line, "character": len(self._lines[line])}
        new = " #x" if "#" not in self._lines[line] else "x"
        self._lines[line] += new
        change = {"range": {"start": end, "end": end}, "text": new}
        began = time.perf_counter()
        self._notify(
            "textDocument/didChange",
            {"textDocument": {"uri": self.uri, "version": self._version}, "contentChanges": [change]},
        )
        while True:
            published = self._published.get(timeout=WAIT_SECONDS)
            # A server that sends no version is taken to mean the newest.
            if published["params"].get("version") in (None, self._version):
                return time.perf_counter() - began

    def result(self) -> dict[str, Any]:
        """The numbers."""
        status = Path(f"/proc/{self._process.pid}/status").read_text()
        resident = next(line for line in status.splitlines() if line.startswith("VmRSS"))
        table: dict[str, Any] = {"resident_mb": int(resident.split()[1]) / 1024}
        table |= {name: summary(values) for name, values in self.samples.items()}
        if self.shared:
            table["shared"] = {name: summary(values) for name, values in self.shared.items()}
        return table

    def request(self, method: str, params: Any) -> tuple[float, dict[str, Any]]:
        """Ask, and wait for the answer."""
        self._number += 1
        began = time.perf_counter()
        self._send({"jsonrpc": "2.0", "id": self._number, "method": method, "params": params})
        while True:
            answer = self._answers.get(timeout=WAIT_SECONDS)
            if answer.get("id") == self._number and "method" not in answer:
                return time.perf_counter() - began, answer

    def close(self) -> None:
        """End the server."""
        self._process.kill()
        self._process.wait()

    def _notify(self, method: str, params: Any) -> None:
        self._send({"jsonrpc": "2.0", "method": method, "params": params})

    def _send(self, message: dict[str, Any]) -> None:
        body = json.dumps(message).encode()
        assert self._process.stdin is not None
        self._process.stdin.write(b"Content-Length: %d\r\n\r\n" % len(body) + body)
        self._process.stdin.flush()

    def _read(self) -> None:
        stream = self._process.stdout
        assert stream is not None
        while header := stream.readline():
            length = 0
            while header.strip():
                name, _, value = header.partition(b":")
                length = int(value) if name.lower() == b"content-length" else length
                header = stream.readline()
            message = json.loads(stream.read(length))
            if "id" in message and "method" in message:
                self._send({"jsonrpc": "2.0", "id": message["id"], "result": None})
                continue
            is_published = message.get("method") == "textDocument/publishDiagnostics"
            (self._published if is_published else self._answers).put(message)


def _add(kept: tuple[dict[str, list[float]] | None, ...], name: str, seconds: float) -> None:
    for samples in kept:
        if samples is not None:
            samples.setdefault(name, []).append(1000 * seconds)


def summary(values: list[float]) -> dict[str, float]:
    """Median, 95th percentile (of a few values the largest) and number."""
    p95 = statistics.quantiles(values, n=20)[-1] if len(values) >= 20 else max(values)
    return {"median_ms": statistics.median(values), "p95_ms": p95, "samples": len(values)}


def ratios(results: dict[str, Any]) -> dict[str, float]:
    """How many times as long the other server took, by its and our medians in the same rounds."""
    ours, other = results["mtmc-lsp"], results.get("other", {})
    shared = {**{name: ours[name] for name in STARTS}, **ours.get("shared", {})}
    return {name: other[name]["median_ms"] / of["median_ms"] for name, of in shared.items() if name in other}


def failures(results: dict[str, Any]) -> list[str]:
    """Budgets that are not kept, and what the other server is faster at."""
    ours = results["mtmc-lsp"]
    found = [f"{n} over {b} ms" for n, b in BUDGETS_MS.items() if ours[n]["median_ms" if n in STARTS else "p95_ms"] > b]
    found += [f"resident over {BUDGET_MB} MB"] * (ours["resident_mb"] > BUDGET_MB)
    return found + [f"{name}: the other server is faster" for name, ratio in ratios(results).items() if ratio < 1]


def show(results: dict[str, Any], load: float) -> None:
    """A table."""
    compared = ratios(results)
    for server, table in results.items():
        print(f"{server}: {table['resident_mb']:.0f} MB resident")
        for name, value in table.items():
            if isinstance(value, dict) and name != "shared":
                text = f"  {name:26} median {value['median_ms']:9.1f} ms, p95 {value['p95_ms']:9.1f}, n = {value['samples']}"
                print(text + (f", {compared[name]:.1f}x ours" if server == "other" and name in compared else ""))
    print(f"a run was under way in {results['mtmc-lsp']['rounds_with_a_run_under_way']} rounds; load {load:.1f}")
    for failure in failures(results):
        print(f"FAILED: {failure}")


if __name__ == "__main__":
    main()
