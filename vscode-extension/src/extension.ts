/** Starts everything, and says what each command does. The work is in the server; here it is shown. */

import * as vscode from "vscode";
import type { ExecuteCommandSignature } from "vscode-languageclient/node";
import { importsTorch, isArgument, isSearch, lacksWorkload, neighbour, planOf, reviewAt, waiting, type Argument, type JobState, type Review } from "./core/model";
import type { Shown } from "./core/panel";
import { Diffs } from "./diff";
import { openExample } from "./example";
import { onPythonChange } from "./python";
import { Report } from "./report";
import { ReviewDrawer } from "./review";
import { Server } from "./server";
import { Runs } from "./state";
import { RunsView, Status } from "./view";

const KIND = "refactor.rewrite.mtmc";
/** Commands about the function at the cursor, that no run is needed for. */
const OF_FUNCTION = new Set(["optimize", "plan", "measure", "verify", "record"].map((name) => `mtmc.${name}`));

/** Called by VS Code when a Python file is opened, or a command is chosen. */
export function activate(context: vscode.ExtensionContext): void {
  const extension = new Extension(context);
  context.subscriptions.push(extension);
  // Not awaited: VS Code has other extensions to activate meanwhile.
  void extension.start();
}

/** For `when` clauses: files without torch are left alone. */
function tellOfTorch(editor: vscode.TextEditor | undefined): void {
  // Of a diff's side there is nothing to be optimised.
  const isOurs = editor?.document.languageId === "python" && editor.document.uri.scheme === "file" && importsTorch(editor.document.getText());
  void vscode.commands.executeCommand("setContext", "mtmc.importsTorch", isOurs);
}

class Extension implements vscode.Disposable {
  private readonly server: Server;
  private readonly runs: Runs;
  private readonly drawer: ReviewDrawer;
  private readonly diffs: Diffs;
  private readonly report: Report;
  private readonly subscriptions: vscode.Disposable[];

  constructor(private readonly context: vscode.ExtensionContext) {
    const folder = vscode.Uri.joinPath(context.globalStorageUri, "server").fsPath;
    this.server = new Server(folder, (command, args, next) => this.execute(command, args, next));
    this.runs = new Runs(this.server, context.workspaceState);
    this.drawer = new ReviewDrawer(this.runs);
    this.diffs = new Diffs(this.server);
    this.report = new Report(vscode.Uri.joinPath(context.extensionUri, "dist"), this.server, this.runs);
    const shown = [new RunsView(this.runs), new Status(this.server, this.runs), this.drawer, this.diffs, this.report];
    this.subscriptions = [...shown, this.runs, this.server, ...this.commands()];
  }

  async start(): Promise<void> {
    const restart = (): void => void this.server.restart();
    const serverPython = (): string => vscode.workspace.getConfiguration("mtmc").get("serverPython", "");
    let named = serverPython();
    this.subscriptions.push(
      vscode.workspace.onDidGrantWorkspaceTrust(restart),
      vscode.workspace.onDidChangeConfiguration(() => {
        // The event tells of settings that were loaded late, too; a restart ends the run that goes on.
        if (serverPython() !== named) {
          named = serverPython();
          restart();
        }
      }),
    );
    this.subscriptions.push(
      this.server.onJob((job) => {
        if (lacksWorkload(job)) void this.offerWorkload({ uri: job.uri, target: job.target }, job.kind);
        if (planOf(job) !== undefined) void vscode.commands.executeCommand("mtmc.runs.focus");
        else if (job.result !== "") void this.tellOfResult(job);
      }),
      this.server.onEnd((again) => void this.tellOfEnd(again, this.runs.present)),
      vscode.window.onDidChangeActiveTextEditor(tellOfTorch),
      vscode.workspace.onDidSaveTextDocument(() => { tellOfTorch(vscode.window.activeTextEditor); }),
    );
    tellOfTorch(vscode.window.activeTextEditor);
    await this.server.start();
    this.subscriptions.push(
      await onPythonChange(() => {
        // Another environment may have the server where this one had not; one that runs goes on.
        if (this.server.state === "failed") restart();
        else void this.runs.askDevice();
      }),
    );
  }

