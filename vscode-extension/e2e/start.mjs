// From an environment without the server to the first kept step of the example.
import assert from "node:assert/strict";
import { spawnSync } from "node:child_process";
import { existsSync, mkdirSync, readFileSync, readdirSync, symlinkSync, writeFileSync } from "node:fs";
import { join, resolve } from "node:path";
import { Editor, HERE, LONG, PYTHON, TOOLS, until } from "./editor.mjs";

/** From installing the extension to the first kept step; no key is pressed. */
const MOST_CLICKS = 4;
/** What the server brings itself, and a user's environment has not. */
const OURS = /^(mtmc|_mtmc|_editable|pygls|lsprotocol|tree_sitter|typer|rich|cattrs|attr|attrs|click|shellingham)/;
const ROOT = resolve(HERE, "../..");

/** An environment with torch, and without us. */
function environment(path) {
  const made = spawnSync(PYTHON, ["-m", "venv", path], { encoding: "utf8" });
  assert.equal(made.status, 0, made.stderr);
  const [own, theirs] = [join(path, "bin/python"), PYTHON].map((python) => spawnSync(python, ["-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], { encoding: "utf8" }).stdout.trim());
  const linked = join(path, "torch-and-the-like");
  mkdirSync(linked);
  for (const name of readdirSync(theirs)) {
    if (!OURS.test(name) && !name.endsWith(".pth")) symlinkSync(join(theirs, name), join(linked, name));
  }
  writeFileSync(join(own, "torch.pth"), `${linked}\n`);
  return join(path, "bin/python");
}

export async function run(scenario) {
  // Whatever is chosen, pip refuses to touch the machine's own Python.
  const pip = { PIP_NO_INDEX: "1", PIP_FIND_LINKS: join(TOOLS, "wheels"), PIP_CONFIG_FILE: "/dev/null", PIP_REQUIRE_VIRTUALENV: "1" };
  const machine = { "mtmc.installSpec": ROOT, "mtmc.archs": ["sm_90"] };
  const editor = await Editor.start({ machine, environment: { ...pip, PYTHONPATH: "" }, flags: ["--disable-workspace-trust"] });
  try {
    const workspace = editor.folder("empty", { "pyproject.toml": "" });
    // The project's own environment, which is looked at before the PATH.
    const python = environment(join(workspace, ".venv"));
    const w = await editor.open(workspace);
    const { page } = w;
    await scenario(w, "a missing server is installed, with the command shown, and starts", async () => {
      await w.click(page.locator(".activitybar .action-item[aria-label^='MTMC'], .activitybar .action-label[aria-label^='MTMC']").first());
      const missing = w.message("mtmc-lsp is not installed in");
      await missing.waitFor();
      assert.ok((await missing.innerText()).includes(`${python} -m pip install --upgrade`));
      await w.shot("missing");
      await w.click(w.message("mtmc-lsp is not installed in", "Install"));
      await w.message("Installing mtmc-lsp into").waitFor();
      await w.status.filter({ hasText: "installing" }).waitFor();
      await w.shot("installing");
      await until("the server is ready", async () => (await w.status.innerHTML()).includes("codicon-zap"), LONG);
    });
    await scenario(w, "from there to the first kept step of the example: at most four clicks in all, and no typing", async () => {
      await w.click(page.locator(".welcome-view-content .monaco-button", { hasText: "Try it on the example" }));
      await w.thread("Step 1 of 1").waitFor({ timeout: LONG });
      await w.row("1. fuse").waitFor();
      await w.shot("example");
      await w.click(w.button("Step 1 of 1", "Keep"));
      const example = join(workspace, "rmsnorm_residual.py");
      await until("it is kept", async () => existsSync(example) && readFileSync(example, "utf8").includes("# mtmc: dispatch"));
      console.log(`   clicks: ${w.clicks}`);
      assert.ok(w.clicks <= MOST_CLICKS, `${w.clicks} clicks`);
    });
    await scenario(w, "the walkthrough opens, and ends with keeping a step", async () => {
      await w.command("Welcome: Open Walkthrough...");
      await page.locator(".quick-input-list .monaco-list-row", { hasText: "Your first Triton kernel" }).click();
      await page.locator(".gettingStartedContainer .step-list-container").waitFor();
      await page.locator(".gettingStartedContainer", { hasText: "Keep what you like" }).waitFor();
      await w.shot("walkthrough");
    });
    await w.close();
  } finally {
    await editor.stop();
  }
}
