/** Shows the next pending step in the editor: highlighted lines, and a thread with its diff above the function. */

import * as vscode from "vscode";
import { body, draw, fenced, title } from "./core/drawing";
import { nextStep, type Argument, type Review } from "./core/model";
import type { Runs } from "./state";

/** Draws pending steps and sets context keys for `when` clauses. */
export class ReviewDrawer implements vscode.Disposable {
  private readonly removed = vscode.window.createTextEditorDecorationType({
    isWholeLine: true,
    backgroundColor: new vscode.ThemeColor("diffEditor.removedLineBackground"),
    overviewRulerColor: new vscode.ThemeColor("editorOverviewRuler.deletedForeground"),
  });
  private readonly added = vscode.window.createTextEditorDecorationType({
    after: {
      margin: "0 0 0 2em",
      color: new vscode.ThemeColor("gitDecoration.addedResourceForeground"),
      backgroundColor: new vscode.ThemeColor("diffEditor.insertedLineBackground"),
    },
    overviewRulerColor: new vscode.ThemeColor("editorOverviewRuler.addedForeground"),
  });
  /**
   * Created with the first thread, not at startup: a window with two extension hosts (a remote window) drops all controllers when
   * the second host starts, and would show no threads.
   */
  private controller: vscode.CommentController | undefined;
  private readonly threads = new Map<string, { shown: string; thread: vscode.CommentThread }>();
  /** Number of kept steps of each review when it was last drawn. */
  private readonly kept = new Map<string, number>();
  private readonly arguments = new WeakMap<object, Argument>();
  private readonly subscriptions: vscode.Disposable[];

  constructor(private readonly runs: Runs) {
    const draw = (): void => {
      this.draw();
    };
    this.subscriptions = [
      runs.onChange(draw),
      vscode.window.onDidChangeVisibleTextEditors(draw),
      vscode.window.onDidChangeActiveTextEditor(draw),
      vscode.workspace.onDidChangeConfiguration((event) => {
        if (event.affectsConfiguration("mtmc.inlineReview")) this.draw();
      }),
      this.removed,
      this.added,
    ];
  }

  /** The argument of a command that was run on a thread; undefined for other values. */
  argumentOf(value: unknown): Argument | undefined {
    return typeof value === "object" && value !== null ? this.arguments.get(value) : undefined;
  }

  private draw(): void {
    this.drawThreads();
    for (const editor of vscode.window.visibleTextEditors) this.drawMarks(editor);
    this.updateContexts();
  }

  private drawMarks(editor: vscode.TextEditor): void {
    const { document } = editor;
    const here = this.runs.reviews.filter((review) => review.uri === document.uri.toString());
    // Lines of another document version may differ; the answer for this version follows.
    const current = here.filter((review) => review.version === document.version);
    if (here.length > 0 && current.length === 0) return;
    const drawings = current.map((review) => draw(review.changes));
    const end = (line: number): vscode.Position => document.lineAt(Math.min(line, document.lineCount - 1)).range.end;
    editor.setDecorations(
      this.removed,
      drawings.flatMap((drawing) => drawing.removed.map(({ first, last }) => new vscode.Range(new vscode.Position(first, 0), end(last)))),
    );
    editor.setDecorations(
      this.added,
      drawings.flatMap((drawing) =>
        drawing.added.map(({ line, mark, text }) => ({
          range: new vscode.Range(end(line), end(line)),
          hoverMessage: new vscode.MarkdownString(fenced("python", text)),
          renderOptions: { after: { contentText: mark } },
        })),
      ),
    );
  }

  private drawThreads(): void {
    const mode = vscode.workspace.getConfiguration("mtmc").get<string>("inlineReview", "expanded");
    const wanted = mode === "off" ? [] : this.runs.reviews.filter((review) => review.pending.length > 0 && !review.stale);
    const keys = new Set(wanted.map(keyOf));
    for (const [key, { thread }] of this.threads) {
      if (!keys.has(key)) {
        thread.dispose();
        this.threads.delete(key);
      }
    }
    for (const review of wanted) this.drawThread(review, mode === "expanded");
    for (const review of this.runs.reviews) {
      const kept = this.kept.get(keyOf(review));
      if (kept !== undefined && kept !== review.kept.length) keepVisible(vscode.Uri.parse(review.uri), review.line);
      this.kept.set(keyOf(review), review.kept.length);
    }
  }

  private drawThread(review: Review, expanded: boolean): void {
    const step = nextStep(review);
    if (step === undefined) return;
    const key = keyOf(review);
    const existing = this.threads.get(key);
    const line = Math.max(0, review.line - 1);
    const range = new vscode.Range(line, 0, line, 0);
    const shown = `${review.run.run}#${step.index}#${title(review)}`;
    this.controller ??= vscode.comments.createCommentController("mtmc", "MTMC review");
    const thread = existing?.thread ?? this.controller.createCommentThread(vscode.Uri.parse(review.uri), range, []);
    const context = review.isActive ? "pending-active" : "pending";
    // Setting a property redraws the thread with its buttons, which could lose a click. Set only changed properties.
    if (thread.contextValue !== context) thread.contextValue = context;
    if (thread.range.start.line !== line) thread.range = range;
    if (existing?.shown !== shown) {
      thread.canReply = false;
      thread.label = title(review);
      thread.comments = [
        { author: { name: "MTMC" }, body: new vscode.MarkdownString(body(step)), mode: vscode.CommentMode.Preview },
      ];
      thread.collapsibleState = expanded
        ? vscode.CommentThreadCollapsibleState.Expanded
        : vscode.CommentThreadCollapsibleState.Collapsed;
    }
    this.arguments.set(thread, { uri: review.uri, target: review.target, step: step.index });
    this.threads.set(key, { shown, thread });
  }

  private updateContexts(): void {
    const uri = vscode.window.activeTextEditor?.document.uri.toString();
    const here = this.runs.reviews.filter((review) => review.uri === uri);
    const isPending = (review: Review): boolean => review.pending.length > 0 && !review.stale;
    const contexts = {
      hasReview: here.length > 0,
      hasPending: here.some(isPending),
      anyPending: this.runs.reviews.some(isPending),
      running: this.runs.activeJobs.length > 0,
    };
    for (const [name, value] of Object.entries(contexts)) {
      void vscode.commands.executeCommand("setContext", `mtmc.${name}`, value);
    }
  }

  dispose(): void {
    for (const { thread } of this.threads.values()) thread.dispose();
    this.controller?.dispose();
    for (const subscription of this.subscriptions) subscription.dispose();
  }
}

/** Keeping or undoing a step moves the function; keeps its line visible. */
function keepVisible(uri: vscode.Uri, line: number): void {
  const editor = vscode.window.visibleTextEditors.find((one) => one.document.uri.toString() === uri.toString());
  editor?.revealRange(new vscode.Range(line, 0, line, 0), vscode.TextEditorRevealType.InCenterIfOutsideViewport);
}

function keyOf(review: Review): string {
  return `${review.uri}#${review.target}`;
}
