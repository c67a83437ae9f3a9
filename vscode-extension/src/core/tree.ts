/** The MTMC view as plain values: runs, and their steps or plan below. */

import { acceptedSteps, deviceOf, deviceWords, type Action, type Argument, type JobState, type PastRun, type PastStep, type Review, type Run, type Step } from "./model";

/** A row of the view. */
export interface Row {
  readonly id: string;
  readonly label: string;
  readonly description: string;
  readonly tooltip: string;
  /** What a screen reader says, where the icon tells something that the words leave out. */
  readonly spoken?: string;
  /** Name of the icon, empty where there is none, and of its colour where it has one. */
  readonly icon: string;
  readonly colour?: string;
  /** What `when` clauses of the menus look at. */
  readonly context: string;
  readonly argument: Argument;
  readonly children: readonly Row[];
  /** Whether its children are hidden at first. */
  readonly isFolded?: boolean;
}

/** A plan that was asked for. */
export interface Plan {
  readonly uri: string;
  readonly target: string;
  readonly device: string;
  readonly actions: readonly Action[];
}

/** Every row: what runs, what was run, plans of what was not, and below all earlier runs. */
export function rows(reviews: readonly Review[], jobs: readonly JobState[], plans: readonly Plan[], past: readonly PastRun[] = []): Row[] {
  const found = reviews.map((review) => {
    const job = jobs.find((one) => one.uri === review.uri && one.target === review.target);
    return runRow(review, job, plans.find((plan) => isSame(plan, review)));
  });
  const others = jobs.filter((job) => !reviews.some((review) => isSame(job, review))).map(jobRow);
  const planned = plans.filter((plan) => ![...reviews, ...jobs].some((known) => isSame(plan, known))).map(planOnlyRow);
  return [...others, ...found, ...planned, ...(past.length === 0 ? [] : [historyRow(past)])];
}

function historyRow(past: readonly PastRun[]): Row {
  return {
    id: "history",
    label: "Earlier runs",
    description: String(past.length),
    tooltip: "Runs that a newer one has taken the place of",
    icon: "history",
    context: "history",
    argument: { uri: "", target: "" },
    isFolded: true,
    children: past.map(pastRow),
  };
}

function pastRow(past: PastRun): Row {
  const when = new Date(past.started * 1000).toLocaleString();
  const device = deviceWords(past.device);
  return {
    id: `history#${past.run}`,
    label: past.target,
    description: `${fileName(past.uri)} · ${WORDS[past.status]} · ${when}`,
    tooltip: `Run ${past.run} of ${past.target}: ${WORDS[past.status]}\n${device}`,
    icon: "circle-outline",
    context: "past",
    argument: { uri: past.uri, target: past.target, past: past.run },
    isFolded: true,
    children: past.steps.map((step) => pastStepRow(past, step)),
  };
}

function pastStepRow(past: PastRun, step: PastStep): Row {
  const { what, where } = parted(step.text);
  return {
    id: `history#${past.run}#${step.index}`,
    label: `${step.index}. ${what}`,
    ...described(`${step.index}. ${what}`, step.status, step.outcome, where),
    tooltip: [step.text, step.reason].filter((part) => part !== "").join("\n"),
    ...STEP_ICONS[step.status],
    context: "past-step",
    argument: { uri: past.uri, target: past.target, past: past.run },
    children: [],
  };
}

const WORDS: Readonly<Record<Run["status"], string>> = {
  improved: "improved",
  no_gain: "no gain",
  incorrect: "not correct",
  unmeasured: "not timed",
  running: "ended early",
};

const STEP_ICONS: Readonly<Record<Step["status"], Pick<Row, "icon" | "colour">>> = {
  accepted: { icon: "pass", colour: "testing.iconPassed" },
  rejected: { icon: "circle-slash", colour: "disabledForeground" },
  failed: { icon: "error", colour: "testing.iconFailed" },
};

function isSame(a: Argument, b: Argument): boolean {
  return a.uri === b.uri && a.target === b.target;
}

/** The last part of a URI, as people read it. */
export function fileName(uri: string): string {
  return decodeURIComponent(uri.slice(uri.lastIndexOf("/") + 1));
}

function progress(job: JobState): string {
  return job.step > 0 ? `step ${job.step}: ${job.action}: ${job.stage}` : job.stage;
}

function jobRow(job: JobState): Row {
  const words = progress(job);
  return {
    ...base(job, "run-going"),
    // Another row than the run's, which has steps: VS Code would leave that folded, since it had nothing to show at first.
    id: `${job.uri}#${job.target}#starting`,
    description: `${fileName(job.uri)} · ${words}`,
    tooltip: `${job.kind} of ${job.target}: ${words}`,
    icon: "sync~spin",
    children: [],
  };
}

