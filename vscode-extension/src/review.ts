/** Shows the selected pending step beside its function: a page with its kernels, and commands in words in the title bar. */

import * as vscode from "vscode";
import { isSearch, neighbour, pendingText, selectedStep, type Argument, type Review } from "./core/model";
import { page, type Page } from "./core/page";
import { stepOf } from "./diff";
import type { Server } from "./server";
import type { Runs } from "./state";

/** URI scheme of review pages. A page stays open from step to step, so its URI names only the function. */
export const REVIEW_SCHEME = "mtmc-review";

/** Key of the stored list of functions with an open page. VS Code does not reopen pages after a window reload. */
const OPEN_PAGES = "openPages";

/** The function of a review page; undefined for other documents. */
export function targetOf(uri: vscode.Uri | undefined): Argument | undefined {
  return uri?.scheme === REVIEW_SCHEME ? (JSON.parse(uri.query) as Argument) : undefined;
}

function uriOf({ uri, target }: Argument): vscode.Uri {
  return vscode.Uri.from({ scheme: REVIEW_SCHEME, path: `/Review of ${target}`, query: JSON.stringify({ uri, target }) });
}

function keyOf({ uri, target }: Argument): string {
  return `${uri}#${target}`;
}

/** Provides, opens, updates and closes review pages; marks files with pending steps; sets context keys for `when` clauses. */
export class ReviewPages implements vscode.TextDocumentContentProvider, vscode.CodeLensProvider, vscode.FileDecorationProvider, vscode.Disposable {
  private readonly added = vscode.window.createTextEditorDecorationType({
    isWholeLine: true,
    backgroundColor: new vscode.ThemeColor("diffEditor.insertedLineBackground"),
    overviewRulerColor: new vscode.ThemeColor("editorOverviewRuler.addedForeground"),
  });
  private readonly notes = vscode.window.createTextEditorDecorationType({ color: new vscode.ThemeColor("foreground") });
  private readonly changed = new vscode.EventEmitter<vscode.Uri>();
  private readonly marksChanged = new vscode.EventEmitter<undefined>();
  private readonly lensesChanged = new vscode.EventEmitter<void>();
  readonly onDidChangeCodeLenses = this.lensesChanged.event;
  readonly onDidChange = this.changed.event;
  readonly onDidChangeFileDecorations = this.marksChanged.event;
  private readonly pages = new Map<string, Page>();
  /** What each open page shows. */
  private readonly shown = new Map<string, string>();
  /** Functions that a run of this window has searched, and whose first pending step was not shown yet. */
  private readonly searched = new Set<string>();
  private readonly whole = new Set<string>();
  /** Number of kept steps of each review when it was last seen. */
  private readonly kept = new Map<string, number>();
  /** Functions whose page was open before the window was reloaded. */
  private readonly reopened: Set<string>;
  private readonly subscriptions: vscode.Disposable[];

  constructor(
    private readonly runs: Runs,
    private readonly server: Server,
    private readonly storage: vscode.Memento,
  ) {
    this.reopened = new Set(storage.get<string[]>(OPEN_PAGES, []));
    this.subscriptions = [
      vscode.window.tabGroups.onDidChangeTabs(() => {
        if (this.reopened.size === 0) void this.storage.update(OPEN_PAGES, this.openPages().map(keyOf));
      }),
      vscode.workspace.registerTextDocumentContentProvider(REVIEW_SCHEME, this),
      vscode.languages.registerCodeLensProvider({ scheme: REVIEW_SCHEME }, this),
      vscode.window.registerFileDecorationProvider(this),
      runs.onChange(() => {
        this.update();
      }),
      server.onJob((job) => {
        if (isSearch(job) && job.state === "running") this.searched.add(keyOf(job));
      }),
      vscode.window.onDidChangeVisibleTextEditors(() => {
        this.draw();
      }),
      vscode.window.onDidChangeActiveTextEditor(() => {
        this.updateContexts();
      }),
      // Also for pages that VS Code reopens after a reload.
      vscode.workspace.onDidOpenTextDocument((document) => {
        if (document.uri.scheme === REVIEW_SCHEME && document.languageId !== "python") void vscode.languages.setTextDocumentLanguage(document, "python");
      }),
      vscode.workspace.onDidChangeTextDocument(({ document }) => {
        if (document.uri.scheme === REVIEW_SCHEME) this.draw();
      }),
      this.added,
      this.notes,
      this.changed,
      this.marksChanged,
      this.lensesChanged,
    ];
  }

