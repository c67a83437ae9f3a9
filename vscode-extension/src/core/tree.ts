/** Rows of the MTMC view as plain values: runs with their steps and plans. */

import { acceptedSteps, deviceOf, deviceText, type Action, type Argument, type FailedJob, type JobState, type PastRun, type PastStep, type Review, type Run, type Step } from "./model";

/** A row of the view. */
export interface Row {
  readonly id: string;
  readonly label: string;
  readonly description: string;
  readonly tooltip: string;
  /** Text for screen readers, if the icon shows information that the label does not contain. */
  readonly spoken?: string;
  /** Name of the icon (empty: no icon), and of its colour. */
  readonly icon: string;
  readonly colour?: string;
  /** Context value for `when` clauses of menus. */
  readonly context: string;
  readonly argument: Argument;
  readonly children: readonly Row[];
  /** Whether the row is initially collapsed. */
  readonly isFolded?: boolean;
}

/** A requested plan. */
export interface Plan {
  readonly uri: string;
  readonly target: string;
  readonly device: string;
  readonly actions: readonly Action[];
}

/** All top-level rows: active jobs, runs, plans of functions without a run, and earlier runs. */
export function rows(reviews: readonly Review[], jobs: readonly JobState[], plans: readonly Plan[], past: readonly PastRun[] = [], failed: readonly FailedJob[] = []): Row[] {
  const runRows = reviews.map((review) => {
    const job = jobs.find((one) => one.uri === review.uri && one.target === review.target);
    return runRow(review, job, plans.find((plan) => isSame(plan, review)));
  });
  const jobRows = jobs.filter((job) => !reviews.some((review) => isSame(job, review))).map(jobRow);
  const planRows = plans.filter((plan) => ![...reviews, ...jobs].some((known) => isSame(plan, known))).map(planOnlyRow);
  return [...failed.map(failedRow), ...jobRows, ...runRows, ...planRows, ...(past.length === 0 ? [] : [historyRow(past)])];
}

/** A failed job: why it failed, with the command that helps as its only child. */
function failedRow(of: FailedJob): Row {
  const { text, button } = of.failure;
  const argument = { uri: of.uri, target: of.target };
  const id = `${of.uri}#${of.target}#failed`;
  const child = { id: `${id}#help`, label: button, description: "", tooltip: text, icon: "arrow-right", context: "failure-help", argument, children: [] };
  return { id, label: of.target, description: text.replace(`${of.target}: `, ""), tooltip: text, spoken: `failed: ${text}`, icon: "error", colour: "testing.iconFailed", context: "failed", argument, children: [child] };
}

function historyRow(past: readonly PastRun[]): Row {
  return {
    id: "history",
    label: "Earlier runs",
    description: String(past.length),
    tooltip: "Runs that were replaced by a newer run",
    icon: "history",
    context: "history",
    argument: { uri: "", target: "" },
    isFolded: true,
    children: past.map(pastRow),
  };
}

function pastRow(past: PastRun): Row {
  const when = new Date(past.started * 1000).toLocaleString();
  const device = deviceText(past.device);
  return {
    id: `history#${past.run}`,
    label: past.target,
    description: `${fileName(past.uri)} · ${STATUS_TEXT[past.status]} · ${when}`,
    tooltip: `Run ${past.run} of ${past.target}: ${STATUS_TEXT[past.status]}\n${device}`,
    icon: "circle-outline",
    context: "past",
    argument: { uri: past.uri, target: past.target, past: past.run },
    isFolded: true,
    children: past.steps.map((step) => pastStepRow(past, step)),
  };
}

function pastStepRow(past: PastRun, step: PastStep): Row {
  const label = `${step.index}. ${step.text}`;
  return {
    id: `history#${past.run}#${step.index}`,
    label,
    ...outcomeText(label, step.status, step.status === "accepted" ? step.outcome : joinReason(step)),
    tooltip: [step.text, step.reason].filter((part) => part !== "").join("\n"),
    ...STEP_ICONS[step.status],
    context: "past-step",
    argument: { uri: past.uri, target: past.target, past: past.run },
    children: [],
  };
}

const STATUS_TEXT: Readonly<Record<Run["status"], string>> = {
  improved: "improved",
  no_gain: "no gain",
  incorrect: "incorrect",
  unmeasured: "not timed",
  running: "unfinished",
};

const STEP_ICONS: Readonly<Record<Step["status"], Pick<Row, "icon" | "colour">>> = {
  accepted: { icon: "pass", colour: "testing.iconPassed" },
  rejected: { icon: "circle-slash", colour: "disabledForeground" },
  failed: { icon: "error", colour: "testing.iconFailed" },
};

function isSame(a: Argument, b: Argument): boolean {
  return a.uri === b.uri && a.target === b.target;
}

