/** The report panel. */

import { randomBytes } from "node:crypto";
import * as vscode from "vscode";
import type { Review } from "./core/model";
import { reportHtml } from "./core/report";
import type { Runs } from "./state";

/** One panel, which follows the run it shows. */
export class Report implements vscode.Disposable {
  private panel: vscode.WebviewPanel | undefined;
  private shown: { uri: string; target: string } | undefined;
  private drawn = "";
  private readonly subscription: vscode.Disposable;

  constructor(private readonly runs: Runs) {
    this.subscription = runs.onChange(() => {
      this.draw();
    });
  }

  /** Shows a run, beside the editor. */
  show(review: Review): void {
    this.shown = { uri: review.uri, target: review.target };
    if (this.panel === undefined) {
      this.panel = vscode.window.createWebviewPanel("mtmc.report", "", vscode.ViewColumn.Beside, { enableScripts: false });
      this.panel.onDidDispose(() => {
        this.panel = undefined;
        this.drawn = "";
      });
    } else {
      this.panel.reveal();
    }
    this.draw();
  }

  /** Writes a run's report to a file that the user chooses. */
  async export(review: Review): Promise<void> {
    const defaultUri = vscode.Uri.parse(review.uri).with({ path: vscode.Uri.parse(review.uri).path.replace(/\.py$/, `-${review.target}.html`) });
    const uri = await vscode.window.showSaveDialog({ defaultUri, filters: { HTML: ["html"] } });
    if (uri !== undefined) await vscode.workspace.fs.writeFile(uri, Buffer.from(page(review)));
  }

  private draw(): void {
    const shown = this.shown;
    const review = this.runs.reviews.find((one) => one.uri === shown?.uri && one.target === shown.target);
    if (this.panel === undefined || review === undefined) return;
    // What is folded open closes when the page is set anew, so it is only where there is news.
    const state = JSON.stringify({ ...review, version: 0, line: 0, changes: [] });
    if (state === this.drawn) return;
    this.drawn = state;
    this.panel.title = `${review.target}: report`;
    this.panel.webview.html = page(review);
  }

  dispose(): void {
    this.subscription.dispose();
    this.panel?.dispose();
  }
}

function page(review: Review): string {
  return reportHtml(review, randomBytes(16).toString("base64"));
}
