// From an environment without the server to the first kept step of the example.
import assert from "node:assert/strict";
import { spawnSync } from "node:child_process";
import { existsSync, mkdirSync, readFileSync, readdirSync, symlinkSync, writeFileSync } from "node:fs";
import { join, resolve } from "node:path";
import { Editor, HERE, LONG, PYTHON, TOOLS, until } from "./editor.mjs";
import { SMALL } from "./samples.mjs";

/** Maximum clicks from installing the extension to the first kept step, without typing. */
const MAX_CLICKS = 4;
/** Packages of the server, which the user's environment does not contain. */
const SERVER_PACKAGES = /^(mtmc|_mtmc|_editable|pygls|lsprotocol|tree_sitter|typer|rich|cattrs|attr|attrs|click|shellingham)/;
const ROOT = resolve(HERE, "../..");

/** Creates an environment with torch but without the server. */
function environment(path) {
  const made = spawnSync(PYTHON, ["-m", "venv", path], { encoding: "utf8" });
  assert.equal(made.status, 0, made.stderr);
  const [own, theirs] = [join(path, "bin/python"), PYTHON].map((python) => spawnSync(python, ["-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], { encoding: "utf8" }).stdout.trim());
  const linked = join(path, "torch-and-the-like");
  mkdirSync(linked);
  for (const name of readdirSync(theirs)) {
    if (!SERVER_PACKAGES.test(name) && !name.endsWith(".pth")) symlinkSync(join(theirs, name), join(linked, name));
  }
  writeFileSync(join(own, "torch.pth"), `${linked}\n`);
  return join(path, "bin/python");
}

/** Steps of the walkthrough: title, button and a text of the page next to it. */
const STEPS = [["Open the example", "Open the example", /rmsnorm_residual/], ["Optimize it", "Optimize to Triton kernel", /float64 reference/], ["Keep what you like", "Keep the first step", /searches without it/]];

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
  const machine = { "mtmc.installSpec": ROOT, "mtmc.archs": ["sm_90"] };
  const editor = await Editor.start({ machine, environment: { ...pip, PYTHONPATH: "" }, flags: ["--disable-workspace-trust"] });
  try {
    const workspace = editor.folder("empty", { "pyproject.toml": "" });
    // The project's environment, which precedes the PATH.
    const python = environment(join(workspace, ".venv"));
    const w = await editor.open(workspace);
    const { page } = w;
    await scenario(w, "a missing server is installed, with the command shown, and starts", async () => {
      await w.click(page.locator(".activitybar .action-item[aria-label^='MTMC'], .activitybar .action-label[aria-label^='MTMC']").first());
      await w.message("mtmc-lsp is not installed in");
      assert.ok((await w.seen("mtmc-lsp is not installed in").innerText()).includes(`${python} -m pip install --upgrade`));
      await w.shot("missing");
      await w.answer("mtmc-lsp is not installed in", "Install");
      await w.message("Installing mtmc-lsp into");
      await w.status.filter({ hasText: "installing" }).waitFor();
      await w.shot("installing");
      await until("the server is ready", async () => (await w.status.innerHTML()).includes("codicon-zap"), LONG);
    });
    await scenario(w, "the first step of the example is kept after at most four clicks in total, without typing", async () => {
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
  }
}