/** The file name of a URI, decoded. */
export function fileName(uri: string): string {
  return decodeURIComponent(uri.slice(uri.lastIndexOf("/") + 1));
}

/** What a job does now, and what its run has found. */
export function progress(job: JobState): string {
  return joinParts(job.step > 0 ? `step ${job.step}: ${job.action}: ${job.stage}` : job.stage, job.summary);
}

function jobRow(job: JobState): Row {
  const text = progress(job);
  return {
    ...base(job, "run-active"),
    // Use a different id than the run: VS Code would keep its row collapsed, because it initially has no children.
    id: `${job.uri}#${job.target}#starting`,
    description: `${fileName(job.uri)} · ${text}`,
    tooltip: `${job.kind} of ${job.target}: ${text}`,
    icon: "sync~spin",
    children: activeTrial(job, []),
  };
}

/** The step that a run tries now: the last row below the version that it begins with. */
function activeTrial(job: JobState, steps: readonly Step[]): Row[] {
  if (job.step === 0 || steps.some(({ index }) => index === job.step)) return [];
  const row = base(job, "trial");
  return [{ ...row, id: `${row.id}#trial#${job.step}`, label: capitalized(job.action), description: job.stage, tooltip: `${job.action}: ${job.stage}`, icon: "loading~spin", children: [] }];
}

function capitalized(text: string): string {
  return text.slice(0, 1).toUpperCase() + text.slice(1);
}

/**
 * The trials of a run as a tree: those that were not accepted are below the version that they changed.
 *
 * The accepted steps are one below the other, although each changes the version of the one before: narrow views have no room.
 */
function trialRows(review: Review, job: JobState | undefined): Row[] {
  const accepted = new Set(acceptedSteps(review).map(({ index }) => index));
  const { steps } = review.run;
  const below = (number: number): Row[] => steps.filter((step) => step.parent === number && !accepted.has(step.index)).map(branchRow);
  const branchRow = (step: Step): Row => {
    const row = stepRow(review, step);
    const further = below(step.index);
    return further.length === 0 ? row : { ...row, children: [...row.children, ...further], isFolded: false };
  };
  const hasBranches = steps.some(({ prior }) => prior !== null);
  const active = job === undefined ? [] : activeTrial(job, steps);
  const versions = steps.filter(({ index }) => accepted.has(index));
  const versionRow = (step: Step): Row => {
    const row = stepRow(review, step);
    // The server does not tell which version a search with branches changes now.
    const trials = [...below(step.index), ...(step === versions.at(-1) && !hasBranches ? active : [])];
    // With another id than the row without trials: VS Code would keep that collapsed.
    return trials.length === 0 ? row : { ...row, id: `${row.id}#version`, children: trials };
  };
  const atEnd = hasBranches || versions.length === 0 ? active : [];
  return [...below(0), ...versions.map(versionRow), ...atEnd];
}

function base(of: Argument, context: string): Pick<Row, "id" | "label" | "argument" | "context"> {
  return { id: `${of.uri}#${of.target}`, label: of.target, argument: { uri: of.uri, target: of.target }, context };
}

function runRow(review: Review, job: JobState | undefined, plan: Plan | undefined): Row {
  const { run } = review;
  const state = job !== undefined ? progress(job) : reviewSummary(review);
  const resumable = run.status === "running" && job === undefined && !review.isActive;
  const context = [
    job !== undefined ? "run-active" : resumable ? "run-resumable" : "run",
    ...(review.pending.length > 0 && !review.stale ? ["pending"] : []),
    ...(review.kept.length > 0 ? ["kept"] : []),
  ].join("-");
  const device = deviceOf(run);
  return {
    ...base(review, context),
    description: `${fileName(review.uri)} · ${state}`,
    tooltip: [`${review.target}: ${state}`, ...(device === "" ? [] : [device])].join("\n"),
    ...(job !== undefined ? { icon: "sync~spin" } : runIcon(review)),
    children: [
      // Collapsed, because the steps repeat most of it.
      ...(plan === undefined ? [] : [{ ...planRow(plan), id: `${plan.uri}#${plan.target}#planned`, isFolded: true }]),
      ...trialRows(review, job),
    ],
  };
}

function reviewSummary(review: Review): string {
  if (review.stale) return "changed since it was measured";
  const counts = [
    ...(review.pending.length > 0 ? [`${review.pending.length} pending`] : []),
    ...(review.kept.length > 0 ? [`${review.kept.length} kept`] : []),
  ];
  // The version of the last step is the result of the run.
  const last = acceptedSteps(review).at(-1);
  const gain = last?.timing == null ? STATUS_TEXT[review.run.status] : (last.outcome.split(" · ")[0] ?? "");
  return [gain, ...counts].join(" · ");
}

