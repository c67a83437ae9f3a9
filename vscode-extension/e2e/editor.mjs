// A real VS Code: code-server with the packaged extension, and its windows in headless Chromium.
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
/** Disables animations: the spinner would repaint the page during a run and take CPU time from it. */
const NO_ANIMATIONS = `{
  const sheet = new CSSStyleSheet();
  sheet.replaceSync("* { animation: none !important; transition: none !important }");
  document.adoptedStyleSheets.push(sheet);
}`;
const USER_SETTINGS = {
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
  // For the log of failed scenarios.
  "mtmc.trace.server": "messages",
};
/** Timeout for elements of the page, on a loaded machine. */
const TIMEOUT_MS = 120_000;
/** Timeout for a run. */
export const LONG = 240_000;

/** A code-server process with its own user data. */
export class Editor {
  /** Starts an editor. `machine`: machine settings, `environment`: additional environment variables, `flags`: options of code-server. */
  static async start({ machine = {}, environment = {}, flags = [] } = {}) {
    const home = mkdtempSync(join(tmpdir(), "mtmc-e2e-"));
    const editor = new Editor(home);
    for (const folder of ["data/Machine", "data/User", "ext"]) mkdirSync(join(home, folder), { recursive: true });
    writeFileSync(join(home, "data/Machine/settings.json"), JSON.stringify(machine));
    writeFileSync(join(home, "data/User/settings.json"), JSON.stringify(USER_SETTINGS));
    const own = ["--user-data-dir", join(home, "data"), "--extensions-dir", join(home, "ext")];
    const env = { ...process.env, XDG_STATE_HOME: join(home, "state"), XDG_CONFIG_HOME: join(home, "config"), ...environment };
    const installed = spawnSync(process.execPath, [ENTRY, ...own, "--install-extension", join(HERE, "../mtmc.vsix")], { env, encoding: "utf8" });
    assert.match(installed.stdout, /successfully installed/, installed.stderr);
    editor.address = `127.0.0.1:${await freePort()}`;
    const quiet = ["--auth", "none", "--disable-telemetry", "--disable-update-check"];
    editor.process = spawn(process.execPath, [ENTRY, ...own, "--bind-addr", editor.address, ...quiet, ...flags], { env, stdio: "ignore", detached: true });
    await until("the editor's server answers", async () => (await fetch(`http://${editor.address}/healthz`)).ok);
    editor.browser = await chromium.launch({ executablePath: CHROMIUM, args: BROWSER, timeout: TIMEOUT_MS });
    return editor;
  }

  constructor(home) {
    this.home = home;
  }

  /** Creates a folder with files. */
  folder(name, files) {
    const path = join(this.home, name);
    mkdirSync(path, { recursive: true });
    for (const [file, text] of Object.entries(files)) writeFileSync(join(path, file), text);
    return path;
  }

  /** Opens a window on a folder or a workspace file, optionally with an open file. */
  async open(path, file) {
    const context = await this.browser.newContext({ viewport: { width: 1440, height: 900 }, colorScheme: "light", permissions: ["clipboard-read", "clipboard-write"] });
    await context.addInitScript(NO_ANIMATIONS);
    const page = await context.newPage();
    page.setDefaultTimeout(TIMEOUT_MS);
    const payload = file === undefined ? "" : `&payload=${encodeURIComponent(JSON.stringify([["openFile", `vscode-remote://${this.address}${file}`]]))}`;
    const kind = path.endsWith(".code-workspace") ? "workspace" : "folder";
    await page.goto(`http://${this.address}/?${kind}=${path}${payload}`);
    await page.locator(".monaco-workbench .part.editor").waitFor();
    // code-server 4.100.3 sometimes opens a workspace without its folders; a reload fixes that.
    if (kind === "workspace") {
      const folder = page.locator(".explorer-folders-view .monaco-list-row[aria-level='1']").first();
      await retry((patience) => folder.waitFor({ timeout: 4 * patience }), () => page.reload());
    }
    return new Window(page, this);
  }

  /** Kills the language server of a window, and waits for the message and for the next server. */
  async killServer(w, message) {
    // Directly after a fork, a child process still has the command line of the server.
    await until("one server runs", async () => this.languageServers().length === 1);
    const [server] = this.languageServers();
    process.kill(server, "SIGKILL");
    await w.message(message);
    await until("another server runs", async () => this.languageServers().length === 1 && this.languageServers()[0] !== server);
    await w.ready();
  }

  /** Process ids of the language servers of this editor. */
  languageServers() {
    return readdirSync("/proc").filter((name) => {
      try {
        const isOwn = readlinkSync(`/proc/${name}/cwd`).startsWith(join(this.home, "data"));
        return isOwn && readFileSync(`/proc/${name}/cmdline`, "utf8").includes("mtmc_lsp.server.app");
      } catch {
        // Not a process, or it has ended.
        return false;
      }
    }).map(Number);
  }

