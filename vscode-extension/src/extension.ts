/** Entry point: starts the language server and the views, and implements the commands. */

import * as vscode from "vscode";
import type { ExecuteCommandSignature } from "vscode-languageclient/node";
import { importsTorch, isArgument, isSearch, lacksWorkload, adjacentReview, neighbour, planOf, reviewAt, pendingText, type Argument, type FailedJob, type JobState, type Review } from "./core/model";
import type { Shown } from "./core/panel";
import { Diffs, stepOf } from "./diff";
import { openExample } from "./example";
import { fileOf, Lineages } from "./lineage";
import { onPythonChange } from "./python";
import { Report } from "./report";
import { ReviewPages, targetOf } from "./review";
import { Server } from "./server";
import { Runs } from "./state";
import { RunsView, Status } from "./view";

const KIND = "refactor.rewrite.mtmc";
/** Commands for the function at the cursor that need no earlier run. */
const FUNCTION_COMMANDS = new Set(["optimize", "tune", "plan", "measure", "verify", "record", "repair"].map((name) => `mtmc.${name}`));

/** Commands in the title bars of review pages and diffs: without an icon, VS Code shows their titles as words. */
const TITLE_COMMANDS = ["keep", "discard", "tryAnother", "diff", "previousPending", "nextPending", "keepAll"];

/** Called by VS Code when a Python file is opened or a command is run. */
export function activate(context: vscode.ExtensionContext): void {
  const extension = new Extension(context);
  context.subscriptions.push(extension);
  // Not awaited, so that VS Code can activate other extensions in the meantime.
  void extension.start();
}

/** Sets the context for `when` clauses: files without torch get no commands. */
function updateTorchContext(editor: vscode.TextEditor | undefined): void {
  // Ignore the documents of diff editors.
  const usesTorch = editor?.document.languageId === "python" && editor.document.uri.scheme === "file" && importsTorch(editor.document.getText());
  void vscode.commands.executeCommand("setContext", "mtmc.importsTorch", usesTorch);
}

class Extension implements vscode.Disposable {
  private readonly server: Server;
  private readonly runs: Runs;
  private readonly pages: ReviewPages;
  private readonly diffs: Diffs;
  private readonly lineages: Lineages;
  private readonly report: Report;
  private readonly subscriptions: vscode.Disposable[];

  constructor(private readonly context: vscode.ExtensionContext) {
    const folder = vscode.Uri.joinPath(context.globalStorageUri, "server").fsPath;
    this.server = new Server(folder, context.asAbsolutePath("dist/server"), (command, args, next) => this.execute(command, args, next));
    this.runs = new Runs(this.server, context.workspaceState);
    this.pages = new ReviewPages(this.runs, this.server, context.workspaceState);
    this.diffs = new Diffs(this.server, this.runs);
    this.lineages = new Lineages(this.server);
    this.report = new Report(vscode.Uri.joinPath(context.extensionUri, "dist"), this.server, this.runs);
    const views = [new RunsView(this.runs), new Status(this.server, this.runs), this.pages, this.diffs, this.lineages, this.report];
    this.subscriptions = [...views, this.runs, this.server, ...this.commands()];
  }

