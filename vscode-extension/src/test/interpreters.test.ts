import assert from "node:assert/strict";
import { execFileSync } from "node:child_process";
import { test } from "node:test";
import { candidates, failure, installCommand, installTarget, isAtLeast, ISOLATED, PROBE, readProbe, type Probed, type Sources } from "../core/interpreters";

const SOURCES: Sources = { serverPython: "", python: "", extension: undefined, folders: ["/work"], trusted: true, windows: false };

function paths(changes: Partial<Sources>): string[] {
  return candidates({ ...SOURCES, ...changes }).map(({ path }) => path);
}

test("settings come before the Python extension, the project and the PATH", () => {
  assert.deepEqual(paths({ serverPython: "/a", python: "/b", extension: "/c" }), ["/a", "/b", "/c", "/work/.venv/bin/python", "python3", "python"]);
});

test("each interpreter is probed only once", () => {
  assert.deepEqual(paths({ serverPython: "python3", python: "python3" }), ["python3", "/work/.venv/bin/python", "python"]);
});

test("interpreters in an untrusted workspace are never run", () => {
  assert.deepEqual(paths({ trusted: false, extension: "/work/.venv/bin/python", serverPython: "/workshop/python" }), ["/workshop/python", "python3", "python"]);
});

test("on Windows the interpreter paths differ", () => {
  assert.deepEqual(paths({ windows: true, folders: ["C:\\work"] }), ["C:\\work\\.venv\\Scripts\\python.exe", "python", "py"]);
});

test("a probe is parsed even if other output precedes it", () => {
  assert.deepEqual(readProbe('hello\n{"python": [3, 11, 2], "server": "0.1.0", "path": "/p", "launcher": "/l"}\n'), {
    kind: "ready",
    python: "3.11.2",
    server: "0.1.0",
    path: "/p",
    launcher: "/l",
  });
  assert.deepEqual(readProbe('{"python": [3, 10, 0], "server": null}'), { kind: "missing", python: "3.10.0", path: "" });
  assert.deepEqual(readProbe('{"python": [3, 9, 1], "server": null}'), { kind: "old", python: "3.9.1" });
  assert.equal(readProbe("Segmentation fault").kind, "broken");
  assert.equal(readProbe("[]").kind, "broken");
});

const BUNDLE = { folder: "/ext/server", version: "0.2.0" };

/** The server that starts in an interpreter with an installed version, or none; `fits`: the bundle can be imported. */
function started(server: string | null, fits: boolean): string[] {
  const probe = readProbe(JSON.stringify({ python: [3, 12, 1], server, path: "/p", launcher: server === null ? "" : "/site/launch.py", fits }), BUNDLE);
  return probe.kind === "ready" ? [probe.server, probe.launcher] : [probe.kind];
}

test("an interpreter without the server runs the bundled one, if its libraries can be imported", () => {
  assert.deepEqual(started(null, true), ["0.2.0", "/ext/server/mtmc_lsp/launch.py"]);
  assert.deepEqual(started(null, false), ["missing"]);
});

test("an installed server is used if it is at least as new as the bundled one, or if that cannot be imported", () => {
  assert.deepEqual(started("0.2.0", true), ["0.2.0", "/site/launch.py"]);
  assert.deepEqual(started("0.10.0", true), ["0.10.0", "/site/launch.py"]);
  assert.deepEqual(started("0.1.9", true), ["0.2.0", "/ext/server/mtmc_lsp/launch.py"]);
  assert.deepEqual(started("0.1.9", false), ["0.1.9", "/site/launch.py"]);
});

test("an interpreter that is too old runs no server, bundled or not", () => {
  assert.equal(readProbe('{"python": [3, 9, 1], "server": null, "fits": true}', BUNDLE).kind, "old");
});

test("versions are compared by their numbers, and a pre-release is older than its release", () => {
  assert.ok(isAtLeast("0.10", "0.9.5") && isAtLeast("1.0", "1.0.0") && isAtLeast("1.0.0", "1.0") && isAtLeast("1.0.post1", "1.0") && isAtLeast("0.2.0+local", "0.2.0"));
  assert.ok(!isAtLeast("0.9.5", "0.10") && !isAtLeast("1.0rc1", "1.0") && !isAtLeast("1.0.dev3", "1.0") && !isAtLeast("", "0.1"));
  assert.ok(isAtLeast("1.0", "1.0rc1") && isAtLeast("1.0rc1", "1.0rc1"));
});

test("the probe is a valid Python program", () => {
  for (const folder of [[], ["/no/such/folder"]]) {
    const output = execFileSync("python3", [ISOLATED, "-c", PROBE, ...folder], { encoding: "utf8" });
    assert.notEqual(readProbe(output, BUNDLE).kind, "broken");
    assert.match(output, /"fits": false/);
  }
});

test("the message says what is wrong, which interpreter, and what to do", () => {
  const old: Probed = { candidate: { path: "/old", from: "the PATH" }, probe: { kind: "old", python: "3.8.0" } };
  const bare: Probed = { candidate: { path: "/bare", from: "the Python extension" }, probe: { kind: "missing", python: "3.12.0", path: "/envs/bare" } };
  assert.match(failure([old, bare]), /not installed in \/envs\/bare \(found by the Python extension\).*mtmc\.serverPython/);
  assert.match(failure([old]), /\/old is 3\.8\.0.*mtmc\.serverPython/);
  assert.match(failure([]), /Install Python 3\.10 or later/);
  assert.equal(installTarget([old, bare])?.path, "/envs/bare");
  assert.equal(installTarget([old]), undefined);
  assert.deepEqual(installCommand("/bare", "mtmc-lsp"), ["/bare", "-m", "pip", "install", "--upgrade", "mtmc-lsp"]);
});