  /** The last lines in the logs of the extension and its server. */
  log(lines = 100) {
    const folder = join(this.home, "data/logs");
    const files = readdirSync(folder, { recursive: true }).filter((name) => name.endsWith("MTMC.log"));
    return files.map((name) => readFileSync(join(folder, name), "utf8").split("\n").slice(-lines).join("\n")).join("\n");
  }

  async stop() {
    await this.browser?.close();
    // Signal the process group: code-server has child processes, which start the language server.
    if (this.process !== undefined) {
      const group = -this.process.pid;
      process.kill(group, "SIGTERM");
      await until("the editor's processes have ended", async () => !exists(group)).catch(() => process.kill(group, "SIGKILL"));
    }
    // Processes outside the group may still write to their log.
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

  /** The lenses of a pending step above its function, by the start of their text (`1/3 `). */
  thread(text) {
    return this.page.locator(".codelens-decoration", { hasText: text }).first();
  }

  /** A command in the lenses of a pending step. */
  button(text, name) {
    return this.thread(text).locator("a", { hasText: new RegExp(`^${name}`) }).first();
  }

  /** A command above the review page; its lenses are the last ones of the window. */
  pageButton(name) {
    return this.page.locator(".codelens-decoration", { hasText: "Show all lines" }).locator("a", { hasText: new RegExp(`^${name}`) }).first();
  }

  /** The text of the review page, once it contains `text`. */
  async reviewPage(text) {
    const lines = this.page.locator(".editor-instance[aria-label^='Review of'] .view-line, .editor-instance:has([aria-label^='Review of']) .view-line");
    await lines.filter({ hasText: text }).first().waitFor();
    return (await lines.allInnerTexts()).join("\n").replaceAll("\u00a0", " ");
  }

  /** A row of the MTMC view that contains all given texts. */
  row(...text) {
    const rows = this.page.locator(".pane-body .monaco-list-row");
    return text.reduce((found, one) => found.filter({ hasText: one }), rows).first();
  }

  /** The row of the step that an active run tries now, by its stage. */
  trial(stage) {
    return this.page.locator(".pane-body .monaco-list-row", { has: this.page.locator(".codicon-loading") }).filter({ hasText: stage }).first();
  }

  /** A visible message, as a toast or in the notification centre. */
  seen(text) {
    return this.page.locator(".notification-list-item:visible", { hasText: text }).first();
  }

  /** Waits for a message. Toasts disappear after a while, so also opens the notification centre, which lists all open messages. */
  async message(text) {
    await retry((patience) => this.seen(text).waitFor({ timeout: 5 * patience }), () => this.listMessages());
  }

  /** Clicks a button of a message. */
  async answer(text, button) {
    this.clicks += 1;
    const choice = this.seen(text).locator(".monaco-button", { hasText: button }).first();
    await retry((patience) => choice.click({ timeout: 5 * patience }), () => this.listMessages());
    await this.hideMessages();
  }

  async listMessages() {
    await this.command("Notifications: Show Notifications");
  }

  /** Hides the notification centre; it also hides itself when it is empty. */
  async hideMessages() {
    const list = this.page.locator(".notifications-center.visible");
    await until("the list of messages is hidden", async () => {
      if (await list.isVisible()) await list.locator(".codicon-notifications-hide").click({ timeout: 1000 });
      return !(await list.isVisible());
    });
  }

  line(text) {
    return this.page.locator(".view-line", { hasText: text }).first();
  }

  /** Waits until a line is completely inside its editor and not covered. Returns the pixels from the top of the editor. */
  async visibleAt(text) {
    let place;
    await until(`${text} is visible`, async () => {
      place = await this.line(text).evaluate((line) => {
        const [inner, outer] = [line, line.closest(".editor-instance")].map((element) => element.getBoundingClientRect());
        const shown = document.elementFromPoint(inner.left + 20, inner.top + inner.height / 2);
        const isInside = inner.top >= outer.top && inner.bottom <= Math.min(outer.bottom, window.innerHeight);
        return isInside && line.contains(shown) ? Math.round(inner.top - outer.top) : null;
      }, undefined, { timeout: 1000 });
      return place !== null;
    }, 20_000);
    return place;
  }

  async ready() {
    await until("the language server is ready", async () => /codicon-(zap|shield)/.test(await this.status.innerHTML()));
  }

  /** Runs a command from the palette. The palette does not update while it is open, so it is reopened until it lists the command. */
  async command(title) {
    await this.pick("F1", `>${title}`, title);
  }

  /** Opens a quick pick, types a filter, and chooses an item. */
  async pick(key, text, title) {
    const widget = this.page.locator(".quick-input-widget");
    const input = widget.locator("input").first();
    await retry(async (patience) => {
      await this.page.keyboard.press(key);
      await input.fill(text);
      // Match the complete label: other labels have the same prefix.
      const label = this.page.locator(".label-name", { hasText: new RegExp(`^${title.replace(/[.*+?^${}()|[\]\\]/g, "\\$&")}$`) });
      await this.choose(widget.locator(".monaco-list-row", { has: label }).first(), patience);
    }, () => this.page.keyboard.press("Escape"));
    // The command may open another quick pick in the same place.
    await until(`${title} was chosen`, async () => !(await input.isVisible()) || (await input.inputValue()) !== text);
  }

  /** Chooses a row with the keyboard: lists redraw rows under the mouse, which can lose a click. */
  async choose(row, patience = TIMEOUT_MS) {
    await row.waitFor({ timeout: patience });
    await until("the row is selected", async () => {
      if (/\bfocused\b/.test(await row.getAttribute("class", { timeout: 1000 }))) return true;
      await this.page.keyboard.press("ArrowDown");
      return false;
    }, patience);
    await this.page.keyboard.press("Enter");
  }

  /** Opens the light bulb menu on a line and chooses an item. */
  async lightbulb(line, title) {
    // Click only once: if the menu opens late, a second click would choose an item.
    await this.line(line).click();
    const menu = this.page.locator(".action-widget");
    await retry(async (patience) => {
      await this.page.keyboard.press("Control+.");
      await this.choose(menu.locator(".monaco-list-row", { hasText: title }).first(), 4 * patience);
    }, () => this.page.keyboard.press("Escape"));
    await menu.waitFor({ state: "hidden" });
  }

  /** Presses the key binding of an MTMC command, with the cursor on a line. */
  async keys(line, last) {
    await this.line(line).click();
    await this.page.keyboard.press("Alt+m");
    await this.page.keyboard.press(last);
  }

  /** Titles that the palette lists for a filter. */
  async commands(text) {
    const rows = this.page.locator(".quick-input-list .monaco-list-row");
    await this.page.keyboard.press("F1");
    const input = this.page.locator(".quick-input-widget input").first();
    await input.fill(`>${text}`);
    await rows.first().waitFor();
    const titles = await rows.locator(".label-name").allInnerTexts();
    await this.page.keyboard.press("Escape");
    await input.waitFor({ state: "hidden" });
    return titles;
  }

  /** Clicks, and returns the milliseconds from the click until the lenses of the window match `pattern`, as the page sees both. */
  async timedClick(locator, pattern) {
    await locator.waitFor();
    await this.page.evaluate(([source, milliseconds]) => {
      const isShown = () => [...document.querySelectorAll(".codelens-decoration")].some(({ textContent }) => new RegExp(source).test(textContent));
      window.mtmcClickToLens = new Promise((resolve, reject) => {
        setTimeout(() => { reject(new Error(`no lens shows ${source}`)); }, milliseconds);
        document.addEventListener("mousedown", () => {
          const clicked = performance.now();
          const observer = new MutationObserver(() => {
            if (!isShown()) return;
            observer.disconnect();
            resolve(performance.now() - clicked);
          });
          observer.observe(document.body, { subtree: true, childList: true, characterData: true });
        }, { capture: true, once: true });
      });
      window.mtmcClickToLens.catch(() => undefined);
    }, [pattern.source, TIMEOUT_MS]);
    await locator.click();
    return this.page.evaluate(() => window.mtmcClickToLens);
  }

  /** Clicks and counts the click. */
  async click(locator) {
    this.clicks += 1;
    await locator.click();
  }

  /** Opens a file, not a diff editor whose name has the same prefix. */
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

  /** Texts of all open messages. */
  async messages() {
    await this.listMessages();
    const list = this.page.locator(".notifications-center.visible");
    await list.waitFor();
    const texts = await list.locator(".notification-list-item-message").allInnerTexts();
    await this.hideMessages();
    return texts;
  }

  /** The frame of the report, once its document matches `pattern`. */
  async report(pattern) {
    return this.frame("#report", pattern);
  }

  /** The frame in which an element matches `pattern`. (VS Code replaces frames while it loads them.) */
  async frame(element, pattern) {
    let found;
    await until(`a frame matches ${pattern}`, async () => {
      for (const frame of this.page.frames().filter((one) => one !== this.page.mainFrame())) {
        const text = await frame.evaluate(`document.querySelector("${element}")?.innerText ?? ""`).catch(() => "");
        if (pattern.test(text)) found = frame;
      }
      return found !== undefined;
    });
    return found;
  }

  /** Takes screenshots of the window in the light and in the dark theme. */
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

/** Retries with increasing timeouts: short at first for fast machines. Calls `undo` after each failure. */
export async function retry(act, undo) {
  let patience = 1000;
  for (;;) {
    try {
      return await act(patience);
    } catch (error) {
      if (patience > TIMEOUT_MS / 2) throw error;
      patience *= 2;
      await undo();
    }
  }
}

/** Waits until a condition holds. */
export async function until(what, holds, milliseconds = TIMEOUT_MS) {
  const end = Date.now() + milliseconds;
  for (;;) {
    if (await holds().catch(() => false)) return;
    if (Date.now() > end) throw new Error(`timeout: ${what}`);
    await new Promise((done) => setTimeout(done, 100));
  }
}

/** Whether a process, or any process of a group, exists. */
function exists(pid) {
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