  async start(): Promise<void> {
    const restart = (): void => void this.server.restart();
    const serverPython = (): string => vscode.workspace.getConfiguration("mtmc").get("serverPython", "");
    let configuredPython = serverPython();
    this.subscriptions.push(
      vscode.workspace.onDidGrantWorkspaceTrust(restart),
      vscode.workspace.onDidChangeConfiguration(() => {
        // The event also fires for settings that load late. Restart only after a change: a restart stops the active run.
        if (serverPython() !== configuredPython) {
          configuredPython = serverPython();
          restart();
        }
      }),
    );
    this.subscriptions.push(
      this.server.onJob((job) => {
        if (lacksWorkload(job)) void this.offerWorkload({ uri: job.uri, target: job.target }, job.kind);
        if (planOf(job) !== undefined) void vscode.commands.executeCommand("mtmc.runs.focus");
        else if (job.state === "cancelled") void vscode.window.showInformationMessage(job.result);
        else if (job.result !== "") void this.showResult(job);
        else if (job.failure !== null && !lacksWorkload(job)) void this.showFailure({ uri: job.uri, target: job.target, failure: job.failure });
      }),
      this.server.onEnd((again) => void this.reportServerExit(again, this.runs.activeJobs)),
      vscode.window.onDidChangeActiveTextEditor(updateTorchContext),
      vscode.workspace.onDidSaveTextDocument(() => { updateTorchContext(vscode.window.activeTextEditor); }),
    );
    updateTorchContext(vscode.window.activeTextEditor);
    await this.server.start();
    this.subscriptions.push(
      await onPythonChange(() => {
        // Another environment may contain the server. A running server is not restarted.
        if (this.server.state === "failed") restart();
        else void this.runs.askDevice();
      }),
    );
  }

  /** Commands that the extension implements. */
  private commands(): vscode.Disposable[] {
    const commands: Record<string, (...args: unknown[]) => unknown> = {
      diffAll: (...args) => this.withReview(args, (review) => this.diffs.fromOriginal(review)),
      diffFromOriginal: (...args) => this.withStep(args, (review, step) => this.diffs.fromOriginal(review, step)),
      diffToFinal: (...args) => this.withStep(args, (review, step) => this.diffs.toFinal(review, step)),
      report: (...args) => this.withRun(args, (shown) => this.report.show(shown)),
      exportReport: (...args) => this.withRun(args, (shown) => this.report.export(shown, "html")),
      exportPicture: (...args) => this.withRun(args, (shown) => this.report.export(shown, "png")),
      lineage: (...args) => this.showLineage(args),
      reveal: (...args) => this.reveal(this.argumentFrom(args)),
      review: (...args) => this.withReview(args, (review) => this.pages.open(review, false)),
      help: (...args) => this.help(this.argumentFrom(args)),
      choosePython: () => vscode.commands.executeCommand("workbench.action.openSettings", "mtmc.python"),
      reviewStep: (...args) => this.reviewStep(this.argumentFrom(args)),
      showAllLines: (...args) => this.withReview(args, (review) => { this.pages.toggle(review); }),
      nextPending: (...args) => this.goToPending(true, args),
      previousPending: (...args) => this.goToPending(false, args),
      ...Object.fromEntries(TITLE_COMMANDS.map((name) => [`${name}.title`, (...args: unknown[]) => vscode.commands.executeCommand(`mtmc.${name}`, ...args)])),
      openExample: () => openExample(this.context),
      tryExample: () => this.tryExample(),
      trace: () => vscode.commands.executeCommand("workbench.action.openSettings", "mtmc.trace.server"),
      restart: () => this.server.restart(),
      install: () => this.server.install(),
      showLog: () => { this.server.log.show(); },
      menu: () => this.menu(),
    };
    return Object.entries(commands).map(([name, run]) => vscode.commands.registerCommand(`mtmc.${name}`, run));
  }

  /** Shows the evolutions of the file of a tree row, else of the active editor. */
  private async showLineage(args: readonly unknown[]): Promise<void> {
    const document = vscode.window.activeTextEditor?.document;
    const uri = this.argumentFrom(args)?.uri ?? (document?.languageId === "python" ? fileOf(document.uri) : undefined);
    if (uri === undefined) void vscode.window.showInformationMessage("Open a Python file and run the command again.");
    else await this.lineages.show(uri);
  }

