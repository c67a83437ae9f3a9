/** What the server tells, checked where it comes in, so that the rest of the extension can rely on it. */

import { has, type Fields } from "./fields";

export interface Position {
  readonly line: number;
  readonly character: number;
}

export interface Change {
  readonly range: { readonly start: Position; readonly end: Position };
  readonly newText: string;
}

export interface Ratio {
  readonly ratio: number;
  readonly low: number;
  readonly high: number;
}

export interface Baseline {
  readonly name: string;
  readonly median_us: number;
  readonly speedup: Ratio | null;
}

export interface Timing {
  readonly median_us: number;
  readonly baselines: readonly Baseline[];
  readonly best: string;
  readonly speed: string;
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
  /** How fast and whether verified, in words; only of accepted steps. */
  readonly outcome: string;
}

export interface Run {
  readonly run: string;
  readonly path: string;
  readonly target: string;
  readonly status: "improved" | "no_gain" | "incorrect" | "unmeasured" | "running";
  readonly environment: Readonly<Record<string, string>> | null;
  readonly started: number;
  /** The language model that took part; empty where none did. */
  readonly model: string;
  readonly steps: readonly Step[];
}

/** Where the newest run of a target stands against the editor's text: an item of `mtmc/reviews`. */
export interface Review {
  readonly uri: string;
  readonly version: number;
  readonly target: string;
  readonly line: number;
  readonly kept: readonly number[];
  readonly pending: readonly number[];
  readonly stale: boolean;
  readonly edited: boolean;
  readonly isActive: boolean;
  /** What keeping the next pending step would change. */
  readonly changes: readonly Change[];
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
  /** What it came to, in words; empty as long as it goes on, where it did not come to its end, and where a question says it. */
  readonly result: string;
  readonly answer: unknown;
}

/** What a command is about. */
export interface Argument {
  readonly uri: string;
  readonly target: string;
  readonly step?: number;
  /** The id of an earlier run than the newest. */
  readonly past?: string;
}

/** A run that is older than its target's newest: an item of `mtmc/history`. */
export interface PastRun {
  readonly run: string;
  readonly uri: string;
  readonly target: string;
  readonly started: number;
  readonly status: Run["status"];
  /** The GPU's name; empty where there was none. */
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
    has(value, { stale: "boolean", edited: "boolean", isActive: "boolean", changes: "array", run: "object" }) &&
    has(value["run"], { run: "string", status: "string", model: "string", steps: "array" }) &&
    (value["run"]["steps"] as unknown[]).every(isStep)
  );
}

/**
 * The answer of `mtmc/reviews`.
 *
 * @throws Error where the server is of a version that says something else.
 */
export function readReviews(answer: unknown): Review[] {
  if (!Array.isArray(answer) || !answer.every(isReview)) {
    throw new Error("The language server answers in another form than this extension knows; update both.");
  }
  return answer;
}

/** The answer of `mtmc/history`; what does not fit is left out. */
export function readHistory(answer: unknown): PastRun[] {
  const kinds = { run: "string", uri: "string", target: "string", started: "number", status: "string", device: "string", steps: "array" } as const;
  return Array.isArray(answer) ? answer.filter((item): item is PastRun & Fields => has(item, kinds)) : [];
}

/** Parameters of `mtmc/runState`; undefined where they do not fit. */
export function readJob(params: unknown): JobState | undefined {
  const kinds = { job: "number", kind: "string", uri: "string", target: "string", state: "string", stage: "string" } as const;
  return has(params, kinds) && has(params, { step: "number", action: "string", result: "string" }) ? (params as unknown as JobState) : undefined;
}

/** The actions of a plan that a job ended with, and for which device; undefined for other jobs. */
export function planOf(job: JobState): { device: string; actions: Action[] } | undefined {
  const answer = job.answer;
  if (!has(answer, { event: "string", actions: "array", device: "object" }) || answer["event"] !== "plan") return undefined;
  const actions = (answer["actions"] as unknown[]).filter((a): a is Action & Fields => has(a, { kind: "string", text: "string" }));
  return { device: String((answer["device"] as Fields)["name"]), actions };
}

/** Whether a job searched for steps, which wait where the user looks: other jobs leave nothing behind that can be seen. */
export function isSearch(job: JobState): boolean {
  return SEARCHES.has(job.kind);
}

const SEARCHES = new Set(["optimize", "resume", "undo", "another"]);

/** How many steps wait, in words. */
export function waiting(count: number): string {
  return count === 1 ? "1 step waits" : `${count} steps wait`;
}

/** Whether a job failed because nothing says what the target's inputs look like. */
export function lacksWorkload(job: JobState): boolean {
  return has(job.answer, { error: "object" }) && (job.answer["error"] as Fields)["code"] === "no-workload";
}

/** Whether something is already the argument of a command. */
export function isArgument(value: unknown): value is Argument {
  return has(value, { uri: "string", target: "string" });
}

/** The step that waits first. */
export function nextStep(review: Review): Step | undefined {
  return review.run.steps.find((step) => step.index === review.pending[0]);
}

/** The run's accepted steps, in order. */
export function acceptedSteps(review: Review): Step[] {
  const shown = new Set([...review.kept, ...review.pending]);
  return review.run.steps.filter((step) => shown.has(step.index));
}

/** The review that a command without an argument is about: the one around a line, else the nearest above, else the first. */
export function reviewAt(reviews: readonly Review[], uri: string, line: number): Review | undefined {
  const here = reviews.filter((review) => review.uri === uri).sort((a, b) => a.line - b.line);
  return here.filter((review) => review.line <= line).at(-1) ?? here[0];
}

/** The next (or previous) review with a pending step, in the order of files and lines, around at the end. */
export function neighbour(reviews: readonly Review[], uri: string, line: number, forward: boolean): Review | undefined {
  const pending = reviews
    .filter((review) => review.pending.length > 0 && !review.stale)
    .sort((a, b) => compare(a.uri, b.uri) || a.line - b.line);
  const place = (review: Review): number => compare(review.uri, uri) || review.line - line;
  return forward
    ? (pending.find((review) => place(review) > 0) ?? pending[0])
    : (pending.filter((review) => place(review) < 0).at(-1) ?? pending.at(-1));
}

function compare(a: string, b: string): number {
  return a < b ? -1 : a > b ? 1 : 0;
}

/** The device a run was measured on, in words. */
export function deviceOf(run: Run | undefined): string {
  return run?.environment == null ? "" : deviceWords(run.environment["gpu"] ?? "");
}

/** A GPU's name, or what is done where there is none. */
export function deviceWords(gpu: string): string {
  return gpu === "" ? "CPU: verified, not timed" : gpu;
}

/** The answer of `mtmc/device`; undefined where it is not known what a run would be measured on. */
export function readGpu(answer: unknown): string | undefined {
  return has(answer, { gpu: "string" }) ? String(answer["gpu"]) : undefined;
}

/** Whether a file brings in torch or triton. */
export function importsTorch(text: string): boolean {
  return /^\s*(?:import|from)\s+(?:torch|triton)\b/m.test(text);
}
