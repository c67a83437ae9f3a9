/** The review page of one step: its title, its numbers and its kernels as code; imports, guard and launcher are folded. */

import type { Step } from "./model";

/** Lines of the page, 0-based, inclusive. */
export interface Lines {
  readonly first: number;
  readonly last: number;
}

/** A page as plain values. */
export interface Page {
  readonly text: string;
  /** Lines that the step adds. */
  readonly added: readonly Lines[];
  /** Lines that describe the step or stand for folded code. */
  readonly notes: readonly number[];
}

/** A top-level part of the generated code. */
interface Part {
  readonly lines: readonly string[];
  /** Index of its first line in the file. */
  readonly start: number;
}

const BEGIN = "# mtmc: begin ";
const END = "# mtmc: end ";
const DISPATCH = "# mtmc: dispatch";
/** Maximum length of a line of the heading: half of a small window. */
const WIDTH = 56;

/**
 * The page of a step.
 *
 * @param after the file with the step.
 * @param target the qualified name of the function.
 * @param isWhole whether nothing is folded.
 */
export function page(step: Step, after: string, target: string, isWhole: boolean): Page {
  const lines = after.split(/\r?\n/);
  const changed = addedLines(step.diff);
  const begin = lines.indexOf(`${BEGIN}${target}`);
  const end = lines.indexOf(`${END}${target}`);
  const out: string[] = [];
  const notes: number[] = [];
  const green = new Set<number>();
  const note = (text: string): void => {
    for (const line of wrap(text)) notes.push(out.push(`# ${line}`) - 1);
  };
  const code = (part: Part): void => {
    part.lines.forEach((line, offset) => {
      if (changed.has(part.start + offset)) green.add(out.length);
      out.push(line);
    });
  };
  note(`${step.position} ${step.title}${step.reviewed ? " · reviewed" : ""}`);
  note(step.numbers);
  out.push("");
  const dispatch = dispatchOf(lines);
  const parts = begin < 0 || end < 0 ? [] : partsOf(lines, begin + 1, end);
  const kernels = parts.filter((part) => isMainKernel(part) && touches(part, changed));
  const others = parts.filter((part) => !kernels.includes(part));
  kernels.forEach((part) => {
    code(part);
    out.push("", "");
  });
  if (dispatch !== undefined && touches(dispatch, changed)) {
    note(`${target} begins with:`);
    code(dispatch);
    out.push("");
  }
  if (isWhole) {
    for (const part of others) {
      code(part);
      out.push("");
    }
  } else if (others.length > 0) {
    for (const line of summary(others, changed)) note(line);
  }
  while (out.at(-1) === "") out.pop();
  return { text: `${out.join("\n")}\n`, added: ranges(green), notes };
}

/** Line indices, in the new file, that a unified diff adds. */
export function addedLines(diff: string): Set<number> {
  const added = new Set<number>();
  let line = 0;
  let inHunk = false;
  for (const text of diff.split("\n")) {
    const hunk = /^@@ -\d+(?:,\d+)? \+(\d+)(?:,(\d+))? @@/.exec(text);
    if (hunk !== null) {
      // A hunk without lines in the new file names the line before it.
      line = Number(hunk[1]) - (hunk[2] === "0" ? 0 : 1);
      inHunk = true;
    } else if (inHunk && text.startsWith("+")) {
      added.add(line++);
    } else if (inHunk && text.startsWith(" ")) {
      line++;
    }
  }
  return added;
}

/** The statements between the marks. Decorators and comments belong to the statement below them. */
function partsOf(lines: readonly string[], first: number, end: number): Part[] {
  const parts: Part[] = [];
  let start = -1;
  let hasBody = false;
  for (let index = first; index < end; index++) {
    const line = lines[index] ?? "";
    const isTop = line !== "" && !/^[\s)\]}]/.test(line);
    if (isTop && (start < 0 || hasBody)) {
      if (start >= 0) parts.push(part(lines, start, index));
      start = index;
      hasBody = false;
    }
    if (isTop && !/^[@#]/.test(line)) hasBody = true;
  }
  if (start >= 0) parts.push(part(lines, start, end));
  return parts;
}

function part(lines: readonly string[], start: number, end: number): Part {
  let last = end;
  while (last > start && (lines[last - 1] ?? "") === "") last--;
  return { lines: lines.slice(start, last), start };
}

/** The dispatch statement: its line and the indented lines below it. */
function dispatchOf(lines: readonly string[]): Part | undefined {
  const start = lines.findIndex((line) => line.includes(DISPATCH));
  if (start < 0) return undefined;
  const indent = /^\s*/.exec(lines[start] ?? "")?.[0].length ?? 0;
  let end = start + 1;
  while (end < lines.length && (/^\s*/.exec(lines[end] ?? "")?.[0].length ?? 0) > indent) end++;
  return part(lines, start, end);
}

function touches(of: Part, changed: ReadonlySet<number>): boolean {
  return of.lines.some((_, offset) => changed.has(of.start + offset));
}

/** Whether a part is a kernel that is launched, not a function that kernels call. */
function isMainKernel({ lines }: Part): boolean {
  return lines.some((line) => line.startsWith("@triton.jit")) && !lines.some((line) => line.startsWith("def _"));
}

/** What is folded, in words. */
function summary(parts: readonly Part[], changed: ReadonlySet<number>): string[] {
  const kinds: [string, (part: Part) => boolean][] = [
    ["imports", ({ lines }) => lines.every((line) => /^(?:import|from) /.test(line))],
    ["unchanged kernels", (one) => isMainKernel(one) && !touches(one, changed)],
    ["helpers of the kernels", ({ lines }) => lines.some((line) => line.startsWith("@triton.jit"))],
    ["guard", ({ lines }) => lines.some((line) => /^def \w+_(?:fits|up_to_date\w*)\(/.test(line))],
    ["launcher", ({ lines }) => lines.some((line) => /^def \w+_(?:launch|triton)\(/.test(line))],
    ["other helpers", () => true],
  ];
  const counts = new Map<string, number>();
  for (const one of parts) {
    const kind = kinds.find(([, holds]) => holds(one))?.[0] ?? "";
    counts.set(kind, (counts.get(kind) ?? 0) + one.lines.length);
  }
  const texts = kinds.filter(([kind]) => counts.has(kind)).map(([kind]) => `${kind} (${counts.get(kind) ?? 0} lines)`);
  return [`Folded: ${texts.join(", ")}.`, "Show all lines unfolds them; Diff shows the whole change."];
}

function ranges(lines: ReadonlySet<number>): Lines[] {
  const result: Lines[] = [];
  for (const line of [...lines].sort((a, b) => a - b)) {
    const last = result.at(-1);
    if (last?.last === line - 1) result[result.length - 1] = { first: last.first, last: line };
    else result.push({ first: line, last: line });
  }
  return result;
}

/** Breaks a text into lines at its spaces. */
function wrap(text: string): string[] {
  const lines: string[] = [];
  for (const word of text.split(" ")) {
    const last = lines.at(-1);
    if (last !== undefined && last.length + word.length < WIDTH) lines[lines.length - 1] = `${last} ${word}`;
    else lines.push(word);
  }
  return lines;
}
