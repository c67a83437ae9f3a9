"""How fast the language server answers on a 10,000-line file while a run is under way.

    python benchmarks/server_latency.py [--rounds N] [--beside COMMAND] [--out FILE]

``--beside`` names another language server (``jedi-language-server``, say) that gets the same requests on the same file in the
same run, in turns with ours. Only what both answer is compared.
"""

from __future__ import annotations

import argparse
import json
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

ROOT = Path(__file__).resolve().parent.parent
LINES = 10_000
WAIT_SECONDS = 300
"""For one answer; others have taken nearly a minute for the code actions of such a file."""
TARGET = """\
# mtmc: x=f32[64,384] weight=f32[384]
def busy(x, weight):
    y = torch.relu(x) * weight
    return torch.softmax(y + 1, -1) * y


"""


def main() -> None:
    """Measure, print a table, and write the numbers where asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--beside", default="")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.py"
        (Path(folder) / "pyproject.toml").write_text('[tool.mtmc]\narchs = ["sm_90"]\n')
        path.write_text(source())
        servers = {"mtmc-lsp": Server([sys.executable, "-m", "mtmc_lsp.server.app"], path)}
        if options.beside:
            servers["beside"] = Server(shlex.split(options.beside), path)
        ours = servers["mtmc-lsp"]
        ours.request("workspace/executeCommand", {"command": "mtmc.optimize", "arguments": [ours.target("busy")]})
        for server in servers.values():
            for _ in range(5):
                server.round(None)
        runs = 0
        for _ in range(options.rounds):
            for server in servers.values():
                server.round(server.samples)
            jobs = ours.request("workspace/executeCommand", {"command": "mtmc.jobs", "arguments": []})[1]
            runs += bool(jobs["result"])
            if not jobs["result"]:
                command = {"command": "mtmc.optimize", "arguments": [ours.target("busy")]}
                ours.request("workspace/executeCommand", command)
        results = {name: server.result() for name, server in servers.items()}
        results["mtmc-lsp"]["rounds_with_a_run_under_way"] = runs
        for server in servers.values():
            server.close()
    show(results)
    if options.out is not None:
        options.out.write_text(json.dumps(results, indent=1) + "\n")


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
        began = time.perf_counter()
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
        self.ready_ms = 1000 * (time.perf_counter() - began)
        self._notify("initialized", {})
        item = {"uri": self.uri, "languageId": "python", "version": 1, "text": "\n".join(self._lines)}
        self._notify("textDocument/didOpen", {"textDocument": item})

    def target(self, name: str) -> dict[str, str]:
        """The argument of our commands."""
        return {"uri": self.uri, "target": name}

    def round(self, samples: dict[str, list[float]] | None) -> None:
        """Each request once, at a random place, and one keystroke."""
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
            if samples is not None and "error" not in answer:
                samples.setdefault(name, []).append(1000 * seconds)
        seconds = self._keystroke(line)
        if samples is not None:
            samples.setdefault("keystroke to diagnostics", []).append(1000 * seconds)

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
        table: dict[str, Any] = {"ready_ms": self.ready_ms, "resident_mb": int(resident.split()[1]) / 1024}
        for name, values in self.samples.items():
            cuts = statistics.quantiles(values, n=20)
            table[name] = {"median_ms": statistics.median(values), "p95_ms": cuts[-1], "samples": len(values)}
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


def show(results: dict[str, Any]) -> None:
    """A table."""
    names = list(results["mtmc-lsp"])
    for name in names:
        cells = []
        for server, table in results.items():
            value = table.get(name)
            text = (
                f"p95 {value['p95_ms']:8.1f} ms, median {value['median_ms']:8.1f}" if isinstance(value, dict) else value
            )
            cells.append(f"{server}: {text if text is not None else '-'}")
        print(f"{name:30} " + "   ".join(str(cell) for cell in cells))


if __name__ == "__main__":
    main()
