/** Selects the Python interpreter for the language server: candidates in order, their probes, and error messages. */

/** An interpreter that could run the server. */
export interface Candidate {
  readonly path: string;
  /** The source of the path, as text for users. */
  readonly from: string;
}

/** The server that the extension brings. */
export interface Bundle {
  readonly folder: string;
  readonly version: string;
}

/** Result of probing an interpreter. `ready`: `server` is the version that starts, `launcher` the file that starts it. */
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

/** Isolated mode: no imports from the working directory or from PYTHONPATH, which may contain the workspace. */
export const ISOLATED = "-I";

/** The server module, which the launcher runs. */
export const SERVER_MODULE = "mtmc_lsp.server.app";

/**
 * The probe program, run with {@link ISOLATED} and the folder of the bundled server, if there is one; it prints one line of JSON.
 * `fits`: the compiled libraries of the bundle can be imported.
 */
export const PROBE = [
  "import importlib.util, json, os, platform, site, sys",
  // Isolated mode also ignores packages of the user site directory.
  "if sys.prefix == sys.base_prefix: site.addsitedir(site.getusersitepackages())",
  "spec = importlib.util.find_spec('mtmc_lsp')",
  "launcher = os.path.join(os.path.dirname(spec.origin or ''), 'launch.py') if spec is not None else ''",
  "installed = os.path.isfile(launcher) and importlib.util.find_spec('pygls') is not None",
  "version = __import__('mtmc_lsp').__version__ if installed and sys.version_info >= (3, 10) else None",
  "fits = False",
  "if sys.argv[1:]:",
  "    sys.path.insert(0, os.path.join(sys.argv[1], 'mtmc-libraries', sys.platform + '-' + platform.machine()))",
  "    try:",
  "        import tree_sitter, tree_sitter_python",
  "        fits = tree_sitter.__file__.startswith(sys.argv[1])",
  "    except ImportError: pass",
  "print(json.dumps({'python': list(sys.version_info[:3]), 'server': version, 'path': sys.executable, 'launcher': launcher, 'fits': fits}))",
].join("\n");

const MIN_MINOR = 10;

/** Sources of candidates. */
export interface Sources {
  readonly serverPython: string;
  readonly python: string;
  readonly extension: string | undefined;
  readonly folders: readonly string[];
  /** Whether files of the workspace may be run. */
  readonly trusted: boolean;
  readonly windows: boolean;
}

/** The candidates in the order they are tried. Files of an untrusted workspace are never run. */
export function candidates(sources: Sources): Candidate[] {
  const venv = sources.windows ? "\\.venv\\Scripts\\python.exe" : "/.venv/bin/python";
  const onPath = sources.windows ? ["python", "py"] : ["python3", "python"];
  const all: Candidate[] = [
    { path: sources.serverPython, from: "the setting mtmc.serverPython" },
    { path: sources.python, from: "the setting mtmc.python" },
    { path: sources.extension ?? "", from: "the Python extension" },
    ...(sources.trusted ? sources.folders.map((folder) => ({ path: folder + venv, from: "the project's .venv" })) : []),
    ...onPath.map((path) => ({ path, from: "the PATH" })),
  ];
  const inside = (path: string): boolean =>
    sources.folders.some((folder) => path.startsWith(folder + (sources.windows ? "\\" : "/")));
  const visited = new Set<string>();
  return all.filter(({ path }) => {
    if (path === "" || visited.has(path) || (!sources.trusted && inside(path))) return false;
    visited.add(path);
    return true;
  });
}

/** Whether a version is at least another one. A pre-release such as `0.2.0rc1` is older than `0.2.0`. */
export function isAtLeast(version: string, other: string): boolean {
  const [numbers, others] = [releaseNumbers(version), releaseNumbers(other)];
  for (let index = 0; index < Math.max(numbers.length, others.length); index++) {
    const difference = (numbers[index] ?? 0) - (others[index] ?? 0);
    if (difference !== 0) return difference > 0;
  }
  return !isPreRelease(version) || isPreRelease(other);
}

function releaseNumbers(version: string): number[] {
  return (/^\d+(\.\d+)*/.exec(version)?.[0] ?? "0").split(".").map(Number);
}

function isPreRelease(version: string): boolean {
  return /^[\d.]+(a|b|rc|dev)/.test(version);
}

/** Parses the output of {@link PROBE}. An installed server is used only if it is at least as new as the bundled one. */
export function readProbe(output: string, bundle?: Bundle): Probe {
  const line = output.trim().split("\n").at(-1) ?? "";
  let values: unknown;
  try {
    values = JSON.parse(line);
  } catch {
    return { kind: "broken", reason: `invalid output ${JSON.stringify(line.slice(0, 80))}` };
  }
  if (typeof values !== "object" || values === null || !("python" in values) || !Array.isArray(values.python)) {
    return { kind: "broken", reason: `invalid output ${line.slice(0, 80)}` };
  }
  const numbers = values.python.map(Number);
  const python = numbers.join(".");
  if (numbers[0] !== 3 || (numbers[1] ?? 0) < MIN_MINOR) return { kind: "old", python };
  const server = "server" in values ? values.server : null;
  const path = "path" in values && typeof values.path === "string" ? values.path : "";
  const launcher = "launcher" in values && typeof values.launcher === "string" ? values.launcher : "";
  const installed: Probe | undefined = typeof server === "string" && launcher !== "" ? { kind: "ready", python, server, path, launcher } : undefined;
  const bundled: Probe | undefined =
    bundle !== undefined && "fits" in values && values.fits === true
      ? { kind: "ready", python, server: bundle.version, path, launcher: `${bundle.folder}/mtmc_lsp/launch.py` }
      : undefined;
  if (installed !== undefined && bundled !== undefined) return isAtLeast(installed.server, bundled.server) ? installed : bundled;
  return installed ?? bundled ?? { kind: "missing", python, path };
}

/** The interpreter to install into: the first one that is new enough. */
export function installTarget(probed: readonly Probed[]): Candidate | undefined {
  for (const { candidate, probe } of probed) {
    // Use the absolute path: other programs may resolve a name on the PATH differently.
    if (probe.kind === "missing") return { ...candidate, path: probe.path === "" ? candidate.path : probe.path };
  }
  return undefined;
}

/** The message that says why no interpreter can run the server, and what to do. */
export function failure(probed: readonly Probed[], spec = "mtmc-lsp"): string {
  const target = installTarget(probed);
  if (target !== undefined) {
    return `mtmc-lsp is not installed in ${target.path} (found by ${target.from}). Install it with “${installCommand(target.path, spec).join(" ")}”, or set mtmc.serverPython to another interpreter.`;
  }
  const old = probed.find(({ probe }) => probe.kind === "old");
  if (old?.probe.kind === "old") {
    return `mtmc-lsp needs Python 3.${MIN_MINOR} or later, but ${old.candidate.path} is ${old.probe.python}. Set mtmc.serverPython to a newer interpreter.`;
  }
  return "No Python interpreter was found. Install Python 3.10 or later, or set mtmc.serverPython to an interpreter.";
}

/** The arguments of the command that installs the server. */
export function installCommand(path: string, spec: string): string[] {
  return [path, "-m", "pip", "install", "--upgrade", spec];
}