function base(of: Argument, context: string): Pick<Row, "id" | "label" | "argument" | "context"> {
  return { id: `${of.uri}#${of.target}`, label: of.target, argument: { uri: of.uri, target: of.target }, context };
}

function runRow(review: Review, job: JobState | undefined, plan: Plan | undefined): Row {
  const { run } = review;
  const state = job !== undefined ? progress(job) : standing(review);
  const resumable = run.status === "running" && job === undefined && !review.isActive;
  const context = [
    job !== undefined ? "run-going" : resumable ? "run-resumable" : "run",
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
      // Folded now: the steps tell most of it again.
      ...(plan === undefined ? [] : [{ ...planRow(plan), id: `${plan.uri}#${plan.target}#planned`, isFolded: true }]),
      ...run.steps.map((step) => stepRow(review, step)),
    ],
  };
}

function standing(review: Review): string {
  if (review.stale) return "changed since it was measured";
  const counts = [
    ...(review.pending.length > 0 ? [`${review.pending.length} pending`] : []),
    ...(review.kept.length > 0 ? [`${review.kept.length} kept`] : []),
  ];
  // The version of the last step is what the run came to.
  const last = acceptedSteps(review).at(-1);
  const gain = last?.timing == null ? WORDS[review.run.status] : (last.outcome.split(" · ")[0] ?? "");
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
  const going = review.isActive ? "-going" : "";
  const { what, where } = parted(step.action.text);
  const at = isPending
    ? { icon: "circle-filled", colour: "charts.yellow", word: "pending" }
    : isKept
      ? { icon: "pass-filled", colour: "testing.iconPassed", word: "kept" }
      : { ...STEP_ICONS[step.status], word: step.status };
  const context = review.stale
    ? "step-stale"
    : step.index === review.pending[0]
      ? `step-next${going}`
      : isKept && step.index === review.kept.at(-1)
        ? `step-last${going}`
        : isKept || isPending
          ? "step-other"
          : "tried";
  return {
    id: `${review.uri}#${review.target}#${step.index}`,
    label: `${step.index}. ${what}`,
    // That a run was not timed stands with the run.
    ...described(`${step.index}. ${what}`, at.word, step.timing === null ? step.outcome.replace(/^.* · /, "") : step.outcome, where),
    tooltip: [step.action.text, step.action.rationale, step.reason].filter((part) => part !== "").join("\n"),
    icon: at.icon,
    ...(at.colour === undefined ? {} : { colour: at.colour }),
    context,
    argument,
    children: [],
  };
}

function planRow(plan: Plan): Row {
  return {
    ...base(plan, "plan"),
    id: `${plan.uri}#${plan.target}#plan`,
    label: "Plan",
    description: plan.actions.length === 0 ? "nothing is predicted to be worth trying" : `${plan.actions.length} ${plan.actions.length === 1 ? "action" : "actions"} · ${plan.device}`,
    tooltip: `What could be tried first on ${plan.device}, best first. Times are estimates.`,
    icon: "list-ordered",
    children: plan.actions.map((action, place) => plannedRow(plan, action, place)),
  };
}

function plannedRow(plan: Plan, action: Action, place: number): Row {
  const { what, where } = parted(action.text);
  return {
    ...base(plan, "planned"),
    id: `${plan.uri}#${plan.target}#plan#${place}`,
    label: `${place + 1}. ${what}`,
    description: joined(action.expected === undefined ? "" : `about ${action.expected.saved_us.toFixed(0)} us saved, an estimate`, where),
    tooltip: [action.text, action.rationale].filter((part) => part !== "").join("\n"),
    icon: "lightbulb",
    children: action.rationale === "" ? [] : [reasonRow(plan, place, action.rationale)],
  };
}

/** An action's words, with the lines that it is about apart: a narrow view has room for either. */
function parted(text: string): { what: string; where: string } {
  const found = /^(.+) in (lines? \d[\d, to]*)$/.exec(text);
  return { what: found?.[1] ?? text, where: found?.[2] ?? "" };
}

/** What came of a step. That one waits or was kept is left to its icon: a narrow view has little room. */
function described(label: string, word: string, outcome: string, where: string): { description: string; spoken: string } {
  const description = joined(outcome === "" ? word : outcome, where);
  return { description, spoken: joined(label, word, outcome, where) };
}

function joined(...parts: readonly string[]): string {
  return parts.filter((part) => part !== "").join(" · ");
}

function reasonRow(plan: Plan, place: number, reason: string): Row {
  const id = `${plan.uri}#${plan.target}#plan#${place}#reason`;
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