  /** Runs a server command with its argument, wherever the command was invoked. */
  private async execute(command: string, args: unknown[], next: ExecuteCommandSignature): Promise<unknown> {
    if (command === "mtmc.cancel" || command === "mtmc.jobs") return next(command, [this.argumentFrom(args) ?? {}]);
    if (command === "mtmc.addWorkload" && this.argumentFrom(args) === undefined) return this.applyAction(command);
    const argument = this.argumentFrom(args) ?? (FUNCTION_COMMANDS.has(command) ? await this.argumentAtCursor(command) : this.argumentOfReview());
    if (argument === undefined) return undefined;
    if (command === "mtmc.diff") {
      const step = argument.step ?? this.defaultStep(argument);
      return step === undefined ? undefined : this.diffs.ofStep({ ...argument, step });
    }
    // The server only knows open files, but a tree row may refer to a closed one.
    await vscode.workspace.openTextDocument(vscode.Uri.parse(argument.uri));
    const model = command === "mtmc.tryAnother" ? this.reviewOf(argument)?.run.model : "";
    if (!model) return next(command, [argument]);
    const remark = await vscode.window.showInputBox({
      title: `Retry: what should ${model} do differently?`,
      prompt: "Your remark is sent to the model together with the rejected version. Leave it empty to continue the search without this step.",
      placeHolder: "make it readable",
      ignoreFocusOut: true,
    });
    return remark === undefined ? undefined : next(command, [{ ...argument, remark }]);
  }

  /** The argument of a command that was invoked from a code lens, a tree row or a thread. */
  private argumentFrom(args: readonly unknown[]): Argument | undefined {
    const first = args[0];
    if (isArgument(first)) return first;
    if (typeof first === "object" && first !== null && "argument" in first && isArgument(first.argument)) return first.argument;
    return first instanceof vscode.Uri ? this.argumentOfPage(first) : undefined;
  }

  /** The step of a review page or a diff editor, whose title bar passes its URI. */
  private argumentOfPage(uri: vscode.Uri | undefined): Argument | undefined {
    const of = targetOf(uri);
    const step = of === undefined ? undefined : this.reviewOf(of)?.selected;
    return of === undefined ? stepOf(uri) : step == null ? of : { ...of, step };
  }

  /** The function at the cursor, from the server's code action. */
  private async argumentAtCursor(command: string): Promise<Argument | undefined> {
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
    const actions =
      editor === undefined
        ? []
        : await vscode.commands.executeCommand<vscode.CodeAction[]>(
            "vscode.executeCodeActionProvider", editor.document.uri, editor.selection, kind, 1,
          );
    const action = actions[0];
    if (action === undefined) {
      const reason = editor === undefined ? "" : await this.server.reasonAt(editor.document.uri.toString(), editor.selection.active.line);
      void vscode.window.showInformationMessage(reason === "" ? "Put the cursor in a PyTorch function or module of a Python file and run the command again." : reason);
    } else if (action.disabled !== undefined) {
      void vscode.window.showInformationMessage(action.disabled.reason);
      return undefined;
    }
    return action;
  }

  /** Asks the user for missing example inputs, with a suggestion derived from the code, and then continues the command. */
  private async offerWorkload(argument: Argument, kind: string): Promise<void> {
    const [add, record] = ["Describe the inputs", "Record from a command"];
    const message = `${argument.target} has no example inputs. Describe them in a comment above it, or record them from a command.`;
    const answer = await vscode.window.showInformationMessage(message, add, record);
    if (answer === record) await vscode.commands.executeCommand("mtmc.record", argument);
    if (answer === add) await this.describeInputs(argument, kind);
  }