  private reviewOf(of: Argument): Review | undefined {
    return this.runs.reviews.find((review) => keyOf(review) === keyOf(of));
  }

  async provideTextDocumentContent(uri: vscode.Uri): Promise<string> {
    const of = targetOf(uri);
    const review = of === undefined ? undefined : this.reviewOf(of);
    const step = review === undefined ? undefined : selectedStep(review);
    // After a reload, the runs are loaded later, and the page is provided again.
    if (of !== undefined) this.shown.set(keyOf(of), review === undefined ? "" : stateOf(review));
    if (review === undefined || step === undefined) return "# No step is pending.\n";
    const texts = await this.server.step({ uri: review.uri, target: review.target, step: step.index });
    const made = page(step, texts?.after ?? "", review.target, this.whole.has(keyOf(review)));
    this.pages.set(keyOf(review), made);
    return made.text;
  }

  /** The commands in words above the page; VS Code hides the title bar's commands while another editor has the focus. */
  provideCodeLenses(document: vscode.TextDocument): vscode.CodeLens[] {
    const of = targetOf(document.uri);
    const review = of === undefined ? undefined : this.reviewOf(of);
    const step = review === undefined ? undefined : selectedStep(review);
    if (review === undefined || step === undefined) return [];
    const { uri, target } = review;
    const count = review.pending.indexOf(step.index) + 1;
    const titles: [string, string][] = [[count > 1 ? `Keep these ${count}` : "Keep", "keep"]];
    if (!review.isActive) titles.push(["Discard", "discard"], ["Retry", "tryAnother"]);
    titles.push(["Diff", "diff"]);
    if (neighbour(review, false) !== undefined) titles.push(["Previous", "previousPending"]);
    if (neighbour(review, true) !== undefined) titles.push(["Next", "nextPending"], [`Keep all ${review.pending.length}`, "keepAll"]);
    titles.push([step.reviewed ? "✓ Reviewed" : "Mark reviewed", "markReviewed"]);
    titles.push([this.whole.has(keyOf(review)) ? "Fold" : "Show all lines", "showAllLines"]);
    const range = new vscode.Range(0, 0, 0, 0);
    return titles.map(([title, name]) => new vscode.CodeLens(range, { title, command: `mtmc.${name}`, arguments: [{ uri, target, step: step.index }] }));
  }

  /** A badge in the explorer and on the tab of each file with pending steps. */
  provideFileDecoration(uri: vscode.Uri): vscode.FileDecoration | undefined {
    const here = this.runs.reviews.filter((review) => review.uri === uri.toString() && !review.stale);
    const count = here.reduce((sum, review) => sum + review.pending.length, 0);
    return count === 0 ? undefined : new vscode.FileDecoration(String(Math.min(count, 99)), `MTMC: ${pendingText(count)}`);
  }

  /** Opens the page of a function beside it, or shows the step that is selected now. */
  async open(of: Argument, preserveFocus: boolean): Promise<void> {
    const review = this.reviewOf(of);
    if (review === undefined || selectedStep(review) === undefined) return;
    const file = vscode.window.visibleTextEditors.find(({ document }) => document.uri.toString() === review.uri);
    const viewColumn = file?.viewColumn === vscode.ViewColumn.One ? vscode.ViewColumn.Two : vscode.ViewColumn.Beside;
    const before = this.shown.get(keyOf(review));
    this.shown.set(keyOf(review), stateOf(review));
    if (before !== undefined && before !== stateOf(review)) this.changed.fire(uriOf(review));
    await this.closePages((other) => keyOf(other) !== keyOf(review));
    await vscode.window.showTextDocument(uriOf(review), { viewColumn, preserveFocus, preview: false });
    keepVisible(review);
  }

  /** Shows all lines of a page, or folds everything except its kernels. */
  toggle(of: Argument): void {
    if (!this.whole.delete(keyOf(of))) this.whole.add(keyOf(of));
    this.changed.fire(uriOf(of));
  }

