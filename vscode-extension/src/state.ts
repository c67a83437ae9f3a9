/** What is known of runs, shared by everything that shows it. */

import * as vscode from "vscode";
import { planOf, type JobState, type PastRun, type Review } from "./core/model";
import type { Plan } from "./core/tree";
import type { Server } from "./server";

/** How long typing may go on before the server is asked where the reviews stand. */
const SETTLE_MS = 150;

/** Where the files whose steps wait are noted, for the next start of the window. */
const WAITING = "waiting";

/** Reviews, jobs and plans of this window. */
export class Runs implements vscode.Disposable {
  reviews: readonly Review[] = [];
  past: readonly PastRun[] = [];
  /** The GPU that a run in the active editor's folder would be measured on, empty for the CPU; undefined where that is not known. */
  gpu: string | undefined;
  /** The folder, or the file outside of any, that was asked about. */
  private asked = "";
  /** The runs that the history was asked for with: it changes only where one of them does. */
  private newest = "";
  private readonly jobs = new Map<number, JobState>();
  private readonly planned = new Map<string, Plan>();
  private readonly changed = new vscode.EventEmitter<void>();
  private readonly subscriptions: vscode.Disposable[];
  private timer: NodeJS.Timeout | undefined;
  /** Once the files are open that were noted; before, the note is not written anew. */
  private restored: Promise<void> | undefined;
  readonly onChange = this.changed.event;

  constructor(
    private readonly server: Server,
    private readonly notes: vscode.Memento,
  ) {
    this.subscriptions = [
      server.onReviews(() => {
        this.soon();
      }),
      server.onJob((job) => {
        this.take(job);
      }),
      server.onState((state) => {
        if (state !== "ready") this.jobs.clear();
        else this.restored ??= this.restore();
        this.soon();
        void this.askDevice();
      }),
      vscode.window.onDidChangeActiveTextEditor(() => {
        if (this.place() !== this.asked) void this.askDevice();
      }),
      vscode.workspace.onDidChangeConfiguration((event) => {
        if (event.affectsConfiguration("mtmc.python")) void this.askDevice();
      }),
      vscode.workspace.onDidChangeTextDocument(({ document }) => {
        if (document.languageId === "python") this.soon();
      }),
      vscode.workspace.onDidCloseTextDocument(() => {
        this.soon();
      }),
      vscode.workspace.onDidDeleteFiles(({ files }) => {
        const gone = new Set(files.map(String));
        this.reviews = this.reviews.filter(({ uri }) => !gone.has(uri));
        this.soon();
      }),
    ];
  }

  /** Jobs that are not over. */
  get present(): JobState[] {
    return [...this.jobs.values()];
  }

  /** How many steps wait for a decision, in all files. */
  get waiting(): number {
    return this.reviews.reduce((sum, review) => sum + (review.stale ? 0 : review.pending.length), 0);
  }

  get plans(): Plan[] {
    return [...this.planned.values()];
  }

  private take(job: JobState): void {
    if (job.state === "queued" || job.state === "running") {
      this.jobs.set(job.job, job);
    } else {
      this.jobs.delete(job.job);
    }
    const plan = planOf(job);
    if (plan !== undefined) this.planned.set(`${job.uri}#${job.target}`, { uri: job.uri, target: job.target, ...plan });
    this.soon();
    this.changed.fire();
  }

  /** Asks anew what a run would be measured on. */
  async askDevice(): Promise<void> {
    const place = this.place();
    this.asked = place;
    const gpu = place === "" ? undefined : await this.server.gpu(place).catch((error: unknown) => {
      this.server.log.warn(String(error));
      return undefined;
    });
    if (place !== this.asked) return;
    this.gpu = gpu;
    this.changed.fire();
  }

  /** What a run is most likely to be about: the folder of the Python file that is looked at, or was last. */
  private place(): string {
    const document = vscode.window.activeTextEditor?.document;
    const file = document?.languageId === "python" && document.uri.scheme === "file" ? document.uri : undefined;
    if (file === undefined && this.asked !== "") return this.asked;
    const folder = file === undefined ? vscode.workspace.workspaceFolders?.[0] : vscode.workspace.getWorkspaceFolder(file);
    return (folder?.uri ?? file)?.toString() ?? "";
  }

  private soon(): void {
    clearTimeout(this.timer);
    this.timer = setTimeout(() => void this.refresh(), SETTLE_MS);
  }

  /** Asks anew where the reviews stand. */
  async refresh(): Promise<void> {
    await this.restored;
    try {
      const answered = await this.server.reviews();
      const open = new Set(vscode.workspace.textDocuments.map(({ uri }) => uri.toString()));
      // The server knows open files alone; in one that was closed, the steps wait on as they did.
      this.reviews = [...answered, ...this.reviews.filter(({ uri }) => !open.has(uri))];
      const newest = this.reviews.map((review) => `${review.uri} ${review.run.run}`).join("\n");
      if (newest !== this.newest) {
        this.newest = newest;
        this.past = await this.server.history();
      }
    } catch (error) {
      // The server may end while it is asked; its state says so, and the next one is asked anew.
      this.server.log.warn(String(error));
      this.reviews = [];
      this.newest = "";
    }
    this.changed.fire();
    this.note();
  }

  /** Notes the files whose steps wait: VS Code loads a tab again when it is looked at, and not before. */
  private note(): void {
    const uris = [...new Set(this.reviews.filter(({ pending, stale }) => pending.length > 0 && !stale).map(({ uri }) => uri))];
    if (this.server.state === "ready" && String(uris) !== String(this.notes.get(WAITING, []))) void this.notes.update(WAITING, uris);
  }

  /** Opens the files that were noted, without showing them, so that the server brings their runs back. */
  private async restore(): Promise<void> {
    for (const uri of this.notes.get<string[]>(WAITING, [])) {
      try {
        await vscode.workspace.openTextDocument(vscode.Uri.parse(uri));
      } catch (error) {
        this.server.log.info(`steps waited in ${uri}, which cannot be opened: ${String(error)}`);
      }
    }
  }

  dispose(): void {
    clearTimeout(this.timer);
    for (const subscription of this.subscriptions) subscription.dispose();
    this.changed.dispose();
  }
}
