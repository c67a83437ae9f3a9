/** How a pending step is drawn in the editor, as plain values. */

import { nextStep, type Change, type Review, type Step } from "./model";

/** Lines that the step would take away or rewrite, 0-based, both ends in. */
export interface Removed {
  readonly first: number;
  readonly last: number;
}

/** Lines that the step would put in. */
export interface Added {
  /** The line that carries the mark. */
  readonly line: number;
  /** The mark's words. */
  readonly mark: string;
  readonly text: string;
}

/** What is drawn of one pending step. */
export interface Drawing {
  readonly removed: readonly Removed[];
  readonly added: readonly Added[];
}

/** Longest line that is shown whole behind the line that it would follow. */
const LONGEST_MARK = 80;

/** The marks of a review's next step. */
export function draw(changes: readonly Change[]): Drawing {
  const removed: Removed[] = [];
  const added: Added[] = [];
  for (const change of changes) {
    const { start, end } = change.range;
    const isInsertion = start.line === end.line && start.character === end.character;
    const last = end.character === 0 ? end.line - 1 : end.line;
    if (!isInsertion) removed.push({ first: start.line, last: Math.max(start.line, last) });
    if (change.newText !== "") {
      const line = isInsertion ? Math.max(0, start.line - 1) : Math.max(start.line, last);
      added.push({ line, mark: mark(change.newText), text: change.newText });
    }
  }
  return { removed, added };
}

function mark(text: string): string {
  const lines = text.replace(/\r?\n$/, "").split(/\r?\n/);
  const only = lines.length === 1 ? (lines[0] ?? "").trim() : "";
  return only !== "" && only.length <= LONGEST_MARK ? `+ ${only}` : `+ ${lines.length} lines`;
}

/** The heading above a pending step. */
export function title(review: Review): string {
  const step = nextStep(review);
  if (step === undefined) return "";
  const all = review.kept.length + review.pending.length;
  return `Step ${review.kept.length + 1} of ${all} · ${step.action.text} · ${step.outcome}`;
}

/** The pending step as Markdown: why, how it was verified, and the change. */
export function body(step: Step): string {
  const why = step.action.rationale === "" ? [] : [escape(step.action.rationale)];
  const verdict = step.verdict === null ? [] : [escape(verdictWords(step))];
  const hunks = step.diff.split("\n").filter((line) => !/^(---|\+\+\+) /.test(line));
  return [...why, ...verdict, fenced("diff", hunks.join("\n").trimEnd())].join("\n\n");
}

function verdictWords(step: Step): string {
  const verdict = step.verdict;
  if (verdict === null) return "";
  const how = verdict.mode === "gpu" ? "on the GPU" : "by Triton's interpreter";
  const passed = verdict.checks.filter((check) => check.status === "passed").length;
  const errors =
    verdict.error !== undefined && verdict.reference_error !== undefined
      ? `; relative error ${verdict.error.toExponential(1)}, your own code's is ${verdict.reference_error.toExponential(1)}`
      : "";
  return `Verified ${how}: ${passed} of ${verdict.checks.length} checks passed${errors}.`;
}

/** A code block; its fence is longer than any in the text. */
export function fenced(language: string, text: string): string {
  const longest = Math.max(2, ...[...text.matchAll(/`+/g)].map((found) => found[0].length));
  const fence = "`".repeat(longest + 1);
  return `${fence}${language}\n${text}\n${fence}`;
}

/** Text that Markdown shows as it is. */
export function escape(text: string): string {
  return text.replace(/[\\`*_{}[\]()<>#+!|~-]/g, "\\$&");
}