  private update(): void {
    for (const review of this.runs.reviews) {
      const key = keyOf(review);
      const isPending = selectedStep(review) !== undefined && !review.stale;
      if (isPending && this.searched.delete(key)) this.openAfterRun(review);
      if (isPending && this.reopened.delete(key)) this.reopen(review);
      if (isPending && this.shown.has(key) && this.shown.get(key) !== stateOf(review)) {
        this.shown.set(key, stateOf(review));
        this.changed.fire(uriOf(review));
      }
      const kept = this.kept.get(key);
      if (kept !== undefined && kept !== review.kept.length) keepVisible(review);
      this.kept.set(key, review.kept.length);
    }
    void this.closePages((review) => selectedStep(review) === undefined || review.stale);
    this.marksChanged.fire(undefined);
    this.lensesChanged.fire();
    this.updateContexts();
  }

  /** The functions with an open page. */
  private openPages(): Argument[] {
    const tabs = vscode.window.tabGroups.all.flatMap((group) => group.tabs);
    return tabs.flatMap((tab) => (tab.input instanceof vscode.TabInputText ? (targetOf(tab.input.uri) ?? []) : []));
  }

  /** Opens the page of a function again that was open before the window was reloaded, if the function is still visible. */
  private reopen(review: Review): void {
    const isOpen = this.openPages().some((of) => keyOf(of) === keyOf(review));
    if (!isOpen && isShown(review)) void this.open(review, true);
  }

  private openAfterRun(review: Review): void {
    const setting = vscode.workspace.getConfiguration("mtmc").get<string>("review", "beside");
    if (isShown(review) && setting === "beside") void this.open(review, true);
  }

  /** Closes the pages of some functions. */
  private async closePages(isWanted: (review: Review) => boolean): Promise<void> {
    const tabs = vscode.window.tabGroups.all.flatMap((group) => group.tabs);
    for (const tab of tabs) {
      const of = tab.input instanceof vscode.TabInputText ? targetOf(tab.input.uri) : undefined;
      const review = of === undefined ? undefined : this.reviewOf(of);
      if (review === undefined || !isWanted(review)) continue;
      this.shown.delete(keyOf(review));
      await vscode.window.tabGroups.close(tab, true);
    }
  }

  private draw(): void {
    for (const editor of vscode.window.visibleTextEditors) {
      const of = targetOf(editor.document.uri);
      const made = of === undefined ? undefined : this.pages.get(keyOf(of));
      if (made?.text !== editor.document.getText()) continue;
      const whole = ({ first, last }: { first: number; last: number }): vscode.Range => new vscode.Range(first, 0, last, 0);
      editor.setDecorations(this.added, made.added.map(whole));
      editor.setDecorations(this.notes, made.notes.map((line) => editor.document.lineAt(line).range));
    }
  }

  private updateContexts(): void {
    const document = vscode.window.activeTextEditor?.document.uri;
    const uri = (targetOf(document) ?? stepOf(document))?.uri ?? document?.toString();
    const here = this.runs.reviews.filter((review) => review.uri === uri);
    const isPending = (review: Review): boolean => review.pending.length > 0 && !review.stale;
    const contexts = {
      hasReview: here.length > 0,
      hasPending: here.some(isPending),
      hasKept: here.some((review) => review.kept.length > 0),
      anyPending: this.runs.reviews.some(isPending),
      running: this.runs.activeJobs.length > 0,
    };
    for (const [name, value] of Object.entries(contexts)) {
      void vscode.commands.executeCommand("setContext", `mtmc.${name}`, value);
    }
  }

  dispose(): void {
    for (const subscription of this.subscriptions) subscription.dispose();
  }
}

/** Whether an editor shows the file of a review. */
function isShown(review: Review): boolean {
  return vscode.window.visibleTextEditors.some(({ document }) => document.uri.toString() === review.uri);
}

/** Identifies what a page shows. */
function stateOf(review: Review): string {
  const step = selectedStep(review);
  return [review.run.run, step?.index, step?.position, step?.numbers, step?.reviewed].join("#");
}

/** Keeps the function on the screen: keeping or undoing a step moves it, and undo in the editor scrolls to the end of a line. */
function keepVisible(review: Review): void {
  const editor = vscode.window.visibleTextEditors.find(({ document }) => document.uri.toString() === review.uri);
  // For a range of two lines, VS Code also scrolls to the first column.
  editor?.revealRange(new vscode.Range(review.line, 0, review.line + 1, 0), vscode.TextEditorRevealType.InCenterIfOutsideViewport);
}
