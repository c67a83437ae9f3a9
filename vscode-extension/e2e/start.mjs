// From an environment without the server to the first kept step of the example.
import assert from "node:assert/strict";
import { spawnSync } from "node:child_process";
import { existsSync, mkdirSync, mkdtempSync, readFileSync, readdirSync, rmSync, symlinkSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join, resolve } from "node:path";
import { Editor, HERE, LONG, PYTHON, TOOLS, until } from "./editor.mjs";
import { SMALL } from "./samples.mjs";

/** Maximum clicks from opening the MTMC view to the first kept step, without typing. */
const MAX_CLICKS = 3;
/** Packages of the server, which the user's environment does not contain. */
const SERVER_PACKAGES = /^(mtmc|_mtmc|_editable|pygls|lsprotocol|tree_sitter|typer|rich|cattrs|attr|attrs|click|shellingham)/;
const ROOT = resolve(HERE, "../..");

/** Reports another machine to isolated processes, which the extension starts, and not to pip. */
const OTHER_MACHINE = `import os, sys
if sys.flags.isolated:
    known = os.uname()
    os.uname = lambda: os.uname_result((*known[:4], "riscv64"))
`;
/** A proxy that nothing listens on: every download fails. */
const NO_NETWORK = "http://127.0.0.1:9";

/** Creates an environment with torch but without the server. */
function environment(path) {
  const made = spawnSync(PYTHON, ["-m", "venv", path], { encoding: "utf8" });
  assert.equal(made.status, 0, made.stderr);
  const output = (python, code) => spawnSync(python, ["-c", code], { encoding: "utf8" }).stdout.trim();
  const purelib = output(join(path, "bin/python"), "import sysconfig; print(sysconfig.get_path('purelib'))");
  const source = output(PYTHON, "import importlib.util, os; print(os.path.dirname(os.path.dirname(importlib.util.find_spec('torch').origin)))");
  const linked = join(path, "torch-and-the-like");
  mkdirSync(linked);
  for (const name of readdirSync(source)) {
    if (!SERVER_PACKAGES.test(name) && !name.endsWith(".pth")) symlinkSync(join(source, name), join(linked, name));
  }
  writeFileSync(join(purelib, "torch.pth"), `${linked}\n`);
  return { python: join(path, "bin/python"), purelib };
}

/** Names of the installed packages of an environment. */
function packages(purelib) {
  return readdirSync(purelib).filter((name) => !name.startsWith("__pycache__")).sort();
}

/** Steps of the walkthrough: title, button and a text of the page next to it. */
const STEPS = [["Open the example", "Open the example", /rmsnorm_residual/], ["Optimize it", "Optimize to Triton kernel", /float64 reference/], ["Keep what you like", "Keep the first step", /searches without it/]];

/** Runs a command without the user's profile, which may change the PATH. VS Code reads variables from the user's shell. */
const SHELL = `#!/bin/sh
while [ "$1" != "-c" ]; do shift; done
exec /bin/sh -c "$2"
`;

/** Writes programs to a folder: interpreters for the PATH that do not run, so that only those of the workspaces do, and a shell. */
function writePrograms(path) {
  for (const name of ["python3", "python"]) writeFileSync(join(path, name), "#!/bin/sh\nexit 1\n", { mode: 0o755 });
  writeFileSync(join(path, "shell"), SHELL, { mode: 0o755 });
}

/** Configures a folder with an interpreter that contains the server but fails to run it. */
function failingServer(path) {
  const python = join(path, "python");
  writeFileSync(python, `#!/bin/sh\ncase "$*" in *mtmc_lsp.server.app*) echo "no such luck" >&2; exit 1;; esac\nexec ${PYTHON} "$@"\n`, { mode: 0o755 });
  mkdirSync(join(path, ".vscode"));
  writeFileSync(join(path, ".vscode/settings.json"), JSON.stringify({ "mtmc.serverPython": python }));
  return path;
}