  /** Asks for the inputs of a function, writes them above it, and continues the command. */
  private async describeInputs(argument: Argument, kind: string): Promise<void> {
    await this.reveal(argument);
    const value = await this.server.proposedWorkload(argument);
    if (value === undefined) return;
    const first = /\[(.*?)\]/.exec(value);
    const inputs = await vscode.window.showInputBox({
      title: `Inputs of ${argument.target}`,
      prompt: "Dtype and shape of each tensor, value of every other argument. Press Enter to write them above the function and continue.",
      value,
      // Select the sizes, because they cannot be derived from the code.
      ...(first === null ? {} : { valueSelection: [first.index + 1, first.index + first[0].length - 1] as [number, number] }),
      ignoreFocusOut: true,
      validateInput: async (text) => {
        if (text.trim() === "") return "Enter the inputs, for example x=f32[64,128] n=3.";
        const error = await this.server.workloadError(argument, text);
        return error === "" ? undefined : error;
      },
    });
    if (inputs === undefined) return;
    await vscode.commands.executeCommand("mtmc.addWorkload", { ...argument, inputs });
    await vscode.commands.executeCommand(`mtmc.${kind}`, argument);
  }

  /** Says why a job failed, with the command that helps most. */
  private async showFailure({ uri, target, failure }: FailedJob): Promise<void> {
    const answer = await vscode.window.showErrorMessage(failure.text, failure.button);
    if (answer !== undefined) await this.help({ uri, target });
  }

  /** Runs the command that helps most with the failure of a function. */
  private async help(argument: Argument | undefined): Promise<void> {
    const failed = this.runs.failed.find(({ uri, target }) => uri === argument?.uri && target === argument.target);
    if (failed === undefined) return;
    const of = { uri: failed.uri, target: failed.target };
    if (failed.failure.command === "addWorkload") await this.describeInputs(of, "optimize");
    else await vscode.commands.executeCommand(`mtmc.${failed.failure.command}`, of);
  }

  /** Opens the example and optimises it as soon as the server is ready. */
  private async tryExample(): Promise<void> {
    const argument = await openExample(this.context);
    if (await this.server.whenReady()) await vscode.commands.executeCommand("mtmc.optimize", argument);
  }

  /** Shows the result of a job. Pending steps are visible in the editor, so they are only announced if the file is not visible. */
  private async showResult(job: JobState): Promise<void> {
    if (isSearch(job)) {
      // The server only knows open files, and this one may have been closed in the meantime.
      await vscode.workspace.openTextDocument(vscode.Uri.parse(job.uri));
      await this.runs.refresh();
    }
    const count = this.reviewOf(job)?.pending.length ?? 0;
    const isVisible = vscode.window.visibleTextEditors.some((editor) => editor.document.uri.toString() === job.uri);
    if (!isSearch(job) || (count === 0 && job.kind !== "undo")) {
      void vscode.window.showInformationMessage(job.result);
    } else if (count > 0 && !isVisible) {
      const message = `${job.target}: ${pendingText(count)} to review.`;
      if ((await vscode.window.showInformationMessage(message, "Review")) !== undefined) await this.reveal(job);
    }
  }

  /** The server exited unexpectedly while `jobs` were active. `again`: it is restarted. */
  private async reportServerExit(again: boolean, jobs: readonly JobState[]): Promise<void> {
    const [resume, restart, log] = ["Go on with the run", "Restart", "Show the log"];
    const job = jobs[0];
    if (!again) {
      const answer = await vscode.window.showErrorMessage("The language server stopped repeatedly and was not restarted.", restart, log);
      if (answer === restart) await this.server.restart();
      if (answer === log) this.server.log.show();
    } else if (job === undefined) {
      const answer = await vscode.window.showWarningMessage("The language server stopped and was restarted. Pending steps were restored.", log);
      if (answer === log) this.server.log.show();
    } else {
      const message = `The language server stopped while it worked on ${job.target} and was restarted. The steps found so far are pending.`;
      const answer = await vscode.window.showWarningMessage(message, resume, log);
      if (answer === resume && (await this.server.whenReady())) {
        await vscode.commands.executeCommand("mtmc.resume", { uri: job.uri, target: job.target });
      }
      if (answer === log) this.server.log.show();
    }
  }

  private reviewOf(argument: Argument): Review | undefined {
    return this.runs.reviews.find((review) => review.uri === argument.uri && review.target === argument.target);
  }

