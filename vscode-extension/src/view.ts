/** The MTMC view and the status bar item. */

import * as vscode from "vscode";
import { deviceOf, deviceText, pendingText } from "./core/model";
import { progress, rows, type Row } from "./core/tree";
import type { Server } from "./server";
import type { Runs } from "./state";

/** The tree of runs. */
export class RunsView implements vscode.TreeDataProvider<Row>, vscode.Disposable {
  private readonly changed = new vscode.EventEmitter<undefined>();
  readonly onDidChangeTreeData = this.changed.event;
  private readonly view: vscode.TreeView<Row>;
  private readonly subscription: vscode.Disposable;

  constructor(private readonly runs: Runs) {
    this.view = vscode.window.createTreeView("mtmc.runs", { treeDataProvider: this, showCollapseAll: true });
    this.subscription = runs.onChange(() => {
      this.changed.fire(undefined);
      const count = runs.pendingCount;
      this.view.badge = count === 0 ? undefined : { value: count, tooltip: pendingText(count) };
    });
  }

  getChildren(row?: Row): Row[] {
    return row === undefined ? rows(this.runs.reviews, this.runs.activeJobs, this.runs.plans, this.runs.past, this.runs.failed) : [...row.children];
  }

  getTreeItem(row: Row): vscode.TreeItem {
    const { None, Collapsed, Expanded } = vscode.TreeItemCollapsibleState;
    const state = row.children.length === 0 ? None : row.isFolded === true ? Collapsed : Expanded;
    const item = new vscode.TreeItem(row.label, state);
    item.id = row.id;
    item.description = row.description;
    item.tooltip = row.tooltip;
    if (row.spoken !== undefined) item.accessibilityInformation = { label: row.spoken };
    item.contextValue = row.context;
    if (row.icon !== "") item.iconPath = new vscode.ThemeIcon(row.icon, row.colour === undefined ? undefined : new vscode.ThemeColor(row.colour));
    if (row.context.startsWith("step-") && row.context !== "step-stale") {
      item.command = { command: row.context.startsWith("step-pending") ? "mtmc.reviewStep" : "mtmc.diff", title: "Review", arguments: [row.argument] };
    } else if (row.context === "past") {
      item.command = { command: "mtmc.report", title: "Show the report", arguments: [row.argument] };
    } else if (row.context === "failure-help") {
      item.command = { command: "mtmc.help", title: row.label, arguments: [row.argument] };
    } else if (row.children.length === 0) {
      item.command = { command: "mtmc.reveal", title: "Go to the function", arguments: [row.argument] };
    }
    return item;
  }

  dispose(): void {
    this.subscription.dispose();
    this.view.dispose();
    this.changed.dispose();
  }
}

/** Status bar item with the server state, the device and the active run. */
export class Status implements vscode.Disposable {
  private readonly item = vscode.window.createStatusBarItem("mtmc.status", vscode.StatusBarAlignment.Left, 0);
  private readonly subscriptions: vscode.Disposable[];
  private timer: NodeJS.Timeout | undefined;

  constructor(
    private readonly server: Server,
    private readonly runs: Runs,
  ) {
    this.item.name = "MTMC";
    this.item.command = "mtmc.menu";
    const show = (): void => {
      this.show();
    };
    this.subscriptions = [server.onState(show), runs.onChange(show), vscode.workspace.onDidGrantWorkspaceTrust(show), this.item];
    this.show();
    this.item.show();
  }

  private show(): void {
    const job = this.runs.activeJobs[0];
    clearTimeout(this.timer);
    // The time goes on while nothing else changes.
    if (job !== undefined) this.timer = setTimeout(() => { this.show(); }, 1000);
    else this.item.accessibilityInformation = undefined;
    const newest = [...this.runs.reviews].sort((a, b) => b.run.started - a.run.started)[0];
    const { gpu } = this.runs;
    const device = gpu === undefined ? deviceOf(newest?.run) : deviceText(gpu);
    this.item.backgroundColor = undefined;
    if (this.server.state === "failed") {
      this.item.text = "$(error) MTMC";
      this.item.tooltip = "The language server is not running. Click to show actions.";
      this.item.backgroundColor = new vscode.ThemeColor("statusBarItem.errorBackground");
    } else if (this.server.state !== "ready") {
      const { state } = this.server;
      this.item.text = state === "stopped" ? "$(circle-slash) MTMC" : `$(sync~spin) MTMC: ${state}`;
      this.item.tooltip = state === "stopped" ? "The language server is stopped." : `The language server is ${state}.`;
    } else if (job !== undefined) {
      const seconds = Math.round((Date.now() - this.runs.began(job)) / 1000);
      const parts = [job.target, job.step > 0 ? `step ${job.step}: ${job.stage}` : job.stage, job.summary, `${seconds} s`];
      this.item.text = `$(sync~spin) MTMC: ${parts.filter((part) => part !== "").join(" · ")}`;
      this.item.tooltip = `${job.target}: ${progress(job)}. Click to cancel.`;
      this.item.accessibilityInformation = { label: `MTMC works on ${job.target}: ${progress(job)}` };
    } else {
      const icon = vscode.workspace.isTrusted ? "$(zap)" : "$(shield)";
      const count = this.runs.pendingCount === 0 ? "" : pendingText(this.runs.pendingCount);
      this.item.text = [`${icon} MTMC`, count, device].filter((part) => part !== "").join(" · ");
      const trust = vscode.workspace.isTrusted ? [] : ["The workspace is not trusted: static checks only."];
      const timed = gpu === undefined ? [] : [gpu === "" ? "Torch finds no usable GPU: steps are verified and compiled, but not timed." : `Steps are timed on ${gpu}.`];
      this.item.tooltip = ["The language server is ready.", ...timed, ...trust].join("\n");
    }
  }

  dispose(): void {
    clearTimeout(this.timer);
    for (const subscription of this.subscriptions) subscription.dispose();
  }
}
