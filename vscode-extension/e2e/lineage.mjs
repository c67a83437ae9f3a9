// The versions of an evolution, which ran in a terminal before: opened, compared, and verified for a review.
import assert from "node:assert/strict";
import { spawnSync } from "node:child_process";
import { readFileSync } from "node:fs";
import { join } from "node:path";
import { Editor, LONG, PYTHON, until } from "./editor.mjs";
import { PAIR } from "./samples.mjs";

const COMMAND = "MTMC: Show the versions of an evolution";

export async function run(scenario) {
  const machine = { "mtmc.serverPython": PYTHON, "mtmc.python": PYTHON, "mtmc.archs": ["sm_90"] };
  const editor = await Editor.start({ machine, flags: ["--disable-workspace-trust"] });
  try {
    const workspace = editor.folder("work", { "pyproject.toml": "", "model.py": PAIR, "other.py": PAIR });
    const model = join(workspace, "model.py");
    const options = ["--generations", "1", "--islands", "1", "--arch", "sm_90", "--json"];
    const env = { ...process.env, XDG_STATE_HOME: editor.folder("state", {}) };
    const evolved = spawnSync(PYTHON, ["-m", "mtmc_lsp", "evolve", "model.py::pair", ...options], { cwd: workspace, encoding: "utf8", env });
    assert.equal(evolved.status, 0, evolved.stderr);
    const { best, versions } = JSON.parse(evolved.stdout);
    const w = await editor.open(workspace, model);
    const rows = w.page.locator(".quick-input-list .monaco-list-row");
    const row = (text) => rows.filter({ hasText: text }).first();
    /** Shows the versions and what can be done with one of them. */
    const act = async (number, action) => {
      await w.command(COMMAND);
      await w.choose(row(new RegExp(`^${number}  `)));
      await w.choose(row(action));
    };

    await scenario(w, "the versions are listed with speed, status and reason, the best first", async () => {
      await w.ready();
      await w.line("def pair").click();
      await w.command(COMMAND);
      await row("0  your code").waitFor();
      const texts = await rows.allInnerTexts();
      assert.ok(texts[0].startsWith(`${best}  `), texts[0]);
      assert.match(texts[0], /\d+\.\d\dx your code, estimated · best, kept, from \d+/);
      assert.ok(texts.length >= Math.min(3, versions.length), texts.join("\n"));
      await w.shot("versions");
      await w.page.keyboard.press("Escape");
    });
    await scenario(w, "a version opens as a file beside the user's, which stays as it is", async () => {
      await act(best, "Open the file with this version");
      await w.line("@triton.jit").waitFor();
      assert.equal(readFileSync(model, "utf8"), PAIR);
    });
    await scenario(w, "from there, a version is compared with the user's code", async () => {
      await act(best, "Compare with your code");
      await w.page.locator(".tab", { hasText: `your code | version ${best}` }).waitFor();
      await w.page.locator(".diff-editor, .monaco-diff-editor").first().waitFor();
      await w.shot("version-diff");
    });
    await scenario(w, "a file without an evolution says how to begin one", async () => {
      await w.file(join(workspace, "other.py"));
      await w.line("def pair").click();
      await w.command(COMMAND);
      await w.message("No function of this file was evolved yet. In a terminal: mtmc evolve FILE::NAME.");
      await w.hideMessages();
    });
    await scenario(w, "a version is verified, reviewed and kept", async () => {
      await w.file(model);
      await w.line("def pair").click();
      // The final run of the evolution is pending, with both steps of the best version. Version 1 has one step.
      await w.status.filter({ hasText: "2 pending steps" }).waitFor();
      await act(1, "Verify it, and review its steps to keep them");
      await w.status.filter({ hasText: "1 pending step" }).waitFor({ timeout: LONG });
      assert.equal(readFileSync(model, "utf8"), PAIR);
      await w.line("def pair").click();
      await w.command("MTMC: Keep all");
      await until("the kernel is in the file", async () => readFileSync(model, "utf8").includes("mtmc: dispatch"));
    });
    await w.close();
  } finally {
    await editor.stop();
  }
}
