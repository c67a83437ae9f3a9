/** The report panel. */

import { randomBytes } from "node:crypto";
import * as vscode from "vscode";
import { exported, readShown, shell, type FromPanel, type ReportPage, type Shown, type ToPanel } from "./core/panel";
import type { Server } from "./server";
import type { Runs } from "./state";

const KIND = "mtmc.report";
const DRAW_MS = 30_000;

/** The report panel. It updates when its run changes. */
export class Report implements vscode.Disposable, vscode.WebviewPanelSerializer {
  private panel: vscode.WebviewPanel | undefined;
  private shown: Shown | undefined;
  private page: ReportPage | undefined;
  private ready = false;
  private readonly messages = new vscode.EventEmitter<FromPanel>();
  private readonly subscriptions: vscode.Disposable[];

  constructor(
    private readonly folder: vscode.Uri,
    private readonly server: Server,
    runs: Runs,
  ) {
    const refresh = (): void => {
      this.follow();
    };
    this.subscriptions = [runs.onChange(refresh), vscode.window.registerWebviewPanelSerializer(KIND, this), this.messages];
  }

  /** Shows the report of a run next to the editor. */
  async show(shown: Shown): Promise<void> {
    this.shown = shown;
    if (this.panel === undefined) {
      const options = { enableScripts: true, localResourceRoots: [this.folder], enableFindWidget: true };
      this.attach(vscode.window.createWebviewPanel(KIND, `${shown.target}: report`, vscode.ViewColumn.Beside, options));
    } else {
      this.panel.reveal();
    }
    await this.refresh();
  }

  /** Restores the panel after a window reload. */
  async deserializeWebviewPanel(panel: vscode.WebviewPanel, state: unknown): Promise<void> {
    this.shown = readShown(state);
    if (this.shown === undefined || this.panel !== undefined) {
      panel.dispose();
      return;
    }
    panel.webview.options = { enableScripts: true, localResourceRoots: [this.folder] };
    this.attach(panel);
    // The server loads the runs of a file when it is opened.
    await vscode.workspace.openTextDocument(vscode.Uri.parse(this.shown.uri));
  }

  private attach(panel: vscode.WebviewPanel): void {
    this.panel = panel;
    this.ready = false;
    this.page = undefined;
    panel.onDidDispose(() => {
      this.panel = undefined;
      this.page = undefined;
    });
    panel.webview.onDidReceiveMessage((message: FromPanel) => {
      if (message.kind === "failed") this.server.log.error(`the report: ${message.reason}`);
      // The panel also sends `ready` after it was hidden; then everything is drawn again.
      if (message.kind === "ready") {
        this.ready = true;
        this.draw();
      }
      this.messages.fire(message);
    });
    this.follow();
  }

  /** Refreshes the panel. Errors are only logged: a server exit is reported elsewhere, and a new server triggers a refresh. */
  private follow(): void {
    this.refresh().catch((error: unknown) => {
      this.server.log.warn(String(error));
    });
  }

  private async refresh(): Promise<void> {
    const { shown, panel } = this;
    if (shown === undefined || panel === undefined) return;
    const page = await this.server.report(shown);
    if (page === undefined || this.shown !== shown || JSON.stringify(page) === JSON.stringify(this.page)) return;
    const isFirst = this.page === undefined;
    this.page = page;
    panel.title = `${shown.target}: report`;
    if (isFirst) {
      const script = panel.webview.asWebviewUri(vscode.Uri.joinPath(this.folder, "report.js")).toString();
      panel.webview.html = shell(page.style, script, panel.webview.cspSource, randomBytes(16).toString("base64"));
    } else {
      this.draw();
    }
  }

  private draw(): void {
    if (this.ready && this.page !== undefined && this.shown !== undefined) {
      this.post({ kind: "page", page: this.page, state: this.shown });
    }
  }

  private post(message: ToPanel): void {
    void this.panel?.webview.postMessage(message);
  }

  /** Exports the report to a file that the user chooses. */
  async export(shown: Shown, format: "html" | "png"): Promise<void> {
    if (this.page === undefined || this.shown?.target !== shown.target || this.shown.uri !== shown.uri || this.shown.run !== shown.run) {
      const drawn = this.next("drawn");
      await this.show(shown);
      await drawn;
    }
    const answer = this.next(format);
    this.post({ kind: format === "html" ? "askHtml" : "askPng" });
    const message = await answer;
    const page = this.page;
    if (page === undefined) return;
    const content = message.kind === "png" ? Buffer.from(message.data, "base64") : message.kind === "html" ? Buffer.from(exported(page, message.body)) : undefined;
    const file = vscode.Uri.parse(shown.uri);
    const defaultUri = file.with({ path: file.path.replace(/\.py$/, `-${shown.target}.${format}`) });
    const uri = await vscode.window.showSaveDialog({ defaultUri, filters: format === "html" ? { HTML: ["html"] } : { PNG: ["png"] } });
    if (uri !== undefined && content !== undefined) await vscode.workspace.fs.writeFile(uri, content);
  }

  /** The next message of a kind from the panel. */
  private async next(kind: FromPanel["kind"]): Promise<FromPanel> {
    return new Promise((resolve, reject) => {
      const end = (act: () => void): void => {
        clearTimeout(timer);
        subscription.dispose();
        act();
      };
      const timer = setTimeout(() => {
        end(() => { reject(new Error("the report could not be drawn; see the log")); });
      }, DRAW_MS);
      const subscription = this.messages.event((message) => {
        if (message.kind === kind) end(() => { resolve(message); });
        if (message.kind === "failed") end(() => { reject(new Error(message.reason)); });
      });
    });
  }

  dispose(): void {
    for (const subscription of this.subscriptions) subscription.dispose();
    this.panel?.dispose();
  }
}
