/** The language server's process: start, restart, failure, and what it is asked. */

import { mkdirSync } from "node:fs";
import * as vscode from "vscode";
import type { ErrorHandler, ExecuteCommandSignature, LanguageClient, LanguageClientOptions, ServerOptions } from "vscode-languageclient/node";
import { has } from "./core/fields";
import { failure, installTarget, ISOLATED, SERVER_MODULE } from "./core/interpreters";
import { readGpu, readHistory, readJob, readReviews, type Argument, type JobState, type PastRun, type Review } from "./core/model";
import { readPage, type ReportPage, type Shown } from "./core/panel";
import { chosenPython, findServer, install, installSpec, type Ready } from "./python";
import { tracing } from "./tracing";

/** Commands that run code of the workspace. */
const RUNNING = new Set(["optimize", "plan", "measure", "verify", "resume", "undo", "tryAnother"].map((name) => `mtmc.${name}`));

/** The protocol's half of the client: most of the extension's code, so it is not loaded before there is a server to talk to. */
type Protocol = typeof import("vscode-languageclient/node");

/** How often the server may end by itself in the time below, before it is left alone. */
const MOST_ENDS = 4;
const PATIENCE_MS = 180_000;

/** What the server is doing. */
export type ServerState = "stopped" | "installing" | "starting" | "ready" | "failed";

/** Answers a command in place of the server, or changes its argument. */
export type CommandHandler = (command: string, args: unknown[], next: ExecuteCommandSignature) => Promise<unknown>;

/** The one language server of this window. */
export class Server implements vscode.Disposable {
  readonly log = vscode.window.createOutputChannel("MTMC", { log: true });
  private readonly traced = tracing(this.log);
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
  /** The server ended by itself; true where it is started again. */
  readonly onEnd = this.ended.event;

  /**
   * @param folder where the server's process runs: outside the workspace, whose files pip would import.
   * @param handler what is done with each of our commands.
   */
  constructor(
    private readonly folder: string,
    private readonly handler: CommandHandler,
  ) {}

  get state(): ServerState {
    return this.current;
  }

  /** Whether the server is ready, or becomes so: false where it fails first. */
  async whenReady(): Promise<boolean> {
    if (this.current === "ready") return true;
    return new Promise((resolve) => {
      const waiting = this.onState((state) => {
        if (state === "ready" || state === "stopped") {
          waiting.dispose();
          resolve(state === "ready");
        }
      });
    });
  }

  /** The interpreter the server runs in, once it was found. */
  get python(): string | undefined {
    return this.interpreter?.path;
  }

  /** Starts the server; where it cannot be, says why and offers what helps. A start under way is not begun again. */
  start(): Promise<void> {
    this.starting ??= this.begin().finally(() => {
      this.starting = undefined;
    });
    return this.starting;
  }

  private async begin(): Promise<void> {
    if (this.client !== undefined) return;
    this.become("starting");
    mkdirSync(this.folder, { recursive: true });
    const { ready, probed } = await findServer(this.folder);
    for (const { candidate, probe } of probed) {
      this.log.info(`${candidate.path} (${candidate.from}): ${JSON.stringify(probe)}`);
    }
    this.interpreter = ready;
    if (ready === undefined) {
      this.become("failed");
      // Not awaited: the start is over, and the question may stand for long.
      void this.offer(failure(probed, installSpec()), installTarget(probed)?.path);
      return;
    }
    this.client = this.makeClient(await import("vscode-languageclient/node"), ready);
    try {
      await this.client.start();
    } catch (error) {
      this.log.error(String(error));
      this.become("failed");
      void this.offer(`The language server did not start in ${ready.path}; the log says why.`, undefined);
    }
  }

