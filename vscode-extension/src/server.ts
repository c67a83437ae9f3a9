/** The language server process: start, restart, errors and requests. */

import { mkdirSync } from "node:fs";
import * as vscode from "vscode";
import type { ErrorHandler, ExecuteCommandSignature, LanguageClient, LanguageClientOptions, ServerOptions } from "vscode-languageclient/node";
import { has } from "./core/fields";
import { failure, installTarget, ISOLATED, SERVER_MODULE } from "./core/interpreters";
import { readEvolutions, type Evolution, type VersionOf } from "./core/lineage";
import { readGpu, readHistory, readJob, readReviews, type Argument, type JobState, type PastRun, type Review } from "./core/model";
import { readPage, type ReportPage, type Shown } from "./core/panel";
import { bundledServer, chosenPython, findServer, install, installSpec, type Ready } from "./python";
import { createTracing } from "./tracing";

/** Commands that run code of the workspace, so they need workspace trust. */
const CODE_RUNNING_COMMANDS = new Set(["optimize", "tune", "plan", "measure", "verify", "repair", "resume", "discard", "undo", "tryAnother", "keepVersion"].map((name) => `mtmc.${name}`));

/** The client library. It is most of the extension's code, so it is loaded only when a server can be started. */
type Protocol = typeof import("vscode-languageclient/node");

/** The server is restarted at most this many times within the time window. */
const MAX_RESTARTS = 4;
const RESTART_WINDOW_MS = 180_000;

/** Whether Pylance marks syntax errors, so that each is marked once. */
function pylanceIsUsed(): boolean {
  const choice = vscode.workspace.getConfiguration("python").get("languageServer", "Default");
  return vscode.extensions.getExtension("ms-python.vscode-pylance") !== undefined && ["Default", "Pylance"].includes(choice);
}

/** State of the server. */
export type ServerState = "stopped" | "installing" | "starting" | "ready" | "failed";

/** Handles a command instead of the server, or changes its argument. */
export type CommandHandler = (command: string, args: unknown[], next: ExecuteCommandSignature) => Promise<unknown>;

/** The language server of this window. */
export class Server implements vscode.Disposable {
  readonly log = vscode.window.createOutputChannel("MTMC", { log: true });
  private readonly tracing = createTracing(this.log);
  private client: LanguageClient | undefined;
  private current: ServerState = "stopped";
  private interpreter: Ready | undefined;
  private starting: Promise<void> | undefined;
  private readonly stateChanged = new vscode.EventEmitter<ServerState>();
  private readonly jobChanged = new vscode.EventEmitter<JobState>();
  private readonly reviewsChanged = new vscode.EventEmitter<string>();
  readonly onState = this.stateChanged.event;
  readonly onJob = this.jobChanged.event;
  readonly onReviews = this.reviewsChanged.event;
  private readonly ended = new vscode.EventEmitter<boolean>();
  /** Fires when the server exits unexpectedly; true if it is restarted. */
  readonly onEnd = this.ended.event;

  /**
   * @param folder working directory of the server, outside the workspace: pip would import files of the workspace.
   * @param bundle folder of the server that the extension brings.
   * @param handler called for every MTMC command.
   */
  constructor(
    private readonly folder: string,
    private readonly bundle: string,
    private readonly handler: CommandHandler,
  ) {}

  get state(): ServerState {
    return this.current;
  }

  /** Waits until the server is ready; false if it stops first. */
  async whenReady(): Promise<boolean> {
    if (this.current === "ready") return true;
    return new Promise((resolve) => {
      const subscription = this.onState((state) => {
        if (state === "ready" || state === "stopped") {
          subscription.dispose();
          resolve(state === "ready");
        }
      });
    });
  }

  /** The interpreter of the server, once known. */
  get python(): string | undefined {
    return this.interpreter?.path;
  }

  /** Starts the server. On failure, shows the reason and offers remedies. Concurrent calls share one start. */
  start(): Promise<void> {
    this.starting ??= this.begin().finally(() => {
      this.starting = undefined;
    });
    return this.starting;
  }