  /** Commands that the server has no part in, or not by itself. */
  private commands(): vscode.Disposable[] {
    const all: Record<string, (...args: unknown[]) => unknown> = {
      diffAll: (...args) => this.withReview(args, (review) => this.diffs.fromOriginal(review)),
      diffFromOriginal: (...args) => this.withStep(args, (review, step) => this.diffs.fromOriginal(review, step)),
      diffToFinal: (...args) => this.withStep(args, (review, step) => this.diffs.toFinal(review, step)),
      report: (...args) => this.withRun(args, (shown) => this.report.show(shown)),
      exportReport: (...args) => this.withRun(args, (shown) => this.report.export(shown, "html")),
      exportPicture: (...args) => this.withRun(args, (shown) => this.report.export(shown, "png")),
      reveal: (...args) => this.reveal(this.given(args)),
      nextPending: () => this.go(true),
      previousPending: () => this.go(false),
      openExample: () => openExample(this.context),
      tryExample: () => this.tryExample(),
      trace: () => vscode.commands.executeCommand("workbench.action.openSettings", "mtmc.trace.server"),
      restart: () => this.server.restart(),
      install: () => this.server.install(),
      showLog: () => { this.server.log.show(); },
      menu: () => this.menu(),
    };
    return Object.entries(all).map(([name, run]) => vscode.commands.registerCommand(`mtmc.${name}`, run));
  }

  /** A command of the server's: with the argument it needs, wherever it was chosen. */
  private async execute(command: string, args: unknown[], next: ExecuteCommandSignature): Promise<unknown> {
    if (command === "mtmc.cancel" || command === "mtmc.jobs") return next(command, [this.given(args) ?? {}]);
    if (command === "mtmc.addWorkload" && this.given(args) === undefined) return this.applyAction(command);
    const argument = this.given(args) ?? (OF_FUNCTION.has(command) ? await this.ofCursor(command) : this.ofReview());
    if (argument === undefined) return undefined;
    if (command === "mtmc.diff") {
      const step = argument.step ?? this.usualStep(argument);
      return step === undefined ? undefined : this.diffs.ofStep({ ...argument, step });
    }
    // The server knows files that are open; a row of the tree may be about one that was closed.
    await vscode.workspace.openTextDocument(vscode.Uri.parse(argument.uri));
    const model = command === "mtmc.tryAnother" ? this.reviewOf(argument)?.run.model : "";
    if (!model) return next(command, [argument]);
    const remark = await vscode.window.showInputBox({
      title: `Try another: what shall ${model} do otherwise?`,
      prompt: "It is told your words with the version that you did not want. Enter alone has the search go on without that step.",
      placeHolder: "make it readable",
      ignoreFocusOut: true,
    });
    return remark === undefined ? undefined : next(command, [{ ...argument, remark }]);
  }

  /** The argument that came with a command: a lens's, a row's of the tree, or a thread's. */
  private given(args: readonly unknown[]): Argument | undefined {
    const first = args[0];
    if (isArgument(first)) return first;
    if (typeof first === "object" && first !== null && "argument" in first && isArgument(first.argument)) return first.argument;
    return this.drawer.argumentOf(first);
  }

  /** The function at the cursor, as the server's own code action names it. */
  private async ofCursor(command: string): Promise<Argument | undefined> {
    const action = await this.actionAtCursor(command);
    const argument: unknown = action?.command?.arguments?.[0];
    return isArgument(argument) ? argument : undefined;
  }

  private async applyAction(command: string): Promise<void> {
    const action = await this.actionAtCursor(command);
    if (action?.edit !== undefined) await vscode.workspace.applyEdit(action.edit);
  }

  private async actionAtCursor(command: string): Promise<vscode.CodeAction | undefined> {
    const editor = vscode.window.activeTextEditor;
    const kind = command.replace("mtmc.", `${KIND}.`);
    const found =
      editor === undefined
        ? []
        : await vscode.commands.executeCommand<vscode.CodeAction[]>(
            "vscode.executeCodeActionProvider", editor.document.uri, editor.selection, kind, 1,
          );
    const action = found[0];
    if (action === undefined) {
      void vscode.window.showInformationMessage("Put the cursor in a PyTorch function or module of a Python file, and choose this again.");
    } else if (action.disabled !== undefined) {
      void vscode.window.showInformationMessage(action.disabled.reason);
      return undefined;
    }
    return action;
  }

