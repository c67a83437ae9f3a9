/** Shared state of runs, jobs and plans. */

import * as vscode from "vscode";
import { planOf, type FailedJob, type JobState, type PastRun, type Review } from "./core/model";
import type { Plan } from "./core/tree";
import type { Server } from "./server";

/** Delay after the last change before the review state is requested. */
const SETTLE_MS = 150;

/** Maximum delay after the first change: a run reports changes more often than that. */
const LATEST_MS = 500;

/** Key of the stored list of files with pending steps, which is restored after a window reload. */
const PENDING_FILES = "pendingFiles";

/** Reviews, jobs and plans of this window. */
export class Runs implements vscode.Disposable {
  reviews: readonly Review[] = [];
  past: readonly PastRun[] = [];
  /** The GPU for runs in the folder of the active editor; empty for the CPU, undefined if unknown. */
  gpu: string | undefined;
  /** The folder (or file outside of any folder) whose device was requested last. */
  private queriedFolder = "";
  /** The newest runs at the last history request: the history changes only with them. */
  private newest = "";
  private readonly jobs = new Map<number, JobState>();
  private readonly begins = new Map<number, number>();
  private readonly plansByTarget = new Map<string, Plan>();
  private readonly failedJobs = new Map<string, FailedJob>();
  private readonly changed = new vscode.EventEmitter<void>();
  private readonly subscriptions: vscode.Disposable[];
  private timer: NodeJS.Timeout | undefined;
  /** When the first change happened that the review state does not contain yet. */
  private changedAt: number | undefined;
  /** Resolves when the stored files are open; before that, the list is not overwritten. */
  private restored: Promise<void> | undefined;
  readonly onChange = this.changed.event;

  constructor(
    private readonly server: Server,
    private readonly storage: vscode.Memento,
  ) {
    this.subscriptions = [
      server.onReviews(() => {
        this.scheduleRefresh();
      }),
      server.onJob((job) => {
        this.updateJob(job);
      }),
      server.onState((state) => {
        if (state !== "ready") this.jobs.clear();
        else this.restored ??= this.restore();
        this.scheduleRefresh();
        void this.askDevice();
      }),
      vscode.window.onDidChangeActiveTextEditor(() => {
        if (this.currentFolder() !== this.queriedFolder) void this.askDevice();
      }),
      vscode.workspace.onDidChangeConfiguration((event) => {
        if (event.affectsConfiguration("mtmc.python")) void this.askDevice();
      }),
      vscode.workspace.onDidChangeTextDocument(({ document }) => {
        if (document.languageId === "python") this.scheduleRefresh();
      }),
      vscode.workspace.onDidCloseTextDocument(() => {
        this.scheduleRefresh();
      }),
      vscode.workspace.onDidDeleteFiles(({ files }) => {
        const deleted = new Set(files.map(String));
        this.reviews = this.reviews.filter(({ uri }) => !deleted.has(uri));
        this.scheduleRefresh();
      }),
    ];
  }

  /** Queued and running jobs. */
  get activeJobs(): JobState[] {
    return [...this.jobs.values()];
  }

  /** Number of pending steps in all files. */
  get pendingCount(): number {
    return this.reviews.reduce((sum, review) => sum + (review.stale ? 0 : review.pending.length), 0);
  }

  /** The last job of each function that failed. */
  get failed(): FailedJob[] {
    return [...this.failedJobs.values()];
  }

  /** When a job began, in milliseconds. */
  began(job: JobState): number {
    return this.begins.get(job.job) ?? Date.now();
  }

  get plans(): Plan[] {
    return [...this.plansByTarget.values()];
  }

  private updateJob(job: JobState): void {
    if (job.state === "queued" || job.state === "running") {
      this.jobs.set(job.job, job);
    } else {
      this.jobs.delete(job.job);
    }
    if (job.seconds > 0) this.begins.set(job.job, Date.now() - job.seconds * 1000);
    const { uri, target, failure } = job;
    if (failure === null) this.failedJobs.delete(`${uri}#${target}`);
    else this.failedJobs.set(`${uri}#${target}`, { uri, target, failure });
    const plan = planOf(job);
    if (plan !== undefined) this.plansByTarget.set(`${job.uri}#${job.target}`, { uri: job.uri, target: job.target, ...plan });
    this.scheduleRefresh();
    this.changed.fire();
  }

  /** Requests the device for runs in the current folder. */
  async askDevice(): Promise<void> {
    const folder = this.currentFolder();
    this.queriedFolder = folder;
    const gpu = folder === "" ? undefined : await this.server.gpu(folder).catch((error: unknown) => {
      this.server.log.warn(String(error));
      return undefined;
    });
    if (folder !== this.queriedFolder) return;
    this.gpu = gpu;
    this.changed.fire();
  }

  /** The folder of the active Python file, or of the last active one. */
  private currentFolder(): string {
    const document = vscode.window.activeTextEditor?.document;
    const file = document?.languageId === "python" && document.uri.scheme === "file" ? document.uri : undefined;
    if (file === undefined && this.queriedFolder !== "") return this.queriedFolder;
    const folder = file === undefined ? vscode.workspace.workspaceFolders?.[0] : vscode.workspace.getWorkspaceFolder(file);
    return (folder?.uri ?? file)?.toString() ?? "";
  }

  private scheduleRefresh(): void {
    clearTimeout(this.timer);
    const now = Date.now();
    this.changedAt ??= now;
    this.timer = setTimeout(() => {
      this.changedAt = undefined;
      void this.refresh();
    }, Math.max(0, Math.min(SETTLE_MS, this.changedAt + LATEST_MS - now)));
  }

  /** Requests the current review state. */
  async refresh(): Promise<void> {
    await this.restored;
    try {
      const answer = await this.server.reviews();
      const open = new Set(vscode.workspace.textDocuments.map(({ uri }) => uri.toString()));
      // The server only knows open files; keep the last known state of closed files.
      this.reviews = [...answer, ...this.reviews.filter(({ uri }) => !open.has(uri))];
      const newest = this.reviews.map((review) => `${review.uri} ${review.run.run}`).join("\n");
      if (newest !== this.newest) {
        this.newest = newest;
        // The steps are shown at once.
        this.changed.fire();
        this.past = await this.server.history();
      }
    } catch (error) {
      // The server may exit during the request. Its state shows that, and the next server is queried again.
      this.server.log.warn(String(error));
      this.reviews = [];
      this.newest = "";
    }
    this.changed.fire();
    this.storePendingFiles();
  }

  /** Stores the files with pending steps: after a reload, VS Code opens a tab only when it becomes visible. */
  private storePendingFiles(): void {
    const uris = [...new Set(this.reviews.filter(({ pending, stale }) => pending.length > 0 && !stale).map(({ uri }) => uri))];
    if (this.server.state === "ready" && String(uris) !== String(this.storage.get(PENDING_FILES, []))) void this.storage.update(PENDING_FILES, uris);
  }

  /** Opens the stored files without showing them, so that the server loads their runs. */
  private async restore(): Promise<void> {
    for (const uri of this.storage.get<string[]>(PENDING_FILES, [])) {
      try {
        await vscode.workspace.openTextDocument(vscode.Uri.parse(uri));
      } catch (error) {
        this.server.log.info(`cannot open ${uri}, which has pending steps: ${String(error)}`);
      }
    }
  }

  dispose(): void {
    clearTimeout(this.timer);
    for (const subscription of this.subscriptions) subscription.dispose();
    this.changed.dispose();
  }
}