  private makeClient(protocol: Protocol, { path, launcher }: Ready): LanguageClient {
    let hasRun = false;
    const options: LanguageClientOptions = {
      documentSelector: [{ scheme: "file", language: "python" }],
      outputChannel: this.log,
      traceOutputChannel: this.traced.channel,
      initializationOptions: { trusted: vscode.workspace.isTrusted, runState: true, diffView: true, offersWorkload: true, showsResults: true },
      errorHandler: this.errorHandler(protocol, () => hasRun),
      // Whoever started it says that it failed.
      initializationFailedHandler: () => false,
      middleware: {
        executeCommand: (command, args, next) => this.execute(protocol, command, args, next),
        handleWorkDoneProgress: (token, params, next) => {
          // Our own status bar item has the run, and can cancel it; a second one beside it would say the same.
          if (params.kind === "end") next(token, params);
        },
        workspace: {
          configuration: async (params, token, next) => {
            const answers: unknown = await next(params, token);
            if (!Array.isArray(answers)) return [];
            return Promise.all(answers.map((answer: unknown, place) => withPython(answer, params.items[place]?.scopeUri)));
          },
        },
      },
    };
    const run = { command: path, args: [ISOLATED, launcher, SERVER_MODULE], options: { cwd: this.folder } };
    const client = quiet(protocol, { run, debug: run }, options);
    client.onDidChangeState(({ newState }) => {
      const { State } = protocol;
      hasRun ||= newState === State.Running;
      if (client === this.client) {
        this.become(newState === State.Running ? "ready" : newState === State.Starting ? "starting" : "failed");
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

  /** A server that ends by itself is started again, unless it did so too often; either way it is said what became of it. */
  private errorHandler({ CloseAction, ErrorAction }: Protocol, hasRun: () => boolean): ErrorHandler {
    let ends: number[] = [];
    return {
      // The library writes it to the log; where the server ended, that is told below.
      error: () => ({ action: ErrorAction.Continue, handled: true }),
      closed: () => {
        // One that never ran is told of where it was started.
        if (!hasRun()) return { action: CloseAction.DoNotRestart, handled: true };
        const now = Date.now();
        ends = [...ends.filter((end) => now - end < PATIENCE_MS), now];
        const again = ends.length <= MOST_ENDS && this.current === "ready";
        this.log.error(`the language server ended by itself${again ? "; it is started again" : ""}`);
        this.ended.fire(again);
        return { action: again ? CloseAction.Restart : CloseAction.DoNotRestart, handled: true };
      },
    };
  }

  private async execute(protocol: Protocol, command: string, args: unknown[], next: ExecuteCommandSignature): Promise<unknown> {
    if (RUNNING.has(command) && !vscode.workspace.isTrusted) {
      const manage = "Manage trust";
      const words = "This runs the workspace's code, and the workspace is not trusted. Nothing was run.";
      if ((await vscode.window.showWarningMessage(words, manage)) === manage) {
        await vscode.commands.executeCommand("workbench.trust.manage");
      }
      return undefined;
    }
    try {
      return await this.handler(command, args, next);
    } catch (error) {
      // The server ended meanwhile: that is told, and this command's end with it.
      if (error instanceof protocol.ResponseError && error.code === protocol.ErrorCodes.MessageWriteError) return undefined;
      throw error;
    }
  }

  private async offer(message: string, target: string | undefined): Promise<void> {
    const [put, settings, log] = ["Install", "Open settings", "Show the log"];
    const choices = target === undefined ? [settings, log] : [put, settings, log];
    const answer = await vscode.window.showErrorMessage(message, ...choices);
    if (answer === put && target !== undefined) await this.installInto(target);
    if (answer === settings) await vscode.commands.executeCommand("workbench.action.openSettings", "mtmc.serverPython");
    if (answer === log) this.log.show();
  }

  /** Installs the server into the interpreter that was found, and starts it. */
  async install(): Promise<void> {
    const { ready, probed } = await findServer(this.folder);
    const target = ready?.path ?? installTarget(probed)?.path;
    if (target === undefined) {
      await this.offer(failure(probed), undefined);
    } else {
      await this.installInto(target);
    }
  }

  private async installInto(python: string): Promise<void> {
    const title = `Installing mtmc-lsp into ${python}`;
    const where = vscode.ProgressLocation.Notification;
    const before = this.current;
    this.become("installing");
    const installing = (): Promise<boolean> =>
      install(python, this.folder).catch((error: unknown) => {
        this.log.error(String(error));
        return false;
      });
    if (await vscode.window.withProgress({ location: where, title }, installing)) {
      // It has said what there was to say; where it failed it stays open.
      await vscode.commands.executeCommand("workbench.action.closePanel");
      await this.restart();
    } else {
      this.become(before);
      void vscode.window.showErrorMessage(`pip could not install mtmc-lsp into ${python}; the terminal says why.`);
    }
  }

  /** Ends the server, and starts it in the interpreter that is found now. */
  async restart(): Promise<void> {
    await this.starting;
    await this.stop();
    await this.start();
  }

  private async stop(): Promise<void> {
    const client = this.client;
    this.client = undefined;
    this.become("stopped");
    // One that failed to start is not running, and cannot be stopped.
    if (client?.isRunning() === true) await client.stop();
    await client?.dispose();
  }

  private become(state: ServerState): void {
    if (state === this.current) return;
    this.current = state;
    void vscode.commands.executeCommand("setContext", "mtmc.serverReady", state === "ready");
    void vscode.commands.executeCommand("setContext", "mtmc.serverComes", state === "starting" || state === "installing");
    this.stateChanged.fire(state);
  }

  /** Where the runs of every open file stand; none while there is no server. */
  async reviews(): Promise<Review[]> {
    if (this.client === undefined || this.current !== "ready") return [];
    return readReviews(await this.client.sendRequest("mtmc/reviews", {}));
  }

  /** Runs of open files that are older than their target's newest. */
  async history(): Promise<PastRun[]> {
    if (this.client === undefined || this.current !== "ready") return [];
    return readHistory(await this.client.sendRequest("mtmc/history", {}));
  }

  /** The GPU that the code of a file or folder would be measured on, empty for the CPU; undefined where that cannot be told. */
  async gpu(uri: string): Promise<string | undefined> {
    if (this.client === undefined || this.current !== "ready") return undefined;
    return readGpu(await this.client.sendRequest("mtmc/device", { uri }));
  }

  /** A run as a page; undefined where there is none. */
  async report(of: Shown): Promise<ReportPage | undefined> {
    if (this.client === undefined || this.current !== "ready") return undefined;
    return readPage(await this.client.sendRequest("mtmc/report", of));
  }

  /** Inputs that a function could have, as a directive says them; undefined where it is gone. */
  async proposedWorkload(of: Argument): Promise<string | undefined> {
    if (this.client === undefined || this.current !== "ready") return undefined;
    const answer: unknown = await this.client.sendRequest("mtmc/proposedWorkload", of);
    return has(answer, { inputs: "string" }) ? String(answer["inputs"]) : undefined;
  }

  /** The file before and after a step; undefined where there is none any more. */
  async step(argument: Argument): Promise<{ before: string; after: string } | undefined> {
    if (this.client === undefined || this.current !== "ready") return undefined;
    const params = { command: "mtmc.diff", arguments: [argument] };
    const answer: unknown = await this.client.sendRequest("workspace/executeCommand", params);
    if (typeof answer !== "object" || answer === null || !("before" in answer) || !("after" in answer)) return undefined;
    return { before: String(answer.before), after: String(answer.after) };
  }

  async dispose(): Promise<void> {
    await this.stop();
    this.traced.watch.dispose();
    this.log.dispose();
  }
}

/**
 * The protocol's client, whose own words go to the log alone: each request that a server which ended leaves unanswered would be a
 * message of its own, beside the one that says what happened.
 */
function quiet({ LanguageClient }: Protocol, server: ServerOptions, options: LanguageClientOptions): LanguageClient {
  class Quiet extends LanguageClient {
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
  return new Quiet("mtmc", "MTMC", server, options);
}

/** Settings as the server gets them: where no interpreter is set for the user's code, the Python extension's for the file or folder. */
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