function runIcon(review: Review): Pick<Row, "icon" | "colour"> {
  if (review.stale) return { icon: "history" };
  if (review.pending.length > 0) return { icon: "circle-filled", colour: "charts.yellow" };
  if (review.kept.length > 0) return { icon: "pass-filled", colour: "testing.iconPassed" };
  if (review.run.status === "incorrect") return { icon: "error", colour: "testing.iconFailed" };
  return { icon: "circle-outline" };
}

function stepRow(review: Review, step: Step): Row {
  const argument = { uri: review.uri, target: review.target, step: step.index };
  const isKept = review.kept.includes(step.index);
  const isPending = review.pending.includes(step.index);
  const activeSuffix = review.isActive ? "-active" : "";
  const isAccepted = isPending || isKept;
  // Only accepted steps are counted, here and everywhere else.
  const name = isAccepted ? `${step.position} ${step.title}` : step.action.text;
  const look = isPending
    ? { icon: step.reviewed ? "eye" : "circle-filled", colour: "charts.yellow", word: step.reviewed ? "pending · reviewed" : "pending" }
    : isKept
      ? { icon: "pass-filled", colour: "testing.iconPassed", word: "kept" }
      : { ...STEP_ICONS[step.status], word: step.status };
  const outcome = isAccepted ? joinParts(step.outcome, isPending && step.reviewed ? "reviewed" : "") : joinReason(step);
  const context = review.stale
    ? "step-stale"
    : isPending
      ? `step-pending${activeSuffix}`
      : isKept
        ? `step-kept${activeSuffix}`
        : "tried";
  return {
    id: `${review.uri}#${review.target}#${step.index}`,
    label: name,
    // The row of the run already says that it was not timed.
    ...outcomeText(name, look.word, isAccepted && step.timing === null ? outcome.replace(/^not timed · /, "") : outcome),
    tooltip: [isAccepted ? `${step.title}\n${step.numbers}` : step.action.text, step.action.rationale, step.reason].filter((part) => part !== "").join("\n"),
    icon: look.icon,
    ...(look.colour === undefined ? {} : { colour: look.colour }),
    context,
    argument,
    // Narrow views cut the reason off behind the name of the step.
    ...(isAccepted || step.reason === "" ? { children: [] } : { children: [whyRow(review, step)], isFolded: true }),
  };
}

function whyRow(review: Review, { index, reason }: Step): Row {
  const row = base(review, "reason");
  return { ...row, id: `${row.id}#${index}#reason`, label: reason, description: "", tooltip: reason, icon: "", children: [] };
}

/** Why a trial was not accepted: `rejected: not faster: 0.98x (0.97 to 0.99) over eager`. */
function joinReason({ status, reason }: Pick<Step, "status" | "reason">): string {
  return reason === "" ? "" : `${status}: ${reason}`;
}

function planRow(plan: Plan): Row {
  return {
    ...base(plan, "plan"),
    id: `${plan.uri}#${plan.target}#plan`,
    label: "Plan",
    description: plan.actions.length === 0 ? "no action is predicted to be worth trying" : `${plan.actions.length} ${plan.actions.length === 1 ? "action" : "actions"} · ${plan.device}`,
    tooltip: `Actions to try on ${plan.device}, best first. Times are estimates.`,
    icon: "list-ordered",
    children: plan.actions.map((action, index) => plannedRow(plan, action, index)),
  };
}

function plannedRow(plan: Plan, action: Action, index: number): Row {
  return {
    ...base(plan, "planned"),
    id: `${plan.uri}#${plan.target}#plan#${index}`,
    label: `${index + 1}. ${action.text}`,
    description: action.expected === undefined ? "" : `estimated saving ${action.expected.saved_us.toFixed(0)} us`,
    tooltip: [action.text, action.rationale].filter((part) => part !== "").join("\n"),
    icon: "lightbulb",
    children: action.rationale === "" ? [] : [reasonRow(plan, index, action.rationale)],
  };
}

/** The outcome of a step. Its icon shows whether it is pending or kept, because narrow views have little room. */
function outcomeText(label: string, word: string, outcome: string): { description: string; spoken: string } {
  return { description: outcome === "" ? word : outcome, spoken: joinParts(label, word, outcome) };
}

function joinParts(...parts: readonly string[]): string {
  return parts.filter((part) => part !== "").join(" · ");
}

function reasonRow(plan: Plan, index: number, reason: string): Row {
  const id = `${plan.uri}#${plan.target}#plan#${index}#reason`;
  return { ...base(plan, "reason"), id, label: reason, description: "", tooltip: reason, icon: "", children: [] };
}

function planOnlyRow(plan: Plan): Row {
  return {
    ...base(plan, "plan-only"),
    description: fileName(plan.uri),
    tooltip: `The plan for ${plan.target}`,
    icon: "list-ordered",
    children: [planRow(plan)],
  };
}
