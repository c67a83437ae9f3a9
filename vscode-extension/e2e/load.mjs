// Cost of the extension: activation time, and no activation without Python files.
import assert from "node:assert/strict";
import { cpus, loadavg } from "node:os";
import { join } from "node:path";
import { Editor, PYTHON, until } from "./editor.mjs";
import { SMALL } from "./samples.mjs";

/** Maximum activation time in milliseconds, as reported by VS Code. */
const MAX_ACTIVATION_MS = 150;

/** Whether the load average exceeds two processes per core. */
export function isBusy() {
  return loadavg()[0] > 2 * cpus().length;
}

export async function run(scenario) {
  const editor = await Editor.start({ machine: { "mtmc.serverPython": PYTHON, "mtmc.python": PYTHON }, flags: ["--disable-workspace-trust"] });
  try {
    const one = editor.folder("one", { "pyproject.toml": "", "small.py": SMALL });
    const w = await editor.open(one, join(one, "small.py"));
    const { page } = w;
    await scenario(w, "VS Code reports an activation time below 150 ms", async () => {
      await w.ready();
      const seen = [];
      // Other load only increases the time, so use the minimum of several attempts.
      do {
        if (seen.length > 0) await page.reload();
        await w.ready();
        await w.command("Developer: Show Running Extensions");
        const entry = page.locator(".runtime-extensions-editor .monaco-list-row", { hasText: "MTMC" });
        await entry.filter({ hasText: /Activation: \d+ms/ }).waitFor();
        seen.push(Number(/Activation: (\d+)ms/.exec(await entry.innerText())[1]));
        await w.command("View: Close Editor");
      } while (seen.at(-1) >= MAX_ACTIVATION_MS && seen.length < 6 && !isBusy());
      console.log(`   activation: ${seen.join(", ")} ms, load ${loadavg()[0].toFixed(1)} on ${cpus().length} cores`);
      // On a busy machine the time is not meaningful: print it without a check.
      if (!isBusy()) assert.ok(Math.min(...seen) < MAX_ACTIVATION_MS, `${seen.join(", ")} ms`);
    });
    await w.close();

    const text = editor.folder("text", { "notes.md": "# Notes\n" });
    const quiet = await editor.open(text, join(text, "notes.md"));
    await scenario(quiet, "the extension is not loaded for a folder without Python", async () => {
      // Focus the editor first: if it opened late, it would take the focus from the palette.
      await quiet.line("Notes").click();
      await quiet.command("Developer: Show Running Extensions");
      await quiet.page.locator(".runtime-extensions-editor .monaco-list-row").first().waitFor();
      assert.equal(await quiet.page.locator(".runtime-extensions-editor .monaco-list-row", { hasText: "MTMC" }).count(), 0);
      assert.equal(await quiet.status.count(), 0);
      await until("the server of the previous window has stopped, and there is no other", async () => editor.languageServers().length === 0);
    });
    await quiet.close();
  } finally {
    await editor.stop();
  }
}
