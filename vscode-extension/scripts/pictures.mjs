// Takes the pictures of the documents in a real VS Code: seven situations, each in the light and in the dark theme.
//
//   python3 scripts/dev.py e2e load (in the repository; installs the requirements and packages the extension), then: npm run pictures
import assert from "node:assert/strict";
import { mkdirSync, readdirSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { join, resolve } from "node:path";
import { compress } from "./png.mjs";

/** Maximum total size, to keep clones of the repository small. */
const MAX_BYTES = 2_000_000;
const FOLDER = resolve("media/pictures");
// The module reads the folder when it is loaded.
process.env.MTMC_SHOTS = FOLDER;
const { Editor, LONG, PYTHON, until } = await import("../e2e/editor.mjs");
const { BLOCK, FAILING, UNKNOWN } = await import("../e2e/samples.mjs");

/** Takes a picture without the tooltip of what the pointer was on. */
async function picture(w, name) {
  await w.page.mouse.move(250, 10);
  await until("tooltips are hidden", async () => (await w.page.locator(".monaco-hover:visible").count()) === 0);
  await w.shot(name);
}

/** Reviewing: the first step, the second one, after keep, and the report. */
async function review(editor) {
  const folder = editor.folder("review", { "pyproject.toml": "", "model.py": BLOCK });
  const w = await editor.open(folder, join(folder, "model.py"));
  await w.ready();
  await w.lightbulb("scores = ", "Optimize to Triton kernel");
  await w.thread("1/3 ").waitFor({ timeout: LONG });
  await w.status.filter({ hasText: "CPU: verified" }).waitFor({ timeout: LONG });
  await w.reviewPage("1/3 ");
  await w.pageButton("Discard").waitFor();
  await picture(w, "first-step");
  await w.pageButton("Next").click();
  await w.thread("2/3 ").waitFor();
  await w.reviewPage("2/3 ");
  await picture(w, "second-step");
  await w.pageButton("Previous").click();
  await w.thread("1/3 ").waitFor();
  await w.button("1/3 ", "Keep").click();
  await w.thread("2/3 ").waitFor();
  await w.line("mtmc: dispatch").waitFor();
  await w.reviewPage("2/3 ");
  await picture(w, "after-keep");
  await w.command("MTMC: Show the report");
  const frame = await w.report(/Roofline[\s\S]*Verification/);
  await until("its charts are drawn", async () => (await frame.locator("figure svg .mark-text, figure svg .mark-rect").count()) > 2);
  await picture(w, "report");
  await w.close();
}

/** A run that fails at a line of the function. */
async function failure(editor) {
  const folder = editor.folder("failure", { "pyproject.toml": "", "failing.py": FAILING });
  const w = await editor.open(folder, join(folder, "failing.py"));
  await w.ready();
  await w.command("MTMC: Focus on Runs View");
  await w.lightbulb("torch.relu", "Optimize to Triton kernel");
  await w.message("RuntimeError");
  await w.page.locator(".squiggly-error").first().waitFor({ timeout: LONG });
  await w.row("failing", "RuntimeError").waitFor();
  await w.page.locator(".codelens-decoration", { hasText: "Optimize to Triton kernel" }).waitFor();
  await picture(w, "failure");
  await w.close();
}

/** A function without example inputs. */
async function workload(editor) {
  const folder = editor.folder("workload", { "pyproject.toml": "", "unknown.py": UNKNOWN });
  const w = await editor.open(folder, join(folder, "unknown.py"));
  await w.ready();
  await w.command("MTMC: Focus on Runs View");
  await w.lightbulb("sigmoid", "Optimize to Triton kernel");
  await w.message("has no example inputs");
  await picture(w, "no-workload");
  await w.close();
}

/** A server that is killed during a run. */
async function killed(editor) {
  const folder = editor.folder("killed", { "pyproject.toml": "", "model.py": BLOCK });
  const w = await editor.open(folder, join(folder, "model.py"));
  await w.ready();
  await w.lightbulb("scores = ", "Optimize to Triton kernel");
  await w.thread("1/").waitFor({ timeout: LONG });
  await editor.killServer(w, "stopped while it worked on block");
  await w.thread("1/1 ").waitFor();
  await w.page.locator(".codelens-decoration a", { hasText: "Go on with the run" }).waitFor();
  await w.status.filter({ hasText: "CPU: verified" }).waitFor();
  await w.reviewPage("1/1 ");
  await picture(w, "killed");
  await w.close();
}

rmSync(FOLDER, { recursive: true, force: true });
mkdirSync(FOLDER, { recursive: true });
const machine = { "mtmc.serverPython": PYTHON, "mtmc.python": PYTHON, "mtmc.archs": ["sm_90"] };
for (const situation of [review, failure, workload, killed]) {
  const editor = await Editor.start({ machine, flags: ["--disable-workspace-trust"] });
  try {
    await situation(editor);
  } finally {
    await editor.stop();
  }
}
const names = readdirSync(FOLDER);
assert.equal(names.length, 14);
let bytes = 0;
for (const name of names) {
  const small = compress(readFileSync(join(FOLDER, name)));
  writeFileSync(join(FOLDER, name), small);
  bytes += small.length;
}
console.log(`${names.length} pictures, ${bytes} bytes`);
assert.ok(bytes <= MAX_BYTES, `the pictures have ${bytes} bytes, more than ${MAX_BYTES}`);
