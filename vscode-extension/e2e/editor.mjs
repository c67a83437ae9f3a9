// A real VS Code: code-server with our package in it, and windows of it in headless Chromium.
import assert from "node:assert/strict";
import { spawn, spawnSync } from "node:child_process";
import { mkdirSync, mkdtempSync, readFileSync, readdirSync, readlinkSync, rmSync, writeFileSync } from "node:fs";
import { createServer } from "node:net";
import { tmpdir } from "node:os";
import { basename, dirname, join, resolve } from "node:path";
import { fileURLToPath } from "node:url";

export const HERE = dirname(fileURLToPath(import.meta.url));
export const TOOLS = join(HERE, "..", process.env.MTMC_E2E ?? ".e2e");
export const SHOTS = process.env.MTMC_SHOTS ?? join(HERE, "shots");
export const PYTHON = resolve(process.env.MTMC_PYTHON ?? join(HERE, "../../.venv/bin/python"));
const ENTRY = join(TOOLS, "node_modules/code-server/out/node/entry.js");
const CHROMIUM = process.env.CHROMIUM ?? "/usr/bin/chromium";
const { chromium } = await import(join(TOOLS, "node_modules/playwright-core/index.mjs"));

const BROWSER = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-sync"];
/** What turns for as long as a run goes on has the page painted anew all the time, which takes the run a part of the processor. */
const STILL = `{
  const sheet = new CSSStyleSheet();
  sheet.replaceSync("* { animation: none !important; transition: none !important }");
  document.adoptedStyleSheets.push(sheet);
}`;
const LOOKS = {
  "window.autoDetectColorScheme": true,
  "workbench.preferredLightColorTheme": "Default Light Modern",
  "workbench.preferredDarkColorTheme": "Default Dark Modern",
  "workbench.startupEditor": "none",
  "editor.minimap.enabled": false,
  "editor.cursorBlinking": "solid",
  "chat.disableAIFeatures": true,
  "chat.commandCenter.enabled": false,
  "files.autoSave": "afterDelay",
  "files.autoSaveDelay": 100,
  // For the log of a scenario that fails.
  "mtmc.trace.server": "messages",
};
/** What the page has to show within this time, on a machine that does other work too. */
const SOON = 120_000;
/** The same of a run. */
export const LONG = 240_000;

/** The editor's server, with user data of its own. */
export class Editor {
  /** Starts one. `machine` are settings of the machine, `environment` variables of its own, `flags` those of code-server. */
  static async start({ machine = {}, environment = {}, flags = [] } = {}) {
    const home = mkdtempSync(join(tmpdir(), "mtmc-e2e-"));
    const editor = new Editor(home);
    for (const folder of ["data/Machine", "data/User", "ext"]) mkdirSync(join(home, folder), { recursive: true });
    writeFileSync(join(home, "data/Machine/settings.json"), JSON.stringify(machine));
    writeFileSync(join(home, "data/User/settings.json"), JSON.stringify(LOOKS));
    const own = ["--user-data-dir", join(home, "data"), "--extensions-dir", join(home, "ext")];
    const env = { ...process.env, XDG_STATE_HOME: join(home, "state"), XDG_CONFIG_HOME: join(home, "config"), ...environment };
    const installed = spawnSync(process.execPath, [ENTRY, ...own, "--install-extension", join(HERE, "../mtmc.vsix")], { env, encoding: "utf8" });
    assert.match(installed.stdout, /successfully installed/, installed.stderr);
    editor.address = `127.0.0.1:${await freePort()}`;
    const quiet = ["--auth", "none", "--disable-telemetry", "--disable-update-check"];
    editor.process = spawn(process.execPath, [ENTRY, ...own, "--bind-addr", editor.address, ...quiet, ...flags], { env, stdio: "ignore", detached: true });
    await until("the editor's server answers", async () => (await fetch(`http://${editor.address}/healthz`)).ok);
    editor.browser = await chromium.launch({ executablePath: CHROMIUM, args: BROWSER, timeout: SOON });
    return editor;
  }

  constructor(home) {
    this.home = home;
  }

  /** Makes a folder with files to be opened. */
  folder(name, files) {
    const path = join(this.home, name);
    mkdirSync(path, { recursive: true });
    for (const [file, text] of Object.entries(files)) writeFileSync(join(path, file), text);
    return path;
  }

  /** Opens a window on a folder (or a workspace's file), perhaps with a file in it. */
  async open(path, file) {
    const context = await this.browser.newContext({ viewport: { width: 1440, height: 900 }, colorScheme: "light", permissions: ["clipboard-read", "clipboard-write"] });
    await context.addInitScript(STILL);
    const page = await context.newPage();
    page.setDefaultTimeout(SOON);
    const payload = file === undefined ? "" : `&payload=${encodeURIComponent(JSON.stringify([["openFile", `vscode-remote://${this.address}${file}`]]))}`;
    const kind = path.endsWith(".code-workspace") ? "workspace" : "folder";
    await page.goto(`http://${this.address}/?${kind}=${path}${payload}`);
    await page.locator(".monaco-workbench .part.editor").waitFor();
    // The VS Code of code-server 4.100.3 opens a workspace without its folders now and then, and has them when it is loaded anew.
    if (kind === "workspace") {
      const folder = page.locator(".explorer-folders-view .monaco-list-row[aria-level='1']").first();
      await retried((patience) => folder.waitFor({ timeout: 4 * patience }), () => page.reload());
    }
    return new Window(page, this);
  }

