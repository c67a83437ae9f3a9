/** Plain values that describe how a pending step is shown in the editor. */

import { nextStep, type Change, type Review, type Step } from "./model";

/** Lines that the step would remove or rewrite, 0-based, inclusive. */
export interface Removed {
  readonly first: number;
  readonly last: number;
}

/** Lines that the step would add. */
export interface Added {
  /** The line that shows the mark. */
  readonly line: number;
  /** Text of the mark. */
  readonly mark: string;
  readonly text: string;
}

/** The marks of one pending step. */
export interface Drawing {
  readonly removed: readonly Removed[];
  readonly added: readonly Added[];
}

/** Maximum length of an added line that is shown completely. */
const MAX_MARK_LENGTH = 80;

/** The marks for the changes of a step. */
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
  return only !== "" && only.length <= MAX_MARK_LENGTH ? `+ ${only}` : `+ ${lines.length} lines`;
}

/** The heading above a pending step. */
export function title(review: Review): string {
  const step = nextStep(review);
  if (step === undefined) return "";
  const all = review.kept.length + review.pending.length;
  return `Step ${review.kept.length + 1} of ${all} · ${step.action.text} · ${step.outcome}`;
}

/** The pending step as Markdown: rationale, verification and diff. */
export function body(step: Step): string {
  const rationale = step.action.rationale === "" ? [] : [escape(step.action.rationale)];
  const verdict = step.verdict === null ? [] : [escape(verdictText(step))];
  const hunks = step.diff.split("\n").filter((line) => !/^(---|\+\+\+) /.test(line));
  return [...rationale, ...verdict, fenced("diff", hunks.join("\n").trimEnd())].join("\n\n");
}

function verdictText(step: Step): string {
  const verdict = step.verdict;
  if (verdict === null) return "";
  const how = verdict.mode === "gpu" ? "on the GPU" : "by Triton's interpreter";
  const passed = verdict.checks.filter((check) => check.status === "passed").length;
  const errors =
    verdict.error !== undefined && verdict.reference_error !== undefined
      ? `; relative error ${verdict.error.toExponential(1)}, reference error ${verdict.reference_error.toExponential(1)}`
      : "";
  return `Verified ${how}: ${passed} of ${verdict.checks.length} checks passed${errors}.`;
}

/** A Markdown code block with a fence that is longer than any fence in the text. */
export function fenced(language: string, text: string): string {
  const longest = Math.max(2, ...[...text.matchAll(/`+/g)].map((match) => match[0].length));
  const fence = "`".repeat(longest + 1);
  return `${fence}${language}\n${text}\n${fence}`;
}

/** Escapes Markdown. */
export function escape(text: string): string {
  return text.replace(/[\\`*_{}[\]()<>#+!|~-]/g, "\\$&");
}