  private async begin(): Promise<void> {
    if (this.client !== undefined) return;
    this.setState("starting");
    mkdirSync(this.folder, { recursive: true });
    const { ready, probed } = await findServer(this.folder, bundledServer(this.bundle));
    for (const { candidate, probe } of probed) {
      this.log.info(`${candidate.path} (${candidate.from}): ${JSON.stringify(probe)}`);
    }
    this.interpreter = ready;
    if (ready === undefined) {
      this.setState("failed");
      // Not awaited: the user may answer much later.
      void this.offerRemedies(failure(probed, installSpec()), installTarget(probed)?.path);
      return;
    }
    this.client = this.makeClient(await import("vscode-languageclient/node"), ready);
    try {
      await this.client.start();
    } catch (error) {
      this.log.error(String(error));
      this.setState("failed");
      void this.offerRemedies(`The language server did not start in ${ready.path}. See the log.`, undefined);
    }
  }

  private makeClient(protocol: Protocol, { path, launcher }: Ready): LanguageClient {
    let hasRun = false;
    const options: LanguageClientOptions = {
      documentSelector: [{ scheme: "file", language: "python" }],
      outputChannel: this.log,
      traceOutputChannel: this.tracing.channel,
      initializationOptions: { trusted: vscode.workspace.isTrusted, runState: true, diffView: true, offersWorkload: true, showsResults: true, marksSyntaxErrors: pylanceIsUsed() },
      errorHandler: this.errorHandler(protocol, () => hasRun),
      // `begin` reports the failure.
      initializationFailedHandler: () => false,
      middleware: {
        executeCommand: (command, args, next) => this.execute(protocol, command, args, next),
        handleWorkDoneProgress: (token, params, next) => {
          // The MTMC status bar item already shows the run and can cancel it.
          if (params.kind === "end") next(token, params);
        },
        workspace: {
          configuration: async (params, token, next) => {
            const answers: unknown = await next(params, token);
            if (!Array.isArray(answers)) return [];
            return Promise.all(answers.map((answer: unknown, index) => withPython(answer, params.items[index]?.scopeUri)));
          },
        },
      },
    };
    const run = { command: path, args: [ISOLATED, launcher, SERVER_MODULE], options: { cwd: this.folder } };
    const client = createLoggingClient(protocol, { run, debug: run }, options);
    client.onDidChangeState(({ newState }) => {
      const { State } = protocol;
      hasRun ||= newState === State.Running;
      if (client === this.client) {
        this.setState(newState === State.Running ? "ready" : newState === State.Starting ? "starting" : "failed");
      }
    });
    client.onNotification("mtmc/runState", (params: unknown) => {
      const job = readJob(params);
      if (job !== undefined) this.jobChanged.fire(job);
    });
    client.onNotification("mtmc/reviewsChanged", (params: { uri: string }) => {
      this.reviewsChanged.fire(params.uri);
    });
    return client;
  }

  /** Restarts a server that exits unexpectedly, unless it does so too often, and fires `onEnd`. */
  private errorHandler({ CloseAction, ErrorAction }: Protocol, hasRun: () => boolean): ErrorHandler {
    let exits: number[] = [];
    return {
      // The library logs the error; an exit of the server is reported in `closed`.
      error: () => ({ action: ErrorAction.Continue, handled: true }),
      closed: () => {
        // `begin` reports a server that never ran.
        if (!hasRun()) return { action: CloseAction.DoNotRestart, handled: true };
        const now = Date.now();
        exits = [...exits.filter((exit) => now - exit < RESTART_WINDOW_MS), now];
        const again = exits.length <= MAX_RESTARTS && this.current === "ready";
        this.log.error(`the language server exited unexpectedly${again ? " and is restarted" : ""}`);
        this.ended.fire(again);
        return { action: again ? CloseAction.Restart : CloseAction.DoNotRestart, handled: true };
      },
    };
  }