export async function run(scenario) {
  // Make pip refuse to modify the system Python.
  const pip = { PIP_NO_INDEX: "1", PIP_FIND_LINKS: join(TOOLS, "wheels"), PIP_CONFIG_FILE: "/dev/null", PIP_REQUIRE_VIRTUALENV: "1" };
  const offline = Object.fromEntries(["http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"].map((name) => [name, NO_NETWORK]));
  const machine = { "mtmc.installSpec": ROOT, "mtmc.archs": ["sm_90"] };
  const bin = mkdtempSync(join(tmpdir(), "mtmc-bin-"));
  writePrograms(bin);
  const variables = { ...pip, ...offline, SHELL: join(bin, "shell"), PATH: `${bin}:${process.env.PATH}`, PYTHONPATH: "" };
  const editor = await Editor.start({ machine, environment: variables, flags: ["--disable-workspace-trust"] });
  try {
    const workspace = editor.folder("empty", { "pyproject.toml": "" });
    // The project's environment, which precedes the PATH.
    const { python, purelib } = environment(join(workspace, ".venv"));
    const before = packages(purelib);
    const w = await editor.open(workspace);
    const { page } = w;
    await scenario(w, "an interpreter with torch alone starts the server that the extension brings, without pip", async () => {
      await w.click(page.locator(".activitybar .action-item[aria-label^='MTMC'], .activitybar .action-label[aria-label^='MTMC']").first());
      await w.ready();
      const [server] = editor.languageServers();
      const [program, , launcher] = readFileSync(`/proc/${server}/cmdline`, "utf8").split("\0");
      assert.equal(program, python);
      assert.ok(launcher.startsWith(join(editor.home, "ext")) && launcher.endsWith("dist/server/mtmc_lsp/launch.py"), launcher);
      assert.deepEqual(packages(purelib), before);
      assert.deepEqual(await w.messages(), []);
    });
    await scenario(w, "the first step of the example is kept after at most three clicks in total, without typing", async () => {
      await w.click(page.locator(".welcome-view-content .monaco-button", { hasText: "Try it on the example" }));
      await w.thread("1/1 ").waitFor({ timeout: LONG });
      await w.row("1/1 Fuse").waitFor();
      await w.status.filter({ hasText: "1 pending step" }).waitFor({ timeout: LONG });
      await w.shot("example");
      await w.click(w.pageButton("Keep"));
      const example = join(workspace, "rmsnorm_residual.py");
      await until("it is kept", async () => existsSync(example) && readFileSync(example, "utf8").includes("# mtmc: dispatch"));
      console.log(`   clicks: ${w.clicks}`);
      assert.ok(w.clicks <= MAX_CLICKS, `${w.clicks} clicks`);
    });
    await scenario(w, "the walkthrough opens and ends with keeping a step", async () => {
      await w.command("Welcome: Open Walkthrough...");
      await page.locator(".quick-input-list .monaco-list-row", { hasText: "Your first Triton kernel" }).click();
      await page.locator(".gettingStartedContainer .step-list-container").waitFor();
      await w.shot("walkthrough");
      for (const [title, button, picture] of STEPS) {
        const step = page.locator(".getting-started-step", { hasText: title });
        // The first step is initially open; the click does not change it.
        await step.locator(".step-title").click();
        await step.locator(".monaco-button", { hasText: button }).waitFor();
        await w.frame("body", picture);
      }
      await w.shot("walkthrough-end");
    });
    await w.close();

    const foreign = editor.folder("foreign", { "pyproject.toml": "", "small.py": SMALL });
    const unsupported = environment(join(foreign, ".venv"));
    writeFileSync(join(unsupported.purelib, "sitecustomize.py"), OTHER_MACHINE);
    const missing = await editor.open(foreign, join(foreign, "small.py"));
    await scenario(missing, "on a machine without bundled libraries, the server is installed, with the command shown, and starts", async () => {
      await missing.message("mtmc-lsp is not installed in");
      assert.ok((await missing.seen("mtmc-lsp is not installed in").innerText()).includes(`${unsupported.python} -m pip install --upgrade`));
      await missing.shot("missing");
      await missing.answer("mtmc-lsp is not installed in", "Install");
      await missing.message("Installing mtmc-lsp into");
      await missing.status.filter({ hasText: "installing" }).waitFor();
      await missing.shot("installing");
      await until("the server is ready", async () => (await missing.status.innerHTML()).includes("codicon-zap"), LONG);
    });
    await missing.close();

    const failing = editor.folder("failing", { "small.py": SMALL });
    const other = await editor.open(failingServer(failing), join(failing, "small.py"));
    await scenario(other, "a server that does not start is reported once, with remedies", async () => {
      await other.message("did not start");
      await other.status.locator(".codicon-error").waitFor();
      await other.shot("failing");
      assert.equal((await other.messages()).length, 1);
      await other.answer("did not start", "Show the log");
      await other.page.locator(".output.panel .view-line, .pane-body .view-line", { hasText: "no such luck" }).first().waitFor();
    });
    await other.close();
  } finally {
    await editor.stop();
    rmSync(bin, { recursive: true });
  }
}
