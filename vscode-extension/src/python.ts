/** Finds the interpreter for the server, and installs the server into it. */

import { execFile } from "node:child_process";
import { existsSync, readFileSync } from "node:fs";
import { join } from "node:path";
import * as vscode from "vscode";
import { has } from "./core/fields";
import { candidates, installCommand, ISOLATED, PROBE, readProbe, type Bundle, type Candidate, type Probe, type Probed } from "./core/interpreters";

const PROBE_MS = 20_000;
const PYTHON_EXTENSION = "ms-python.python";

/** The used part of the Python extension's API. */
interface PythonApi {
  readonly environments: {
    getActiveEnvironmentPath(resource?: vscode.Uri): { readonly path: string };
    resolveEnvironment(path: { readonly path: string }): Promise<{ executable: { uri?: vscode.Uri } } | undefined>;
    readonly onDidChangeActiveEnvironmentPath: vscode.Event<unknown>;
  };
}

async function pythonApi(): Promise<PythonApi | undefined> {
  const extension = vscode.extensions.getExtension<Partial<PythonApi>>(PYTHON_EXTENSION);
  if (extension === undefined) return undefined;
  const api = extension.isActive ? extension.exports : await extension.activate();
  // Forks of the extension have the same id, but not always the same API.
  return api.environments === undefined ? undefined : (api as PythonApi);
}

/** The interpreter selected in the Python extension; undefined without the extension or a selection. */
export async function chosenPython(resource: vscode.Uri | undefined): Promise<string | undefined> {
  const api = await pythonApi();
  if (api === undefined) return undefined;
  const resolved = await api.environments.resolveEnvironment(api.environments.getActiveEnvironmentPath(resource));
  return resolved?.executable.uri?.fsPath;
}

/** Calls `listener` when the interpreter selected in the Python extension changes. */
export async function onPythonChange(listener: () => void): Promise<vscode.Disposable> {
  const api = await pythonApi();
  return api?.environments.onDidChangeActiveEnvironmentPath(listener) ?? new vscode.Disposable(() => undefined);
}

/** An interpreter that can run the server, and the launcher file of the server package. */
export interface Ready extends Candidate {
  readonly launcher: string;
}

/** The server in a folder of the extension; undefined in a development build. */
export function bundledServer(folder: string): Bundle | undefined {
  const file = join(folder, "bundle.json");
  if (!existsSync(file)) return undefined;
  const values: unknown = JSON.parse(readFileSync(file, "utf8"));
  return has(values, { version: "string" }) ? { folder, version: String(values["version"]) } : undefined;
}

/** The first interpreter that can run the server, and the probes of all interpreters up to it. */
export async function findServer(cwd: string, bundle: Bundle | undefined): Promise<{ ready: Ready | undefined; probed: Probed[] }> {
  const settings = vscode.workspace.getConfiguration("mtmc");
  const folders = (vscode.workspace.workspaceFolders ?? []).map((folder) => folder.uri.fsPath);
  const all = candidates({
    serverPython: settings.get("serverPython", ""),
    python: settings.get("python", ""),
    extension: await chosenPython(vscode.workspace.workspaceFolders?.[0]?.uri),
    folders,
    trusted: vscode.workspace.isTrusted,
    windows: process.platform === "win32",
  });
  const probed: Probed[] = [];
  for (const candidate of all) {
    const answer = await probe(candidate.path, cwd, bundle);
    probed.push({ candidate, probe: answer });
    if (answer.kind === "ready") return { ready: { ...candidate, launcher: answer.launcher }, probed };
  }
  return { ready: undefined, probed };
}

function probe(path: string, cwd: string, bundle: Bundle | undefined): Promise<Probe> {
  return new Promise((resolve) => {
    const args = [ISOLATED, "-c", PROBE, ...(bundle === undefined ? [] : [bundle.folder])];
    execFile(path, args, { cwd, timeout: PROBE_MS }, (error, stdout) => {
      resolve(error === null ? readProbe(stdout, bundle) : { kind: "broken", reason: error.message.split("\n")[0] ?? "" });
    });
  });
}

/** The requirement that pip installs. */
export function installSpec(): string {
  return vscode.workspace.getConfiguration("mtmc").get("installSpec", "mtmc-lsp");
}

/** Runs pip in a terminal, where the user sees the command and its output. Resolves to whether it succeeded. */
export async function install(path: string, cwd: string): Promise<boolean> {
  const [program = path, ...rest] = installCommand(path, installSpec());
  const task = new vscode.Task(
    { type: "mtmc-install" },
    vscode.TaskScope.Workspace,
    "Install mtmc-lsp",
    "MTMC",
    new vscode.ProcessExecution(program, rest, { cwd }),
  );
  task.presentationOptions = { reveal: vscode.TaskRevealKind.Always, focus: false };
  return new Promise((resolve, reject) => {
    const subscription = vscode.tasks.onDidEndTaskProcess((event) => {
      if (event.execution.task.name !== task.name || event.execution.task.source !== task.source) return;
      subscription.dispose();
      resolve(event.exitCode === 0);
    });
    vscode.tasks.executeTask(task).then(undefined, (error: unknown) => {
      subscription.dispose();
      reject(error instanceof Error ? error : new Error(String(error)));
    });
  });
}