  private async execute(protocol: Protocol, command: string, args: unknown[], next: ExecuteCommandSignature): Promise<unknown> {
    if (CODE_RUNNING_COMMANDS.has(command) && !vscode.workspace.isTrusted) {
      const manage = "Manage trust";
      const warning = "This command runs code of the workspace, but the workspace is not trusted. Nothing was run.";
      if ((await vscode.window.showWarningMessage(warning, manage)) === manage) {
        await vscode.commands.executeCommand("workbench.trust.manage");
      }
      return undefined;
    }
    try {
      return await this.handler(command, args, next);
    } catch (error) {
      // The server exited in the meantime, which is reported separately.
      if (error instanceof protocol.ResponseError && error.code === protocol.ErrorCodes.MessageWriteError) return undefined;
      throw error;
    }
  }

  private async offerRemedies(message: string, target: string | undefined): Promise<void> {
    const [installChoice, settings, log] = ["Install", "Open settings", "Show the log"];
    const choices = target === undefined ? [settings, log] : [installChoice, settings, log];
    const answer = await vscode.window.showErrorMessage(message, ...choices);
    if (answer === installChoice && target !== undefined) await this.installInto(target);
    if (answer === settings) await vscode.commands.executeCommand("workbench.action.openSettings", "mtmc.serverPython");
    if (answer === log) this.log.show();
  }

  /** Installs the server into the detected interpreter and starts it. */
  async install(): Promise<void> {
    const { ready, probed } = await findServer(this.folder, bundledServer(this.bundle));
    const target = ready?.path ?? installTarget(probed)?.path;
    if (target === undefined) {
      await this.offerRemedies(failure(probed), undefined);
    } else {
      await this.installInto(target);
    }
  }

  private async installInto(python: string): Promise<void> {
    const title = `Installing mtmc-lsp into ${python}`;
    const location = vscode.ProgressLocation.Notification;
    const previous = this.current;
    this.setState("installing");
    const installing = (): Promise<boolean> =>
      install(python, this.folder).catch((error: unknown) => {
        this.log.error(String(error));
        return false;
      });
    if (await vscode.window.withProgress({ location, title }, installing)) {
      // Close the terminal after success; after a failure it stays open.
      await vscode.commands.executeCommand("workbench.action.closePanel");
      await this.restart();
    } else {
      this.setState(previous);
      void vscode.window.showErrorMessage(`pip could not install mtmc-lsp into ${python}. See the terminal.`);
    }
  }

  /** Stops the server and starts it with the interpreter that is detected now. */
  async restart(): Promise<void> {
    await this.starting;
    await this.stop();
    await this.start();
  }

  private async stop(): Promise<void> {
    const client = this.client;
    this.client = undefined;
    this.setState("stopped");
    // A client that failed to start is not running and cannot be stopped.
    if (client?.isRunning() === true) await client.stop();
    await client?.dispose();
  }

  private setState(state: ServerState): void {
    if (state === this.current) return;
    this.current = state;
    void vscode.commands.executeCommand("setContext", "mtmc.serverReady", state === "ready");
    void vscode.commands.executeCommand("setContext", "mtmc.serverStarting", state === "starting" || state === "installing");
    this.stateChanged.fire(state);
  }

  /** The review state of all open files; empty without a server. */
  async reviews(): Promise<Review[]> {
    if (this.client === undefined || this.current !== "ready") return [];
    return readReviews(await this.client.sendRequest("mtmc/reviews", {}));
  }

  /** All runs of open files except the newest one of each target. */
  async history(): Promise<PastRun[]> {
    if (this.client === undefined || this.current !== "ready") return [];
    return readHistory(await this.client.sendRequest("mtmc/history", {}));
  }

  /** The evolutions of a file, the newest first. */
  async lineage(uri: string): Promise<Evolution[]> {
    if (this.client === undefined || this.current !== "ready") return [];
    return readEvolutions(await this.client.sendRequest("mtmc/lineage", { uri }));
  }

