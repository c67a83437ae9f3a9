/** Which Python runs the language server: candidates in order, what each said of itself, and what to tell the user. */

/** An interpreter that could run the server. */
export interface Candidate {
  readonly path: string;
  /** Where it came from, in words. */
  readonly from: string;
}

/** What an interpreter said of itself. */
export type Probe =
  | { readonly kind: "ready"; readonly python: string; readonly server: string; readonly path: string; readonly launcher: string }
  | { readonly kind: "missing"; readonly python: string; readonly path: string }
  | { readonly kind: "old"; readonly python: string }
  | { readonly kind: "broken"; readonly reason: string };

/** A candidate with its probe. */
export interface Probed {
  readonly candidate: Candidate;
  readonly probe: Probe;
}

/** Without imports from the working folder and from PYTHONPATH, which may name the workspace. */
export const ISOLATED = "-I";

/** The module that is the server, for the launcher that {@link PROBE} finds. */
export const SERVER_MODULE = "mtmc_lsp.server.app";

/** The program an interpreter is asked by, run with {@link ISOLATED}; it prints one line of JSON. */
export const PROBE = [
  "import importlib.util, json, os, site, sys",
  // The option also leaves out packages that pip installed for the user alone.
  "if sys.prefix == sys.base_prefix: site.addsitedir(site.getusersitepackages())",
  "spec = importlib.util.find_spec('mtmc_lsp')",
  "launcher = os.path.join(os.path.dirname(spec.origin or ''), 'launch.py') if spec is not None else ''",
  "found = os.path.isfile(launcher) and importlib.util.find_spec('pygls') is not None",
  "version = __import__('mtmc_lsp').__version__ if found and sys.version_info >= (3, 10) else None",
  "print(json.dumps({'python': list(sys.version_info[:3]), 'server': version, 'path': sys.executable, 'launcher': launcher}))",
].join("\n");

const LEAST_MINOR = 10;

/** Where candidates come from. */
export interface Sources {
  readonly serverPython: string;
  readonly python: string;
  readonly extension: string | undefined;
  readonly folders: readonly string[];
  /** Whether the workspace's own files may be run. */
  readonly trusted: boolean;
  readonly windows: boolean;
}

/** The candidates in the order they are tried. An untrusted workspace's own files are never run. */
export function candidates(sources: Sources): Candidate[] {
  const venv = sources.windows ? "\\.venv\\Scripts\\python.exe" : "/.venv/bin/python";
  const named = sources.windows ? ["python", "py"] : ["python3", "python"];
  const all: Candidate[] = [
    { path: sources.serverPython, from: "the setting mtmc.serverPython" },
    { path: sources.python, from: "the setting mtmc.python" },
    { path: sources.extension ?? "", from: "the Python extension" },
    ...(sources.trusted ? sources.folders.map((folder) => ({ path: folder + venv, from: "the project's .venv" })) : []),
    ...named.map((path) => ({ path, from: "the PATH" })),
  ];
  const inside = (path: string): boolean =>
    sources.folders.some((folder) => path.startsWith(folder + (sources.windows ? "\\" : "/")));
  const seen = new Set<string>();
  return all.filter(({ path }) => {
    if (path === "" || seen.has(path) || (!sources.trusted && inside(path))) return false;
    seen.add(path);
    return true;
  });
}

/** What the output of {@link PROBE} says. */
export function readProbe(output: string): Probe {
  const line = output.trim().split("\n").at(-1) ?? "";
  let said: unknown;
  try {
    said = JSON.parse(line);
  } catch {
    return { kind: "broken", reason: `it answered ${JSON.stringify(line.slice(0, 80))}` };
  }
  if (typeof said !== "object" || said === null || !("python" in said) || !Array.isArray(said.python)) {
    return { kind: "broken", reason: `it answered ${line.slice(0, 80)}` };
  }
  const numbers = said.python.map(Number);
  const python = numbers.join(".");
  if (numbers[0] !== 3 || (numbers[1] ?? 0) < LEAST_MINOR) return { kind: "old", python };
  const server = "server" in said ? said.server : null;
  const path = "path" in said && typeof said.path === "string" ? said.path : "";
  const launcher = "launcher" in said && typeof said.launcher === "string" ? said.launcher : "";
  return typeof server === "string" && launcher !== "" ? { kind: "ready", python, server, path, launcher } : { kind: "missing", python, path };
}

/** The interpreter to install into: the first that is new enough. */
export function installTarget(probed: readonly Probed[]): Candidate | undefined {
  for (const { candidate, probe } of probed) {
    // Its whole path: what a name on the PATH stands for is not what another program finds.
    if (probe.kind === "missing") return { ...candidate, path: probe.path === "" ? candidate.path : probe.path };
  }
  return undefined;
}

/** Why no interpreter can run the server, and what to do: one message. */
export function failure(probed: readonly Probed[], spec = "mtmc-lsp"): string {
  const target = installTarget(probed);
  if (target !== undefined) {
    return `mtmc-lsp is not installed in ${target.path} (found by ${target.from}). Install it there by “${installCommand(target.path, spec).join(" ")}”, or name another interpreter in the setting mtmc.serverPython.`;
  }
  const old = probed.find(({ probe }) => probe.kind === "old");
  if (old?.probe.kind === "old") {
    return `mtmc-lsp needs Python 3.${LEAST_MINOR} or later, and ${old.candidate.path} is ${old.probe.python}. Name a newer one in the setting mtmc.serverPython.`;
  }
  return "No Python interpreter was found. Install Python 3.10 or later, or name one in the setting mtmc.serverPython.";
}

/** The command that installs the server, as its parts. */
export function installCommand(path: string, spec: string): string[] {
  return [path, "-m", "pip", "install", "--upgrade", spec];
}
