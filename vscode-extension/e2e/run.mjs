// The extension in a real VS Code (code-server, driven in headless Chromium), with the real server, on the CPU:
// optimise, review, reload, diff, report, keep, undo all. Screenshots are left in e2e/shots.
//
//   e2e/setup.sh once; then: npm run package && MTMC_PYTHON=/path/to/python npm run e2e
import assert from "node:assert/strict";
import { spawn, spawnSync } from "node:child_process";
import { mkdirSync, mkdtempSync, readFileSync, readdirSync, readlinkSync, rmSync, writeFileSync } from "node:fs";
import { createServer } from "node:net";
import { tmpdir } from "node:os";
import { dirname, join, resolve } from "node:path";
import { fileURLToPath } from "node:url";

const HERE = dirname(fileURLToPath(import.meta.url));
const TOOLS = join(HERE, "..", process.env.MTMC_E2E ?? ".e2e");
const ENTRY = join(TOOLS, "node_modules/code-server/out/node/entry.js");
const PYTHON = resolve(process.env.MTMC_PYTHON ?? join(HERE, "../../.venv/bin/python"));
const CHROMIUM = process.env.CHROMIUM ?? "/usr/bin/chromium";
const { chromium } = await import(join(TOOLS, "node_modules/playwright-core/index.mjs"));
const MODEL = "import torch\n\n\n# mtmc: x=f32[8,48]\ndef f(x):\n    return torch.softmax(torch.relu(x) + 1, -1)\n\n\ndef g(y):\n    return torch.sigmoid(y)\n";

const home = mkdtempSync(join(tmpdir(), "mtmc-e2e-"));
const [workspace, data, extensions, shots] = [join(home, "ws"), join(home, "data"), join(home, "ext"), join(HERE, "shots")];
const model = join(workspace, "model.py");
rmSync(shots, { recursive: true, force: true });
for (const folder of [workspace, join(data, "Machine"), extensions, shots]) mkdirSync(folder, { recursive: true });
writeFileSync(model, MODEL);
writeFileSync(join(workspace, "pyproject.toml"), "");
const settings = { "mtmc.serverPython": PYTHON, "mtmc.python": PYTHON, "mtmc.archs": ["sm_90"], "chat.disableAIFeatures": true, "workbench.startupEditor": "none" };
writeFileSync(join(data, "Machine/settings.json"), JSON.stringify(settings));

const own = ["--user-data-dir", data, "--extensions-dir", extensions];
const environment = { ...process.env, XDG_STATE_HOME: join(home, "state"), XDG_CONFIG_HOME: join(home, "config") };
const installed = spawnSync(process.execPath, [ENTRY, ...own, "--install-extension", join(HERE, "../mtmc.vsix")], { env: environment, encoding: "utf8" });
assert.match(installed.stdout, /successfully installed/, installed.stderr);

