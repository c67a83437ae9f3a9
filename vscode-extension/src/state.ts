/** What is known of runs, shared by everything that shows it. */

import * as vscode from "vscode";
import { planOf, type JobState, type PastRun, type Review } from "./core/model";
import type { Plan } from "./core/tree";
import type { Server } from "./server";

/** How long typing may go on before the server is asked where the reviews stand. */
const SETTLE_MS = 150;

/** Reviews, jobs and plans of this window. */
export class Runs implements vscode.Disposable {
  reviews: readonly Review[] = [];
  past: readonly PastRun[] = [];
  /** The runs that the history was asked for with: it changes only where one of them does. */
  private newest = "";
  private readonly jobs = new Map<number, JobState>();
  private readonly planned = new Map<string, Plan>();
  private readonly changed = new vscode.EventEmitter<void>();
  private readonly subscriptions: vscode.Disposable[];
  private timer: NodeJS.Timeout | undefined;
  readonly onChange = this.changed.event;

  constructor(private readonly server: Server) {
    this.subscriptions = [
      server.onReviews(() => {
        this.soon();
      }),
      server.onJob((job) => {
        this.take(job);
      }),
      server.onState((state) => {
        if (state !== "ready") this.jobs.clear();
        this.soon();
      }),
      vscode.workspace.onDidChangeTextDocument(({ document }) => {
        if (document.languageId === "python") this.soon();
      }),
      vscode.workspace.onDidCloseTextDocument(() => {
        this.soon();
      }),
    ];
  }

  /** Jobs that are not over. */
  get present(): JobState[] {
    return [...this.jobs.values()];
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

  private soon(): void {
    clearTimeout(this.timer);
    this.timer = setTimeout(() => void this.refresh(), SETTLE_MS);
  }

  private async refresh(): Promise<void> {
    try {
      this.reviews = await this.server.reviews();
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
  }

  dispose(): void {
    clearTimeout(this.timer);
    for (const subscription of this.subscriptions) subscription.dispose();
    this.changed.dispose();
  }
}
