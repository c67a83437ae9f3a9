// Around a run: cancellation, loss of the server, restart, and two folders.
import assert from "node:assert/strict";
import { readFileSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import { Editor, LONG, PYTHON, until } from "./editor.mjs";
import { BLOCK, ENDLESS, FAILING, PAIR, SMALL, UNKNOWN } from "./samples.mjs";

export async function run(scenario) {
  const machine = { "mtmc.serverPython": PYTHON, "mtmc.python": PYTHON, "mtmc.archs": ["sm_90"] };
  const editor = await Editor.start({ machine, flags: ["--disable-workspace-trust"] });
  try {
    const one = editor.folder("one", { "pyproject.toml": "", "small.py": SMALL, "pair.py": PAIR, "block.py": BLOCK, "endless.py": ENDLESS, "unknown.py": UNKNOWN, "failing.py": FAILING });
    const w = await editor.open(one, join(one, "small.py"));
    const { page } = w;
    const spinning = w.status.locator(".codicon-sync");

    await scenario(w, "with the trace setting, messages of the server are in the log", async () => {
      await w.ready();
      await until("a request and its answer are there", async () => /Sending request 'textDocument[\s\S]*Received response 'textDocument/.test(editor.log(1000)));
    });
    await scenario(w, "a short run finds a pending step", async () => {
      await w.lightbulb("softmax", "Optimize to Triton kernel");
      await w.thread("1/1 ").waitFor({ timeout: LONG });
      await w.status.filter({ hasText: "CPU: verified" }).waitFor({ timeout: LONG });
    });
    await scenario(w, "a function without a workload gets suggested inputs, which the user edits, and the run continues", async () => {
      await w.file(join(one, "unknown.py"));
      await w.lightbulb("sigmoid", "Optimize to Triton kernel");
      await w.message("has no example inputs");
      await w.seen("has no example inputs").locator(".monaco-button", { hasText: "Record from a command" }).waitFor();
      await w.shot("workload");
      await w.answer("has no example inputs", "Describe the inputs");
      const input = page.locator(".quick-input-widget:visible input").first();
      await until("the suggestion is shown", async () => /^y=f32\[.*\]$/.test(await input.inputValue()));
      // Typing replaces the selected sizes.
      const selected = () => input.evaluate((field) => field === document.activeElement && field.value.slice(field.selectionStart, field.selectionEnd));
      await until("its sizes are selected", async () => /^\d+(,\d+)*$/.test(await selected()));
      await w.shot("inputs");
      await page.keyboard.type("4,96");
      await page.keyboard.press("Enter");
      await until("the directive is above it", async () => readFileSync(join(one, "unknown.py"), "utf8").includes("\n# mtmc: y=f32[4,96]\ndef unknown(y)"));
      await w.thread("1/1 Write sigmoid").waitFor({ timeout: LONG });
    });
    await scenario(w, "a run that fails marks the line, shows a message with one button, and a row in the view", async () => {
      await w.file(join(one, "failing.py"));
      await w.lightbulb("torch.relu", "Optimize to Triton kernel");
      await w.message("RuntimeError");
      await page.locator(".squiggly-error").first().waitFor({ timeout: LONG });
      await w.shot("failure");
      assert.equal(await w.seen("RuntimeError").locator(".notification-list-item-buttons-container .monaco-button").count(), 1);
      await w.command("MTMC: Focus on Runs View");
      await w.row("failing", "RuntimeError").waitFor();
      await w.shot("failure-row");
      await w.command("Notifications: Clear All Notifications");
    });
    await scenario(w, "a syntax error is marked at its line, and Optimize names that line", async () => {
      await w.file(join(one, "failing.py"));
      await w.line("scores = ").click();
      await page.keyboard.press("End");
      await page.keyboard.type(" +");
      const mark = page.locator(".squiggly-error").first();
      await until("the mark is in the edited line", async () => {
        const [line, squiggle] = [await w.line("scores = ").boundingBox(), await mark.boundingBox()];
        return Math.abs(line.y - squiggle.y) < line.height;
      });
      await w.command("MTMC: Optimize to Triton kernel");
      await w.message("Line 6 has a syntax error: invalid syntax. Fix it first.");
      await w.command("Problems: Focus on Problems View");
      await page.locator(".markers-panel .monaco-list-row", { hasText: "syntax-error" }).first().waitFor();
      await w.shot("syntax-error");
      await w.line("scores = ").click();
      await page.keyboard.press("End");
      for (let index = 0; index < 2; index++) await page.keyboard.press("Backspace");
      await until("the file is as it was", async () => readFileSync(join(one, "failing.py"), "utf8") === FAILING);
      await page.locator(".markers-panel .monaco-list-row", { hasText: "syntax-error" }).first().waitFor({ state: "detached" });
      await w.command("View: Hide Panel");
      await w.command("Notifications: Clear All Notifications");
    });
    await scenario(w, "editing the function stops its run", async () => {
      await w.file(join(one, "endless.py"));
      await w.lightbulb("torch.tanh", "Optimize to Triton kernel");
      await w.status.filter({ hasText: "endless" }).waitFor();
      await w.line("torch.tanh").click();
      await page.keyboard.press("End");
      await page.keyboard.type(" + 1");
      await w.message("Stopped the run of endless, because the function was edited");
      await w.shot("edited");
      for (let index = 0; index < 4; index++) await page.keyboard.press("Backspace");
      await until("the file is as it was", async () => readFileSync(join(one, "endless.py"), "utf8") === ENDLESS);
      await w.command("Notifications: Clear All Notifications");
    });
    await scenario(w, "a run is cancelled from the status bar, and the file is unchanged", async () => {
      await w.file(join(one, "endless.py"));
      await w.lightbulb("torch.tanh", "Optimize to Triton kernel");
      await w.status.filter({ hasText: "endless" }).waitFor();
      await w.status.click();
      const cancel = page.locator(".quick-input-list .monaco-list-row", { hasText: "Cancel: endless" });
      await cancel.waitFor();
      await w.shot("cancel");
      await w.choose(cancel);
      await spinning.waitFor({ state: "detached" });
      await w.message("Cancelled optimizing endless");
      assert.equal(readFileSync(join(one, "endless.py"), "utf8"), ENDLESS);
    });
    await scenario(w, "a server that is killed during a run is restarted with one message, and the run is resumed", async () => {
      await w.command("Notifications: Clear All Notifications");
      await w.file(join(one, "block.py"));
      await w.lightbulb("scores = ", "Optimize to Triton kernel");
      await w.thread("1/").waitFor({ timeout: LONG });
      await editor.killServer(w, "stopped while it worked on block");
      await w.thread("1/").waitFor();
      await page.locator(".codelens-decoration a", { hasText: "Go on with the run" }).waitFor();
      await w.status.filter({ hasText: "CPU: verified" }).waitFor();
      await w.shot("killed");
      assert.deepEqual(await w.messages(), ["The language server stopped while it worked on block and was restarted. The steps found so far are pending."]);
      await w.answer("stopped while it worked on block", "Go on with the run");
      await spinning.waitFor();
    });
    await scenario(w, "the end of a run is announced if its file is not visible, with a link to its steps", async () => {
      await w.file(join(one, "small.py"));
      await spinning.waitFor({ state: "detached", timeout: LONG });
      await w.message("block: 3 pending steps to review");
      await w.shot("elsewhere");
      await w.answer("block: 3 pending steps to review", "Review");
      await page.locator(".tab.active", { hasText: "block.py" }).waitFor();
      await w.thread("1/3 ").waitFor();
      assert.equal(readFileSync(join(one, "block.py"), "utf8"), BLOCK);
    });
    await scenario(w, "try another continues without the pending step", async () => {
      await w.file(join(one, "pair.py"));
      await w.lightbulb("scores = ", "Optimize to Triton kernel");
      await w.thread("1/2 Fuse relu").waitFor({ timeout: LONG });
      await spinning.waitFor({ state: "detached", timeout: LONG });
      assert.deepEqual(await w.messages(), [], "no message if the steps are visible in the editor");
      await w.keys("scores = ", "t");
      await w.thread("Fuse sigmoid").waitFor({ timeout: LONG });
      await spinning.waitFor({ state: "detached", timeout: LONG });
      await w.command("MTMC: Focus on Runs View");
      await w.row("fuse relu", "rejected").waitFor();
      await w.shot("another");
      assert.equal(readFileSync(join(one, "pair.py"), "utf8"), PAIR);
    });
    await scenario(w, "after a reload, steps of files that are not open are still pending, and next opens them", async () => {
      await w.command("View: Close All Editors");
      await w.status.filter({ hasText: "8 pending steps" }).waitFor();
      await page.reload();
      // The URL names a file, which is opened again.
      await page.locator(".tab.active", { hasText: "small.py" }).waitFor();
      await w.status.filter({ hasText: "8 pending steps" }).waitFor();
      assert.equal(await page.locator(".tab").count(), 1);
      // Wraps around at the end.
      for (const name of ["unknown.py", "block.py"]) {
        await w.command("MTMC: Next pending step");
        await page.locator(".tab.active", { hasText: name }).waitFor();
      }
      await w.thread("1/3 ").waitFor();
      await w.file(join(one, "small.py"));
      await w.thread("1/1 ").waitFor();
    });
    await w.close();

    await scenarioOfFolders(scenario, editor, one);
  } finally {
    await editor.stop();
  }
}

async function scenarioOfFolders(scenario, editor, one) {
  const two = editor.folder("two", { "pyproject.toml": "", "other.py": SMALL.replace("small", "other") });
  const file = join(editor.home, "both.code-workspace");
  writeFileSync(file, JSON.stringify({ folders: [one, two].map((path) => ({ uri: `vscode-remote://${editor.address}${path}` })) }));
  const w = await editor.open(file, join(two, "other.py"));
  await scenario(w, "each of two folders has its runs, and next goes from file to file", async () => {
    for (const name of ["one", "two"]) await w.page.locator(".explorer-folders-view .monaco-list-row[aria-level='1']", { hasText: name }).waitFor();
    await w.ready();
    await w.lightbulb("softmax", "Optimize to Triton kernel");
    await w.thread("1/1 ").waitFor({ timeout: LONG });
    await w.status.filter({ hasText: "CPU: verified" }).waitFor({ timeout: LONG });
    await w.file(join(one, "small.py"));
    await w.thread("1/1 ").first().waitFor();
    await w.command("MTMC: Focus on Runs View");
    for (const name of ["other.py", "small.py"]) await w.row(`${name} ·`).waitFor();
    await w.shot("folders");
    await w.keys("softmax", "n");
    await w.page.locator(".tab.active", { hasText: "other.py" }).waitFor();
    await w.command("MTMC: Previous pending step");
    await w.page.locator(".tab.active", { hasText: "small.py" }).waitFor();
  });
  await w.close();
}