  /** The processes of our language servers below this editor. */
  languageServers() {
    return readdirSync("/proc").filter((name) => {
      try {
        const mine = readlinkSync(`/proc/${name}/cwd`).startsWith(join(this.home, "data"));
        return mine && readFileSync(`/proc/${name}/cmdline`, "utf8").includes("mtmc_lsp.server.app");
      } catch {
        // Not a process, or one that has ended since.
        return false;
      }
    }).map(Number);
  }

  /** The last lines that the extension and its server wrote to their log. */
  log(lines = 100) {
    const folder = join(this.home, "data/logs");
    const files = readdirSync(folder, { recursive: true }).filter((name) => name.endsWith("MTMC.log"));
    return files.map((name) => readFileSync(join(folder, name), "utf8").split("\n").slice(-lines).join("\n")).join("\n");
  }

  async stop() {
    await this.browser?.close();
    // The group: the editor's server has processes of its own, and they ours.
    if (this.process !== undefined) {
      const group = -this.process.pid;
      process.kill(group, "SIGTERM");
      await until("the editor's processes have ended", async () => !isThere(group)).catch(() => process.kill(group, "SIGKILL"));
    }
    // One that left the group may still write the last of its log.
    await until("its files are gone", async () => {
      rmSync(this.home, { recursive: true, force: true });
      return true;
    });
  }
}

/** A window of an editor. */
export class Window {
  constructor(page, editor) {
    this.page = page;
    this.editor = editor;
    this.status = page.locator(".statusbar-item", { hasText: "MTMC" });
    this.clicks = 0;
  }

  /** The thread above a function, whose heading has these words. */
  thread(words) {
    return this.page.locator(".review-widget", { hasText: words });
  }

  /** A button above a pending step. */
  button(words, name) {
    return this.thread(words).locator(`.action-label[aria-label^='${name}']`).first();
  }

  /** A row of our view, that has all of these words. */
  row(...words) {
    const rows = this.page.locator(".pane-body .monaco-list-row");
    return words.reduce((found, one) => found.filter({ hasText: one }), rows).first();
  }

  /** A message that is seen now: on a toast, or where they are listed. */
  seen(words) {
    return this.page.locator(".notification-list-item:visible", { hasText: words }).first();
  }

  /** Waits for a message. Toasts are few, and hide themselves after a while; all messages that were not closed are listed. */
  async message(words) {
    await retried((patience) => this.seen(words).waitFor({ timeout: 5 * patience }), () => this.listMessages());
  }

  /** Presses a button of a message, as a user does. */
  async answer(words, button) {
    this.clicks += 1;
    const choice = this.seen(words).locator(".monaco-button", { hasText: button }).first();
    await retried((patience) => choice.click({ timeout: 5 * patience }), () => this.listMessages());
    await this.hideMessages();
  }

  async listMessages() {
    await this.command("Notifications: Show Notifications");
  }

  /** Hides the list of messages, which also hides itself once it has none. */
  async hideMessages() {
    const list = this.page.locator(".notifications-center.visible");
    await until("the list of messages is hidden", async () => {
      if (await list.isVisible()) await list.locator(".codicon-notifications-hide").click({ timeout: 1000 });
      return !(await list.isVisible());
    });
  }

  line(words) {
    return this.page.locator(".view-line", { hasText: words }).first();
  }

  async ready() {
    await until("the language server is ready", async () => /codicon-(zap|shield)/.test(await this.status.innerHTML()));
  }

  /** Chooses a command from the palette, which lists what there was when it was opened: it is opened anew until the command is there. */
  async command(title) {
    await this.pick("F1", `>${title}`, title);
  }

  /** Opens a list to pick from, writes into its field, and picks. */
  async pick(key, words, title) {
    const widget = this.page.locator(".quick-input-widget");
    const input = widget.locator("input").first();
    await retried(async (patience) => {
      await this.page.keyboard.press(key);
      await input.fill(words);
      // The whole label: others begin with the same words.
      const label = this.page.locator(".label-name", { hasText: new RegExp(`^${title.replace(/[.*+?^${}()|[\]\\]/g, "\\$&")}$`) });
      await this.choose(widget.locator(".monaco-list-row", { has: label }).first(), patience);
    }, () => this.page.keyboard.press("Escape"));
    // What was picked may open another list, in the same place.
    await until(`${title} is taken`, async () => !(await input.isVisible()) || (await input.inputValue()) !== words);
  }