  /** The server has said what is missing: it is proposed from the code, to be changed or taken, and what was asked for goes on. */
  private async offerWorkload(argument: Argument, kind: string): Promise<void> {
    const [add, record] = ["Describe the inputs", "Record them from a command"];
    const words = `Nothing says what the inputs of ${argument.target} look like. A comment above it does; one is proposed from its code.`;
    const answer = await vscode.window.showInformationMessage(words, add, record);
    if (answer === record) await vscode.commands.executeCommand("mtmc.record", argument);
    if (answer !== add) return;
    await this.reveal(argument);
    const value = await this.server.proposedWorkload(argument);
    if (value === undefined) return;
    const first = /\[(.*?)\]/.exec(value);
    const inputs = await vscode.window.showInputBox({
      title: `Inputs of ${argument.target}`,
      prompt: "Each tensor's dtype and sizes, and the value of anything else. Enter writes it above the function, and goes on.",
      value,
      // The sizes are what the code tells least of.
      ...(first === null ? {} : { valueSelection: [first.index + 1, first.index + first[0].length - 1] as [number, number] }),
      ignoreFocusOut: true,
      validateInput: (text) => (text.trim() === "" ? "Write the inputs as in x=f32[64,128] n=3." : undefined),
    });
    if (inputs === undefined) return;
    await vscode.commands.executeCommand("mtmc.addWorkload", { ...argument, inputs });
    await vscode.commands.executeCommand(`mtmc.${kind}`, argument);
  }

  /** The whole way at one click: the example is opened, and optimised as soon as the server can. */
  private async tryExample(): Promise<void> {
    const argument = await openExample(this.context);
    if (await this.server.whenReady()) await vscode.commands.executeCommand("mtmc.optimize", argument);
  }

  /** What a job came to. Steps that wait stand in the editor, so only somebody who looks elsewhere is told of them. */
  private async tellOfResult(job: JobState): Promise<void> {
    if (isSearch(job)) {
      // The server knows open files alone, and this one may have been closed meanwhile.
      await vscode.workspace.openTextDocument(vscode.Uri.parse(job.uri));
      await this.runs.refresh();
    }
    const count = this.reviewOf(job)?.pending.length ?? 0;
    const isSeen = vscode.window.visibleTextEditors.some((editor) => editor.document.uri.toString() === job.uri);
    if (!isSearch(job) || (count === 0 && job.kind !== "undo")) {
      void vscode.window.showInformationMessage(job.result);
    } else if (count > 0 && !isSeen) {
      const words = `${job.target}: ${waiting(count)} for your decision.`;
      if ((await vscode.window.showInformationMessage(words, "Review")) !== undefined) await this.reveal(job);
    }
  }

  /** The server ended by itself, in the middle of `jobs`. */
  private async tellOfEnd(again: boolean, jobs: readonly JobState[]): Promise<void> {
    const [goOn, restart, log] = ["Go on with the run", "Start it again", "Show the log"];
    const job = jobs[0];
    if (!again) {
      const answer = await vscode.window.showErrorMessage("The language server ended more than once, and is not started again.", restart, log);
      if (answer === restart) await this.server.restart();
      if (answer === log) this.server.log.show();
    } else if (job === undefined) {
      const answer = await vscode.window.showWarningMessage("The language server ended and was started again. Steps that wait are back.", log);
      if (answer === log) this.server.log.show();
    } else {
      const words = `The language server ended while it worked on ${job.target}, and is started again. The steps that it had found wait for you.`;
      const answer = await vscode.window.showWarningMessage(words, goOn, log);
      if (answer === goOn && (await this.server.whenReady())) {
        await vscode.commands.executeCommand("mtmc.resume", { uri: job.uri, target: job.target });
      }
      if (answer === log) this.server.log.show();
    }
  }

