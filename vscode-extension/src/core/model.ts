/** Types of the server's answers, with validation, so that the rest of the extension can rely on them. */

import { has, type Fields } from "./fields";

export interface Ratio {
  readonly ratio: number;
  readonly low: number;
  readonly high: number;
}

export interface Baseline {
  readonly name: string;
  readonly median_us: number;
  readonly speedup: Ratio | null;
  /** The version compared with this baseline, beyond noise; null if it could not run. */
  readonly speed: string | null;
}

export interface Timing {
  readonly median_us: number;
  readonly baselines: readonly Baseline[];
  readonly best: string;
  readonly method: string;
  readonly roofline: number;
}

export interface Check {
  readonly name: string;
  readonly status: string;
  readonly case?: string;
  readonly detail?: string;
}

export interface Verdict {
  readonly status: string;
  readonly mode: string;
  readonly checks: readonly Check[];
  readonly error?: number;
  readonly reference_error?: number;
  readonly reason?: string;
}

export interface Action {
  readonly kind: string;
  readonly text: string;
  readonly rationale: string;
  readonly expected?: { readonly saved_us: number };
}

export interface Step {
  readonly index: number;
  readonly action: Action;
  readonly status: "accepted" | "rejected" | "failed";
  readonly reason: string;
  readonly diff: string;
  readonly verdict: Verdict | null;
  readonly timing: Timing | null;
  /** Number of the step whose version it changed; 0 for the user's code. */
  readonly parent: number;
  /** Probability of the action by the policy; null in a greedy search, which only changes the last accepted version. */
  readonly prior: number | null;
  /** The words for accepted steps: what it does, its number among them (`2/4`), how fast and whether verified, and all numbers. */
  readonly title: string;
  readonly position: string;
  readonly outcome: string;
  readonly numbers: string;
  /** Whether the user marked the lines that it adds as reviewed. */
  readonly reviewed: boolean;
}

export interface Run {
  readonly run: string;
  readonly path: string;
  readonly target: string;
  readonly status: "improved" | "no_gain" | "incorrect" | "unmeasured" | "running";
  readonly environment: Readonly<Record<string, string>> | null;
  readonly started: number;
  /** The language model of the run; empty if none was used. */
  readonly model: string;
  readonly steps: readonly Step[];
}

/** The newest run of a target compared with the editor's text: an item of `mtmc/reviews`. */
export interface Review {
  readonly uri: string;
  readonly version: number;
  readonly target: string;
  readonly line: number;
  readonly kept: readonly number[];
  readonly pending: readonly number[];
  /** The pending step that is shown. */
  readonly selected: number | null;
  readonly stale: boolean;
  readonly edited: boolean;
  readonly isActive: boolean;
  readonly run: Run;
}

/** A job: `mtmc/runState`. */
export interface JobState {
  readonly job: number;
  readonly kind: string;
  readonly uri: string;
  readonly target: string;
  readonly state: "queued" | "running" | "done" | "failed" | "cancelled";
  readonly stage: string;
  readonly step: number;
  readonly action: string;
  /** What a run has done so far; empty before its first step. */
  readonly summary: string;
  /** How long the job has run. */
  readonly seconds: number;
  /** Summary of the result; empty while the job is active, if it did not finish, and if a question shows the result. */
  readonly result: string;
  readonly answer: unknown;
  /** Why the job failed, and the command that helps most; null if it did not fail. */
  readonly failure: Failure | null;
}

/** A failure in words, with one button. */
export interface Failure {
  readonly text: string;
  readonly button: string;
  readonly command: string;
}

/** Argument of a command. */
export interface Argument {
  readonly uri: string;
  readonly target: string;
  readonly step?: number;
  /** Id of an earlier run; default: the newest run. */
  readonly past?: string;
}

/** An earlier run of a target: an item of `mtmc/history`. */
export interface PastRun {
  readonly run: string;
  readonly uri: string;
  readonly target: string;
  readonly started: number;
  readonly status: Run["status"];
  /** Name of the GPU; empty without a GPU. */
  readonly device: string;
  readonly steps: readonly PastStep[];
}

export interface PastStep {
  readonly index: number;
  readonly text: string;
  readonly status: Step["status"];
  readonly reason: string;
  readonly outcome: string;
}

function isStep(value: unknown): value is Step {
  return (
    has(value, { index: "number", action: "object", status: "string", reason: "string" }) &&
    has(value["action"], { kind: "string", text: "string" })
  );
}

function isReview(value: unknown): value is Review {
  return (
    has(value, { uri: "string", version: "number", target: "string", line: "number", kept: "array", pending: "array" }) &&
    has(value, { stale: "boolean", edited: "boolean", isActive: "boolean", run: "object" }) &&
    has(value["run"], { run: "string", status: "string", model: "string", steps: "array" }) &&
    (value["run"]["steps"] as unknown[]).every(isStep)
  );
}

/**
 * Validates the answer of `mtmc/reviews`.
 *
 * @throws Error if the server has an incompatible version.
 */