const port = await freePort();
const address = `127.0.0.1:${port}`;
const flags = ["--bind-addr", address, "--auth", "none", "--disable-telemetry", "--disable-update-check", "--disable-workspace-trust"];
const server = spawn(process.execPath, [ENTRY, ...own, ...flags, workspace], { env: environment, stdio: "ignore", detached: true });
const browser = await chromium.launch({ executablePath: CHROMIUM, args: ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-sync"] });
const page = await browser.newPage({ viewport: { width: 1500, height: 950 } });
page.setDefaultTimeout(60_000);

const thread = page.locator(".review-widget", { hasText: "Step 1 of" });
const status = page.locator(".statusbar-item", { hasText: "MTMC" });
let count = 0;

try {
  await until("the editor's server answers", async () => (await fetch(`http://${address}/healthz`)).ok);
  const open = JSON.stringify([["openFile", `vscode-remote://${address}${model}`]]);
  await page.goto(`http://${address}/?folder=${workspace}&payload=${encodeURIComponent(open)}`);
  await scenario("the language server is ready", async () => {
    await status.waitFor();
    await until("ready", async () => (await status.innerHTML()).includes("codicon-zap"));
  });
  await scenario("a run ends with a step above the function, and the file as it was", async () => {
    await page.locator(".view-line", { hasText: "softmax" }).click();
    await command("MTMC: Optimize to Triton kernel");
    await thread.waitFor({ timeout: 120_000 });
    await status.filter({ hasText: "CPU: verified, not timed" }).waitFor();
    await page.locator(".codelens-decoration", { hasText: "Keep" }).first().waitFor();
    assert.equal(readFileSync(model, "utf8"), MODEL);
  });
  await scenario("a reload brings the pending step back", async () => {
    await page.reload();
    await thread.waitFor();
  });
  await scenario("the view shows the run and its step", async () => {
    await command("MTMC: Focus on Runs View");
    await page.locator(".pane-body .monaco-list-row", { hasText: "1. fuse" }).waitFor();
  });
  await scenario("the diff editor shows the kernel", async () => {
    await thread.locator(".action-label[aria-label^='Diff']").click();
    await page.locator(".diff-editor, .monaco-diff-editor").locator(".view-line", { hasText: "def f_kernel" }).first().waitFor();
  });
  await scenario("the report lists the checks, and claims no time", async () => {
    await page.locator(".tab", { hasText: "model.py" }).first().click();
    await thread.waitFor();
    await command("MTMC: Show the report");
    await until("the report is drawn", async () => {
      const texts = await Promise.all(page.frames().map((frame) => frame.evaluate("document.body.innerText").catch(() => "")));
      return texts.some((text) => /checks passed/.test(text) && /Nothing was timed/.test(text));
    });
  });
  await scenario("keep puts the step into the file", async () => {
    await thread.locator(".action-label[aria-label^='Keep']").click();
    await thread.waitFor({ state: "detached" });
    await page.locator(".pane-body .monaco-list-row", { hasText: "1 kept" }).waitFor();
    await page.locator(".tab", { hasText: "model.py" }).first().click();
    await command("File: Save All");
    await until("the kernel is on disk", async () => readFileSync(model, "utf8").includes("# mtmc: begin f\n"));
  });
  await scenario("undoing all gives every byte back, and the step waits again", async () => {
    await command("MTMC: Undo all steps");
    await thread.waitFor();
    await command("File: Save All");
    await until("the file is as it was", async () => readFileSync(model, "utf8") === MODEL);
  });
  await scenario("a server that is killed comes back with the pending step", async () => {
    process.kill(languageServer(), "SIGKILL");
    await thread.waitFor({ state: "detached" });
    await thread.waitFor();
  });
  await scenario("a function without a workload gets a directive at one click", async () => {
    await page.locator(".view-line", { hasText: "sigmoid" }).click();
    await command("MTMC: Optimize to Triton kernel");
    await page.locator(".notification-toast .monaco-button", { hasText: "Add a workload directive" }).click();
    await until("the directive is above it", async () => {
      await command("File: Save All");
      return /\n# mtmc: y=.*\ndef g\(y\)/.test(readFileSync(model, "utf8"));
    });
  });
  await scenario("the same in the dark", async () => {
    await command("Preferences: Toggle between Light/Dark Themes");
    await page.locator(".monaco-workbench.vs-dark").waitFor();
    await thread.waitFor();
  });
} catch (error) {
  await page.screenshot({ path: join(shots, "failure.png") });
  throw error;
} finally {
  await browser.close();
  // The group: the editor's server has processes of its own, and they ours.
  process.kill(-server.pid, "SIGTERM");
  rmSync(home, { recursive: true, force: true, maxRetries: 10, retryDelay: 300 });
}

async function scenario(name, body) {
  const began = Date.now();
  await body();
  await page.screenshot({ path: join(shots, `${++count}-${name.replace(/\W+/g, "-")}.png`) });
  console.log(`ok ${count} - ${name} (${((Date.now() - began) / 1000).toFixed(1)} s)`);
}

/** The process of our language server: the one that runs below the folders of this test. */
function languageServer() {
  const found = readdirSync("/proc").filter((name) => {
    try {
      return readFileSync(`/proc/${name}/cmdline`, "utf8").includes("mtmc_lsp.server.app") && readlinkSync(`/proc/${name}/cwd`).startsWith(data);
    } catch {
      // Not a process, or one that has ended since.
      return false;
    }
  });
  assert.equal(found.length, 1, `language servers: ${found.join(" ")}`);
  return Number(found[0]);
}

/** Waits for something that the page does not show. */
async function until(what, holds, seconds = 60) {
  const end = Date.now() + seconds * 1000;
  for (;;) {
    if (await holds().catch(() => false)) return;
    if (Date.now() > end) throw new Error(`never: ${what}`);
    await new Promise((done) => setTimeout(done, 100));
  }
}

/** Chooses a command from the palette; once more where the palette did not have it yet. */
async function command(title) {
  const row = page.locator(".quick-input-list .monaco-list-row", { hasText: title }).first();
  for (let attempt = 0; ; attempt++) {
    await page.keyboard.press("F1");
    await page.locator(".quick-input-widget input").first().fill(`>${title}`);
    try {
      await row.waitFor({ timeout: 10_000 });
      await row.click();
      return;
    } catch (error) {
      if (attempt === 2) throw error;
      await page.keyboard.press("Escape");
    }
  }
}

async function freePort() {
  const probe = createServer().listen(0, "127.0.0.1");
  await new Promise((done) => probe.once("listening", done));
  const { port } = probe.address();
  await new Promise((done) => probe.close(done));
  return port;
}