  /** Chooses a row by the keyboard: lists draw their rows anew when the mouse is over them, and a click in between is lost. */
  async choose(row, patience = SOON) {
    await row.waitFor({ timeout: patience });
    await until("the row is selected", async () => {
      if (/\bfocused\b/.test(await row.getAttribute("class", { timeout: 1000 }))) return true;
      await this.page.keyboard.press("ArrowDown");
      return false;
    }, patience);
    await this.page.keyboard.press("Enter");
  }

  /** Opens the light bulb's menu on a line, and chooses from it. */
  async lightbulb(line, title) {
    // Once: a menu that comes late would take a second click on the line for a choice.
    await this.line(line).click();
    const menu = this.page.locator(".action-widget");
    await retried(async (patience) => {
      await this.page.keyboard.press("Control+.");
      await this.choose(menu.locator(".monaco-list-row", { hasText: title }).first(), 4 * patience);
    }, () => this.page.keyboard.press("Escape"));
    await menu.waitFor({ state: "hidden" });
  }

  /** The keys of a command of ours, with the cursor on a line of the editor. */
  async keys(line, last) {
    await this.line(line).click();
    await this.page.keyboard.press("Alt+m");
    await this.page.keyboard.press(last);
  }

  /** Titles that the palette lists for some words. */
  async commands(words) {
    const rows = this.page.locator(".quick-input-list .monaco-list-row");
    await this.page.keyboard.press("F1");
    const input = this.page.locator(".quick-input-widget input").first();
    await input.fill(`>${words}`);
    await rows.first().waitFor();
    const titles = await rows.locator(".label-name").allInnerTexts();
    await this.page.keyboard.press("Escape");
    await input.waitFor({ state: "hidden" });
    return titles;
  }

  /** A click that a user makes, counted. */
  async click(locator) {
    this.clicks += 1;
    await locator.click();
  }

  /** Goes to a file, and not to a diff whose name begins as its does. */
  async file(path) {
    const name = basename(path);
    const tab = this.page.locator(`.tab[aria-label^='${name}']:not([aria-label*='·'])`).first();
    if ((await tab.count()) > 0) {
      await tab.click();
    } else {
      await this.pick("Control+p", path, name);
    }
    await this.page.locator(`.tab.active[aria-label^='${name}']:not([aria-label*='·'])`).waitFor();
  }

  /** What every message says that was not closed. */
  async messages() {
    await this.listMessages();
    const list = this.page.locator(".notifications-center.visible");
    await list.waitFor();
    const said = await list.locator(".notification-list-item-message").allInnerTexts();
    await this.hideMessages();
    return said;
  }

  /** The frame of the report, once its document has these words. */
  async report(words) {
    return this.frame("#report", words);
  }

  /** The frame that has these words in an element of its document. (VS Code puts one frame in another's place as it fills them.) */
  async frame(element, words) {
    let found;
    await until(`a frame says ${words}`, async () => {
      for (const frame of this.page.frames().filter((one) => one !== this.page.mainFrame())) {
        const text = await frame.evaluate(`document.querySelector("${element}")?.innerText ?? ""`).catch(() => "");
        if (words.test(text)) found = frame;
      }
      return found !== undefined;
    });
    return found;
  }

  /** A picture of the window in the light theme and in the dark one. */
  async shot(name) {
    for (const [scheme, theme] of [["dark", ".vs-dark"], ["light", ".vs"]]) {
      await this.page.emulateMedia({ colorScheme: scheme });
      await this.page.locator(`.monaco-workbench${theme}`).waitFor();
      for (const frame of this.page.frames()) {
        const isReport = await frame.evaluate("document.getElementById('report') !== null").catch(() => false);
        if (isReport) await frame.locator(`body.vscode-${scheme}`).waitFor();
      }
      await this.page.screenshot({ path: join(SHOTS, `${name}-${scheme}.png`) });
    }
  }

  async close() {
    await this.page.context().close();
  }
}

/** Tries until it works: with little patience at first, which a quick machine does not need, and with more each time. */
export async function retried(act, undo) {
  let patience = 1000;
  for (;;) {
    try {
      return await act(patience);
    } catch (error) {
      if (patience > SOON / 2) throw error;
      patience *= 2;
      await undo();
    }
  }
}

/** Waits for something that a page does not show. */
export async function until(what, holds, milliseconds = SOON) {
  const end = Date.now() + milliseconds;
  for (;;) {
    if (await holds().catch(() => false)) return;
    if (Date.now() > end) throw new Error(`never: ${what}`);
    await new Promise((done) => setTimeout(done, 100));
  }
}

/** Whether a process, or any of a group, is there. */
function isThere(pid) {
  try {
    process.kill(pid, 0);
    return true;
  } catch {
    return false;
  }
}

async function freePort() {
  const probe = createServer().listen(0, "127.0.0.1");
  await new Promise((done) => probe.once("listening", done));
  const { port } = probe.address();
  await new Promise((done) => probe.close(done));
  return port;
}