export function readReviews(answer: unknown): Review[] {
  if (!Array.isArray(answer) || !answer.every(isReview)) {
    throw new Error("The language server and this extension have incompatible versions: update both.");
  }
  return answer;
}

/** Validates the answer of `mtmc/history`; invalid items are ignored. */
export function readHistory(answer: unknown): PastRun[] {
  const kinds = { run: "string", uri: "string", target: "string", started: "number", status: "string", device: "string", steps: "array" } as const;
  return Array.isArray(answer) ? answer.filter((item): item is PastRun & Fields => has(item, kinds)) : [];
}

/** Validates the parameters of `mtmc/runState`; undefined if they are invalid. */
export function readJob(params: unknown): JobState | undefined {
  const kinds = { job: "number", kind: "string", uri: "string", target: "string", state: "string", stage: "string" } as const;
  return has(params, kinds) && has(params, { step: "number", action: "string", summary: "string", seconds: "number", result: "string" }) ? (params as unknown as JobState) : undefined;
}

/** A failed job, as the view and a message show it. */
export interface FailedJob extends Argument {
  readonly failure: Failure;
}

/** The plan and its device in the result of a job; undefined for other jobs. */
export function planOf(job: JobState): { device: string; actions: Action[] } | undefined {
  const answer = job.answer;
  if (!has(answer, { event: "string", actions: "array", device: "object" }) || answer["event"] !== "plan") return undefined;
  const actions = (answer["actions"] as unknown[]).filter((a): a is Action & Fields => has(a, { kind: "string", text: "string" }));
  return { device: String((answer["device"] as Fields)["name"]), actions };
}

/** Whether a job searches for steps. Its result is visible in the editor, unlike the result of other jobs. */
export function isSearch(job: JobState): boolean {
  return SEARCH_KINDS.has(job.kind);
}

const SEARCH_KINDS = new Set(["optimize", "resume", "undo", "another", "certify", "keepVersion"]);

/** The number of pending steps as text. */
export function pendingText(count: number): string {
  return count === 1 ? "1 pending step" : `${count} pending steps`;
}

/** Whether a job failed because the target has no example inputs. */
export function lacksWorkload(job: JobState): boolean {
  return has(job.answer, { error: "object" }) && (job.answer["error"] as Fields)["code"] === "no-workload";
}

/** Whether a value is a command argument. */
export function isArgument(value: unknown): value is Argument {
  return has(value, { uri: "string", target: "string" });
}

/** The pending step that is shown; undefined if none is pending. */
export function selectedStep(review: Review): Step | undefined {
  return review.run.steps.find((step) => step.index === review.selected);
}

/** The pending step after (or before) the selected one; undefined at the end. */
export function neighbour(review: Review, forward: boolean): number | undefined {
  const at = review.selected === null ? -1 : review.pending.indexOf(review.selected);
  return at < 0 ? undefined : review.pending[forward ? at + 1 : at - 1];
}

/** The run's accepted steps, in order. */
export function acceptedSteps(review: Review): Step[] {
  const shown = new Set([...review.kept, ...review.pending]);
  return review.run.steps.filter((step) => shown.has(step.index));
}

/** The review at a line, for commands without an argument: the nearest one above the line, else the first one. */
export function reviewAt(reviews: readonly Review[], uri: string, line: number): Review | undefined {
  const here = reviews.filter((review) => review.uri === uri).sort((a, b) => a.line - b.line);
  return here.filter((review) => review.line <= line).at(-1) ?? here[0];
}

/** The next (or previous) review with a pending step, ordered by file and line, wrapping around at the end. */
export function adjacentReview(reviews: readonly Review[], uri: string, line: number, forward: boolean): Review | undefined {
  const pending = reviews
    .filter((review) => review.pending.length > 0 && !review.stale)
    .sort((a, b) => compare(a.uri, b.uri) || a.line - b.line);
  const order = (review: Review): number => compare(review.uri, uri) || review.line - line;
  return forward
    ? (pending.find((review) => order(review) > 0) ?? pending[0])
    : (pending.filter((review) => order(review) < 0).at(-1) ?? pending.at(-1));
}

function compare(a: string, b: string): number {
  return a < b ? -1 : a > b ? 1 : 0;
}

/** The device of a run as text. */
export function deviceOf(run: Run | undefined): string {
  return run?.environment == null ? "" : deviceText(run.environment["gpu"] ?? "");
}

/** The name of the GPU, or a text for runs without one. */
export function deviceText(gpu: string): string {
  return gpu === "" ? "CPU: verified, not timed" : gpu;
}

/** Validates the answer of `mtmc/device`; undefined if the device is unknown. */
export function readGpu(answer: unknown): string | undefined {
  return has(answer, { gpu: "string" }) ? String(answer["gpu"]) : undefined;
}

/** Whether a file imports torch or triton. */
export function importsTorch(text: string): boolean {
  return /^\s*(?:import|from)\s+(?:torch|triton)\b/m.test(text);
}
