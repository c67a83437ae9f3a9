/** The report panel. */

import { randomBytes } from "node:crypto";
import * as vscode from "vscode";
import { exported, readShown, shell, type FromPanel, type ReportPage, type Shown, type ToPanel } from "./core/panel";
import type { Server } from "./server";
import type { Runs } from "./state";

const KIND = "mtmc.report";
const DRAW_MS = 30_000;

/** One panel, which follows the run it shows. */
export class Report implements vscode.Disposable, vscode.WebviewPanelSerializer {
  private panel: vscode.WebviewPanel | undefined;
  private shown: Shown | undefined;
  private page: ReportPage | undefined;
  private ready = false;
  private readonly said = new vscode.EventEmitter<FromPanel>();
  private readonly subscriptions: vscode.Disposable[];

  constructor(
    private readonly folder: vscode.Uri,
    private readonly server: Server,
    runs: Runs,
  ) {
    const refresh = (): void => {
      this.follow();
    };
    this.subscriptions = [runs.onChange(refresh), vscode.window.registerWebviewPanelSerializer(KIND, this), this.said];
  }

  /** Shows a run, beside the editor. */
  async show(shown: Shown): Promise<void> {
    this.shown = shown;
    if (this.panel === undefined) {
      const own = { enableScripts: true, localResourceRoots: [this.folder], enableFindWidget: true };
      this.take(vscode.window.createWebviewPanel(KIND, `${shown.target}: report`, vscode.ViewColumn.Beside, own));
    } else {
      this.panel.reveal();
    }
    await this.refresh();
  }

  /** VS Code brings a panel back after a reload. */
  async deserializeWebviewPanel(panel: vscode.WebviewPanel, state: unknown): Promise<void> {
    this.shown = readShown(state);
    if (this.shown === undefined || this.panel !== undefined) {
      panel.dispose();
      return;
    }
    panel.webview.options = { enableScripts: true, localResourceRoots: [this.folder] };
    this.take(panel);
    // The server knows a file's runs once it is open.
    await vscode.workspace.openTextDocument(vscode.Uri.parse(this.shown.uri));
  }

  private take(panel: vscode.WebviewPanel): void {
    this.panel = panel;
    this.ready = false;
    this.page = undefined;
    panel.onDidDispose(() => {
      this.panel = undefined;
      this.page = undefined;
    });
    panel.webview.onDidReceiveMessage((message: FromPanel) => {
      if (message.kind === "failed") this.server.log.error(`the report: ${message.reason}`);
      // It asks anew when it was hidden, too: then all of it is drawn again.
      if (message.kind === "ready") {
        this.ready = true;
        this.draw();
      }
      this.said.fire(message);
    });
    this.follow();
  }

  /** Refreshes what is shown; where the server ends meanwhile, that is told elsewhere, and the next one is asked anew. */
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
      this.tell({ kind: "page", page: this.page, state: this.shown });
    }
  }

  private tell(message: ToPanel): void {
    void this.panel?.webview.postMessage(message);
  }

  /** Writes the report that is shown to a file that the user chooses. */
  async export(shown: Shown, form: "html" | "png"): Promise<void> {
    if (this.page === undefined || this.shown?.target !== shown.target || this.shown.uri !== shown.uri || this.shown.run !== shown.run) {
      const drawn = this.next("drawn");
      await this.show(shown);
      await drawn;
    }
    const answer = this.next(form);
    this.tell({ kind: form === "html" ? "askHtml" : "askPng" });
    const message = await answer;
    const page = this.page;
    if (page === undefined) return;
    const content = message.kind === "png" ? Buffer.from(message.data, "base64") : message.kind === "html" ? Buffer.from(exported(page, message.body)) : undefined;
    const file = vscode.Uri.parse(shown.uri);
    const defaultUri = file.with({ path: file.path.replace(/\.py$/, `-${shown.target}.${form}`) });
    const uri = await vscode.window.showSaveDialog({ defaultUri, filters: form === "html" ? { HTML: ["html"] } : { PNG: ["png"] } });
    if (uri !== undefined && content !== undefined) await vscode.workspace.fs.writeFile(uri, content);
  }

  /** The panel's next message of a kind. */
  private async next(kind: FromPanel["kind"]): Promise<FromPanel> {
    return new Promise((resolve, reject) => {
      const end = (act: () => void): void => {
        clearTimeout(timer);
        waiting.dispose();
        act();
      };
      const timer = setTimeout(() => {
        end(() => { reject(new Error("the report could not be drawn; see the log")); });
      }, DRAW_MS);
      const waiting = this.said.event((message) => {
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