  private reviewOf(argument: Argument): Review | undefined {
    return this.runs.reviews.find((review) => review.uri === argument.uri && review.target === argument.target);
  }

  /** The run at the cursor. */
  private ofReview(): Argument | undefined {
    const editor = vscode.window.activeTextEditor;
    const review =
      editor === undefined
        ? undefined
        : reviewAt(this.runs.reviews, editor.document.uri.toString(), editor.selection.active.line);
    if (review === undefined) {
      void vscode.window.showInformationMessage("No function of this file was optimised yet. Put the cursor in one, and choose Optimize to Triton kernel.");
      return undefined;
    }
    return { uri: review.uri, target: review.target };
  }

  private usualStep(argument: Argument): number | undefined {
    const review = this.reviewOf(argument);
    return review?.pending[0] ?? review?.kept.at(-1);
  }

  private async withReview(args: readonly unknown[], use: (review: Review) => unknown): Promise<void> {
    const argument = this.given(args) ?? this.ofReview();
    const review = argument === undefined ? undefined : this.reviewOf(argument);
    if (review !== undefined) await use(review);
  }

  private async withStep(args: readonly unknown[], use: (review: Review, step: number) => unknown): Promise<void> {
    const argument = this.given(args) ?? this.ofReview();
    const review = argument === undefined ? undefined : this.reviewOf(argument);
    const step = argument?.step ?? (argument === undefined ? undefined : this.usualStep(argument));
    if (review !== undefined && step !== undefined) await use(review, step);
  }

  /** The newest run of a function, or an earlier one that a row of the tree is about. */
  private async withRun(args: readonly unknown[], use: (shown: Shown) => Promise<void>): Promise<void> {
    const argument = this.given(args) ?? this.ofReview();
    if (argument === undefined) return;
    const { uri, target, past } = argument;
    try {
      await use(past === undefined ? { uri, target } : { uri, target, run: past });
    } catch (error) {
      void vscode.window.showErrorMessage(String(error));
    }
  }

  private async reveal(argument: Argument | undefined): Promise<void> {
    if (argument === undefined) return;
    const editor = await vscode.window.showTextDocument(vscode.Uri.parse(argument.uri));
    const review = this.reviewOf(argument);
    if (review === undefined) return;
    const at = new vscode.Position(review.line, 0);
    editor.selection = new vscode.Selection(at, at);
    editor.revealRange(new vscode.Range(at, at), vscode.TextEditorRevealType.InCenter);
  }

  private async go(forward: boolean): Promise<void> {
    const editor = vscode.window.activeTextEditor;
    const line = editor?.selection.active.line ?? 0;
    const next = neighbour(this.runs.reviews, editor?.document.uri.toString() ?? "", line, forward);
    if (next !== undefined) await this.reveal({ uri: next.uri, target: next.target });
  }

  private async menu(): Promise<void> {
    const cancel = this.runs.present.map((job) => ({
      label: `$(stop-circle) Cancel: ${job.target}`,
      description: job.stage,
      command: "mtmc.cancel",
      argument: { uri: job.uri, target: job.target },
    }));
    const rest = [
      { label: "$(list-tree) Show the runs", description: "", command: "mtmc.runs.focus" },
      { label: "$(debug-restart) Restart the language server", description: this.server.python ?? "", command: "mtmc.restart" },
      { label: "$(output) Show the log", description: "", command: "mtmc.showLog" },
      { label: "$(pulse) Trace the server", description: "", command: "mtmc.trace" },
      ...(this.server.state === "failed"
        ? [{ label: "$(cloud-download) Install the language server", description: "", command: "mtmc.install" }]
        : []),
      ...(vscode.workspace.isTrusted
        ? []
        : [{ label: "$(shield) Manage workspace trust", description: "", command: "workbench.trust.manage" }]),
    ].map((item) => ({ ...item, argument: undefined }));
    const chosen = await vscode.window.showQuickPick([...cancel, ...rest], { title: "MTMC" });
    if (chosen !== undefined) await vscode.commands.executeCommand(chosen.command, chosen.argument);
  }

  async dispose(): Promise<void> {
    for (const subscription of this.subscriptions) await subscription.dispose();
  }
}
