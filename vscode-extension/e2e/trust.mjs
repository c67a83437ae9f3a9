// An untrusted workspace: only static checks until it is trusted.
import assert from "node:assert/strict";
import { existsSync, readFileSync } from "node:fs";
import { join } from "node:path";
import { Editor, LONG, PYTHON, until } from "./editor.mjs";
import { KERNEL, SMALL } from "./samples.mjs";

export async function run(scenario) {
  // Importing the file creates a marker file, which shows that it was run.
  const marked = `${SMALL.replace("import torch\n", 'import pathlib\n\nimport torch\n\npathlib.Path(__file__).with_name("was-run").touch()\n')}`;
  const editor = await Editor.start({ machine: { "mtmc.serverPython": PYTHON, "mtmc.python": PYTHON, "mtmc.archs": ["sm_90"] } });
  try {
    const workspace = editor.folder("strange", { "pyproject.toml": "", "small.py": marked, "copying.py": KERNEL });
    const mark = join(workspace, "was-run");
    const w = await editor.open(workspace, join(workspace, "copying.py"));
    await scenario(w, "an untrusted workspace gets only static checks, and a message says so", async () => {
      await w.page.locator(".monaco-dialog-box .monaco-button", { hasText: "No, I don't trust" }).click();
      await w.ready();
      await w.page.locator(".squiggly-error").first().waitFor();
      await until("the status has a shield", async () => (await w.status.innerHTML()).includes("codicon-shield"));
      await w.file(join(workspace, "small.py"));
      await w.lightbulb("softmax", "Optimize to Triton kernel");
      await w.message("the workspace is not trusted. Nothing was run");
      await w.shot("untrusted");
      assert.ok(!existsSync(mark));
    });
    await scenario(w, "after trusting the workspace, optimising works", async () => {
      await w.answer("the workspace is not trusted", "Manage trust");
      await w.page.locator(".workspace-trust-editor .monaco-button", { hasText: "Trust" }).first().click();
      await until("the status has its usual icon", async () => (await w.status.innerHTML()).includes("codicon-zap"));
      await w.file(join(workspace, "small.py"));
      const before = w.clicks;
      const opened = Date.now();
      await w.click(w.page.locator(".codelens-decoration a", { hasText: "Optimize to Triton kernel" }).first());
      await w.thread("1/1 ").waitFor({ timeout: LONG });
      assert.ok(existsSync(mark));
      assert.equal(readFileSync(join(workspace, "small.py"), "utf8"), marked);
      await w.shot("trusted");
      await w.click(w.button("1/1 ", "Keep"));
      await until("the step is kept", async () => readFileSync(join(workspace, "small.py"), "utf8").includes("# mtmc: dispatch"));
      console.log(`   ${w.clicks - before} clicks and ${Math.round((Date.now() - opened) / 1000)} s from the open file to the first kept step`);
      assert.equal(w.clicks - before, 2);
    });
    await w.close();
  } finally {
    await editor.stop();
  }
}
