// What goes on around a run: cancelling it, losing the server, and two folders.
import assert from "node:assert/strict";
import { readFileSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import { Editor, LONG, PYTHON, until } from "./editor.mjs";
import { BLOCK, ENDLESS, PAIR, SMALL, UNKNOWN } from "./samples.mjs";

export async function run(scenario) {
  const machine = { "mtmc.serverPython": PYTHON, "mtmc.python": PYTHON, "mtmc.archs": ["sm_90"] };
  const editor = await Editor.start({ machine, flags: ["--disable-workspace-trust"] });
  try {
    const one = editor.folder("one", { "pyproject.toml": "", "small.py": SMALL, "pair.py": PAIR, "block.py": BLOCK, "endless.py": ENDLESS, "unknown.py": UNKNOWN });
    const w = await editor.open(one, join(one, "small.py"));
    const { page } = w;
    const spinning = w.status.locator(".codicon-sync");

    await scenario(w, "the talk with the server is in the log, as the setting says", async () => {
      await w.ready();
      await until("a request and its answer are there", async () => /Sending request 'textDocument[\s\S]*Received response 'textDocument/.test(editor.log(1000)));
    });
    await scenario(w, "a step of a short run waits", async () => {
      await w.lightbulb("softmax", "Optimize to Triton kernel");
      await w.thread("Step 1 of 1").waitFor({ timeout: LONG });
      await w.status.filter({ hasText: "CPU: verified" }).waitFor({ timeout: LONG });
    });
    await scenario(w, "a function without a workload gets the inputs that are proposed for it, once changed, and the run goes on", async () => {
      await w.file(join(one, "unknown.py"));
      await w.lightbulb("sigmoid", "Optimize to Triton kernel");
      await w.message("Nothing says what the inputs");
      await w.seen("Nothing says what the inputs").locator(".monaco-button", { hasText: "Record them from a command" }).waitFor();
      await w.shot("workload");
      await w.answer("Nothing says what the inputs", "Describe the inputs");
      const input = page.locator(".quick-input-widget:visible input").first();
      await until("the code's proposal is there", async () => /^y=f32\[.*\]$/.test(await input.inputValue()));
      // Typing takes the place of its sizes.
      const selected = () => input.evaluate((field) => field === document.activeElement && field.value.slice(field.selectionStart, field.selectionEnd));
      await until("its sizes are selected", async () => /^\d+(,\d+)*$/.test(await selected()));
      await w.shot("inputs");
      await page.keyboard.type("4,96");
      await page.keyboard.press("Enter");
      await until("the directive is above it", async () => readFileSync(join(one, "unknown.py"), "utf8").includes("\n# mtmc: y=f32[4,96]\ndef unknown(y)"));
      await w.thread("Step 1 of 1 · fuse sigmoid").waitFor({ timeout: LONG });
    });
    await scenario(w, "a run is cancelled from the status bar, and leaves the file alone", async () => {
      await w.file(join(one, "endless.py"));
      await w.lightbulb("torch.tanh", "Optimize to Triton kernel");
      await w.status.filter({ hasText: "endless" }).waitFor();
      await w.status.click();
      const cancel = page.locator(".quick-input-list .monaco-list-row", { hasText: "Cancel: endless" });
      await cancel.waitFor();
      await w.shot("cancel");
      await w.choose(cancel);
      await spinning.waitFor({ state: "detached" });
      assert.equal(readFileSync(join(one, "endless.py"), "utf8"), ENDLESS);
    });
    await scenario(w, "a server that is killed in mid-run is started again, tells it once, and the run goes on", async () => {
      await w.command("Notifications: Clear All Notifications");
      await w.file(join(one, "block.py"));
      await w.lightbulb("scores = ", "Optimize to Triton kernel");
      await w.thread("Step 1 of").waitFor({ timeout: LONG });
      // A process that it starts is one more of them until it has become its own program.
      await until("one server runs", async () => editor.languageServers().length === 1);
      const [server] = editor.languageServers();
      process.kill(server, "SIGKILL");
      await w.message("ended while it worked on block");
      await until("another server runs", async () => editor.languageServers().length === 1 && editor.languageServers()[0] !== server);
      await w.ready();
      await w.thread("Step 1 of").waitFor();
      await page.locator(".codelens-decoration a", { hasText: "Go on with the run" }).waitFor();
      await w.status.filter({ hasText: "CPU: verified" }).waitFor();
      await w.shot("killed");
      assert.deepEqual(await w.messages(), ["The language server ended while it worked on block, and is started again. The steps that it had found wait for you."]);
      await w.answer("ended while it worked on block", "Go on with the run");
      await spinning.waitFor();
    });
    await scenario(w, "the end of a run is told to who looks elsewhere, and leads to its steps", async () => {
      await w.file(join(one, "small.py"));
      await spinning.waitFor({ state: "detached", timeout: LONG });
      await w.message("block: 3 steps wait for your decision");
      await w.shot("elsewhere");
      await w.answer("block: 3 steps wait for your decision", "Review");
      await page.locator(".tab.active", { hasText: "block.py" }).waitFor();
      await w.thread("Step 1 of 3").waitFor();
      assert.equal(readFileSync(join(one, "block.py"), "utf8"), BLOCK);
    });
    await scenario(w, "trying another goes on without the step that waits", async () => {
      await w.file(join(one, "pair.py"));
      await w.lightbulb("scores = ", "Optimize to Triton kernel");
      await w.thread("Step 1 of 2 · fuse relu").waitFor({ timeout: LONG });
      await spinning.waitFor({ state: "detached", timeout: LONG });
      assert.deepEqual(await w.messages(), [], "what can be seen in the editor is not told besides");
      await w.keys("scores = ", "t");
      await w.thread("· fuse sigmoid").waitFor({ timeout: LONG });
      await spinning.waitFor({ state: "detached", timeout: LONG });
      await w.command("MTMC: Focus on Runs View");
      await w.row("1. fuse relu", "rejected").waitFor();
      await w.shot("another");
      assert.equal(readFileSync(join(one, "pair.py"), "utf8"), PAIR);
    });
    await scenario(w, "after a restart, steps wait in files that are not open, and next leads there", async () => {
      await w.command("View: Close All Editors");
      await w.status.filter({ hasText: "8 steps wait" }).waitFor();
      await page.reload();
      // The address names a file, which is opened again.
      await page.locator(".tab.active", { hasText: "small.py" }).waitFor();
      await w.status.filter({ hasText: "8 steps wait" }).waitFor();
      assert.equal(await page.locator(".tab").count(), 1);
      // Around at the end, to the first.
      for (const name of ["unknown.py", "block.py"]) {
        await w.command("MTMC: Next pending step");
        await page.locator(".tab.active", { hasText: name }).waitFor();
      }
      await w.thread("Step 1 of 3").waitFor();
      await w.file(join(one, "small.py"));
      await w.thread("Step 1 of 1").waitFor();
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
  await scenario(w, "in two folders each has its runs, and next goes from file to file", async () => {
    for (const name of ["one", "two"]) await w.page.locator(".explorer-folders-view .monaco-list-row[aria-level='1']", { hasText: name }).waitFor();
    await w.ready();
    await w.lightbulb("softmax", "Optimize to Triton kernel");
    await w.thread("Step 1 of 1").waitFor({ timeout: LONG });
    await w.status.filter({ hasText: "CPU: verified" }).waitFor({ timeout: LONG });
    await w.file(join(one, "small.py"));
    await w.thread("Step 1 of 1").first().waitFor();
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
