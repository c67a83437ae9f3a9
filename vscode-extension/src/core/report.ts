/** A run as one HTML page: no script, nothing from the network, colours of the editor's theme or the reader's system. */

import { acceptedSteps, deviceOf, type Ratio, type Review, type Step } from "./model";

const ROW = 26;
const LEFT = 330;
const WIDTH = 860;
const SPAN = WIDTH - LEFT - 130;

/** The page; `nonce` lets its own style sheet through. */
export function reportHtml(review: Review, nonce: string): string {
  const steps = review.run.steps;
  return `<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'nonce-${nonce}'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>${html(review.target)}</title>
<style nonce="${nonce}">${STYLE}</style></head><body>
<h1>${html(review.target)}</h1>
<p class="quiet">${html(review.run.path)} · ${html(deviceOf(review.run) || "no device known")} · ${html(summary(review))}</p>
<h2>Speedup step by step</h2>
${waterfall(acceptedSteps(review))}
<h2>Steps</h2>
${table(["", "Action", "Status", "Result", "Why"], steps.map((step) => stepCells(review, step)))}
<h2>Verification</h2>
${steps.filter((step) => step.verdict !== null).map(checks).join("\n") || "<p>No step came as far as verification.</p>"}
<h2>Environment</h2>
${table(["", ""], Object.entries(review.run.environment ?? {}).filter(([, value]) => value !== "").map(([name, value]) => [name, value]))}
</body></html>
`;
}

function summary(review: Review): string {
  const date = new Date(review.run.started * 1000).toISOString().slice(0, 16).replace("T", " ");
  return `${review.run.status.replace("_", " ")} · ${review.kept.length} kept, ${review.pending.length} pending · ${date} UTC`;
}

function stepCells(review: Review, step: Step): string[] {
  const status = review.kept.includes(step.index) ? "kept" : review.pending.includes(step.index) ? "pending" : step.status;
  return [String(step.index), step.action.text, status, step.outcome, step.reason];
}

/** Bars of the speedup over the best baseline after each accepted step, each with its interval. */
function waterfall(steps: readonly Step[]): string {
  const bars = steps.flatMap((step) => {
    const ratio = step.timing?.baselines.find((baseline) => baseline.name === step.timing?.best)?.speedup ?? null;
    return ratio === null ? [] : [{ step, ratio }];
  });
  if (bars.length === 0) return "<p>Nothing was timed: there is no time without a GPU, only verification.</p>";
  const most = Math.max(1, ...bars.map(({ ratio }) => ratio.high));
  const x = (value: number): string => (LEFT + (value / most) * SPAN).toFixed(1);
  const drawn = bars.map(({ step, ratio }, place) => bar(step, ratio, place * ROW + 20, x));
  const height = bars.length * ROW + 30;
  return `<svg viewBox="0 0 ${WIDTH} ${height}" role="img" aria-label="Speedup after each step">
<line class="one" x1="${x(1)}" x2="${x(1)}" y1="14" y2="${height}"/><text class="quiet" x="${x(1)}" y="10" text-anchor="middle">1x</text>
${drawn.join("\n")}</svg>`;
}

function bar(step: Step, ratio: Ratio, y: number, x: (value: number) => string): string {
  const name = step.action.text.length > 46 ? `${step.action.text.slice(0, 45)}…` : step.action.text;
  const middle = y + 8;
  return `<text x="${LEFT - 10}" y="${y + 12}" text-anchor="end">${step.index}. ${html(name)}</text>
<rect class="bar" x="${LEFT}" y="${y}" width="${(Number(x(ratio.ratio)) - LEFT).toFixed(1)}" height="16"/>
<line class="interval" x1="${x(ratio.low)}" x2="${x(ratio.high)}" y1="${middle}" y2="${middle}"/>
<text x="${Number(x(ratio.high)) + 8}" y="${y + 12}">${ratio.ratio.toFixed(2)}x over ${html(step.timing?.best ?? "")}</text>`;
}

function checks(step: Step): string {
  const verdict = step.verdict;
  if (verdict === null) return "";
  const rows = verdict.checks.map((check) => [check.name, check.status, check.case ?? "", check.detail ?? ""]);
  const passed = verdict.checks.filter((check) => check.status === "passed").length;
  return `<details><summary>Step ${step.index}: ${html(verdict.status)}, ${passed} of ${verdict.checks.length} checks passed</summary>
${table(["Check", "Status", "Case", "Seen"], rows)}</details>`;
}

function table(head: readonly string[], rows: readonly (readonly string[])[]): string {
  const cells = (row: readonly string[], tag: string): string => row.map((cell) => `<${tag}>${html(cell)}</${tag}>`).join("");
  const body = rows.map((row) => `<tr>${cells(row, "td")}</tr>`).join("\n");
  return `<table><thead><tr>${cells(head, "th")}</tr></thead><tbody>\n${body}\n</tbody></table>`;
}

/** Text as HTML shows it. */
export function html(text: string): string {
  const names: Record<string, string> = { "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;", "'": "&#39;" };
  return text.replace(/[&<>"']/g, (character) => names[character] ?? character);
}

const STYLE = `
:root { color-scheme: light dark; }
body { font: var(--vscode-font-size, 14px)/1.5 var(--vscode-font-family, system-ui, sans-serif); color: var(--vscode-foreground, CanvasText);
  background: var(--vscode-editor-background, Canvas); max-width: 1000px; margin: 0 auto; padding: 1.5rem; }
h1 { font-size: 1.5em; margin: 0; } h2 { font-size: 1.1em; margin: 2em 0 .6em; }
.quiet { color: var(--vscode-descriptionForeground, GrayText); fill: var(--vscode-descriptionForeground, GrayText); }
table { border-collapse: collapse; width: 100%; } th { text-align: left; font-weight: 600; }
th, td { padding: .3em .8em .3em 0; vertical-align: top; border-bottom: 1px solid var(--vscode-widget-border, #8884); overflow-wrap: break-word; }
thead:not(:has(th:not(:empty))) { display: none; }
details { margin: .4em 0; } summary { cursor: pointer; }
svg { width: 100%; height: auto; font-size: 13px; } text { fill: currentColor; }
.bar { fill: var(--vscode-charts-blue, #3a7bd5); } .interval { stroke: currentColor; stroke-width: 2; }
.one { stroke: var(--vscode-descriptionForeground, GrayText); stroke-dasharray: 4 3; }`;