  /** The run at the cursor. */
  private argumentOfReview(): Argument | undefined {
    const editor = vscode.window.activeTextEditor;
    const shown = this.argumentOfPage(editor?.document.uri);
    if (shown !== undefined) return shown;
    const review =
      editor === undefined
        ? undefined
        : reviewAt(this.runs.reviews, editor.document.uri.toString(), editor.selection.active.line);
    if (review === undefined) {
      void vscode.window.showInformationMessage("No function of this file has been optimised yet. Put the cursor in a function and choose Optimize to Triton kernel.");
      return undefined;
    }
    return { uri: review.uri, target: review.target };
  }

  private defaultStep(argument: Argument): number | undefined {
    const review = this.reviewOf(argument);
    return review?.selected ?? review?.kept.at(-1);
  }

  private async withReview(args: readonly unknown[], use: (review: Review) => unknown): Promise<void> {
    const argument = this.argumentFrom(args) ?? this.argumentOfReview();
    const review = argument === undefined ? undefined : this.reviewOf(argument);
    if (review !== undefined) await use(review);
  }

  private async withStep(args: readonly unknown[], use: (review: Review, step: number) => unknown): Promise<void> {
    const argument = this.argumentFrom(args) ?? this.argumentOfReview();
    const review = argument === undefined ? undefined : this.reviewOf(argument);
    const step = argument?.step ?? (argument === undefined ? undefined : this.defaultStep(argument));
    if (review !== undefined && step !== undefined) await use(review, step);
  }

  /** Calls `use` with the newest run of a function, or with the earlier run of a tree row. */
  private async withRun(args: readonly unknown[], use: (shown: Shown) => Promise<void>): Promise<void> {
    const argument = this.argumentFrom(args) ?? this.argumentOfReview();
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
    const position = new vscode.Position(review.line, 0);
    editor.selection = new vscode.Selection(position, position);
    editor.revealRange(new vscode.Range(position, position), vscode.TextEditorRevealType.InCenter);
  }

  /** Shows one pending step. */
  private async reviewStep(argument: Argument | undefined): Promise<void> {
    if (argument === undefined) return;
    await this.reveal(argument);
    await vscode.commands.executeCommand("mtmc.select", argument);
    await this.runs.refresh();
    await this.pages.open(argument, true);
  }

  /** Shows the next (or previous) pending step: of the function at the cursor, else of the next function with one. */
  private async goToPending(forward: boolean, args: readonly unknown[] = []): Promise<void> {
    const editor = vscode.window.activeTextEditor;
    const shown = this.argumentFrom(args) ?? this.argumentOfPage(editor?.document.uri);
    const uri = shown?.uri ?? editor?.document.uri.toString() ?? "";
    const line = editor?.selection.active.line ?? 0;
    const here = shown === undefined ? reviewAt(this.runs.reviews, uri, line) : this.reviewOf(shown);
    const step = here === undefined || here.stale ? undefined : neighbour(here, forward);
    if (here !== undefined && step !== undefined) {
      await vscode.commands.executeCommand("mtmc.select", { uri: here.uri, target: here.target, step });
      await this.runs.refresh();
      await this.pages.open(here, true);
      return;
    }
    const next = adjacentReview(this.runs.reviews, uri, here?.line ?? line, forward);
    if (next === undefined) return;
    await this.reveal(next);
    await this.pages.open(next, true);
  }

  private async menu(): Promise<void> {
    const cancel = this.runs.activeJobs.map((job) => ({
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
    const choice = await vscode.window.showQuickPick([...cancel, ...rest], { title: "MTMC" });
    if (choice !== undefined) await vscode.commands.executeCommand(choice.command, choice.argument);
  }

  async dispose(): Promise<void> {
    for (const subscription of this.subscriptions) await subscription.dispose();
  }
}