  /** The text of a file with a version of an evolution; undefined if there is none. */
  async version(of: VersionOf): Promise<string | undefined> {
    if (this.client === undefined || this.current !== "ready") return undefined;
    const answer: unknown = await this.client.sendRequest("mtmc/version", of);
    return has(answer, { text: "string" }) ? String(answer["text"]) : undefined;
  }

  /** The GPU on which code of a file or folder is measured; empty for the CPU, undefined if unknown. */
  async gpu(uri: string): Promise<string | undefined> {
    if (this.client === undefined || this.current !== "ready") return undefined;
    return readGpu(await this.client.sendRequest("mtmc/device", { uri }));
  }

  /** The report page of a run; undefined if the run does not exist. */
  async report(of: Shown): Promise<ReportPage | undefined> {
    if (this.client === undefined || this.current !== "ready") return undefined;
    return readPage(await this.client.sendRequest("mtmc/report", of));
  }

  /** Suggested inputs of a function in directive syntax; undefined if the function no longer exists. */
  async proposedWorkload(of: Argument): Promise<string | undefined> {
    if (this.client === undefined || this.current !== "ready") return undefined;
    const answer: unknown = await this.client.sendRequest("mtmc/proposedWorkload", of);
    return has(answer, { inputs: "string" }) ? String(answer["inputs"]) : undefined;
  }

  /** Why inputs do not describe those of a function; empty if they do. */
  async workloadError(of: Argument, inputs: string): Promise<string> {
    if (this.client === undefined || this.current !== "ready") return "";
    const answer: unknown = await this.client.sendRequest("mtmc/checkWorkload", { ...of, inputs });
    return has(answer, { error: "string" }) ? String(answer["error"]) : "";
  }

  /** Why there is no function to optimise at a line; empty if there is one, or if that is unknown. */
  async reasonAt(uri: string, line: number): Promise<string> {
    if (this.client === undefined || this.current !== "ready") return "";
    const answer: unknown = await this.client.sendRequest("mtmc/targetAt", { uri, line });
    return has(answer, { reason: "string" }) ? String(answer["reason"]) : "";
  }

  /** The file before and after a step; undefined if the step no longer exists. */
  async step(argument: Argument): Promise<{ before: string; after: string } | undefined> {
    if (this.client === undefined || this.current !== "ready") return undefined;
    const params = { command: "mtmc.diff", arguments: [argument] };
    const answer: unknown = await this.client.sendRequest("workspace/executeCommand", params);
    if (typeof answer !== "object" || answer === null || !("before" in answer) || !("after" in answer)) return undefined;
    return { before: String(answer.before), after: String(answer.after) };
  }

  async dispose(): Promise<void> {
    await this.stop();
    this.tracing.watch.dispose();
    this.log.dispose();
  }
}

/**
 * Creates a client whose messages only go to the log. Otherwise every request that was pending when the server exited would show a
 * message, in addition to the one that explains the exit.
 */
function createLoggingClient({ LanguageClient }: Protocol, server: ServerOptions, options: LanguageClientOptions): LanguageClient {
  class LoggingClient extends LanguageClient {
    override error(message: string, data?: unknown): void {
      super.error(message, data, false);
    }

    override warn(message: string, data?: unknown): void {
      super.warn(message, data, false);
    }

    override info(message: string, data?: unknown): void {
      super.info(message, data, false);
    }
  }
  return new LoggingClient("mtmc", "MTMC", server, options);
}

/** The settings for the server. If `python` is empty, uses the interpreter of the Python extension for the file or folder. */
async function withPython(answer: unknown, scope: string | undefined): Promise<unknown> {
  if (typeof answer !== "object" || answer === null || !("python" in answer)) return answer;
  const settings = Object.fromEntries(Object.entries(answer).filter(([, value]) => !isEmpty(value)));
  const resource = scope === undefined ? vscode.workspace.workspaceFolders?.[0]?.uri : vscode.Uri.parse(scope);
  const python = settings["python"] ?? (await chosenPython(resource));
  return python === undefined ? settings : { ...settings, python };
}

function isEmpty(value: unknown): boolean {
  return value === "" || value === null || (Array.isArray(value) && value.length === 0);
}
