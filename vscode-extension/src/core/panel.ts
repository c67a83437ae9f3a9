/** The report's page, and what its panel and the extension say to each other. */

import { has, isObject } from "./fields";

/** The answer of `mtmc/report`. */
export interface ReportPage {
  readonly title: string;
  /** HTML whose charts are still to be drawn: where each goes, there is a `figure` with its name as id. */
  readonly body: string;
  readonly style: string;
  /** Vega-Lite specifications by name. */
  readonly charts: Readonly<Record<string, unknown>>;
}

/** Which run a panel shows; kept by VS Code over a reload. */
export interface Shown {
  readonly uri: string;
  readonly target: string;
  readonly run?: string;
}

export type ToPanel =
  | { readonly kind: "page"; readonly page: ReportPage; readonly state: Shown }
  | { readonly kind: "askHtml" }
  | { readonly kind: "askPng" };

export type FromPanel =
  | { readonly kind: "ready" }
  | { readonly kind: "drawn"; readonly charts: number }
  | { readonly kind: "html"; readonly body: string }
  | { readonly kind: "png"; readonly data: string }
  | { readonly kind: "failed"; readonly reason: string };

/** The page in an answer; undefined where there is no such run. */
export function readPage(answer: unknown): ReportPage | undefined {
  const fits = has(answer, { title: "string", body: "string", style: "string", charts: "object" });
  return fits ? (answer as unknown as ReportPage) : undefined;
}

/** A panel's state that VS Code kept; undefined where it is of another version. */
export function readShown(state: unknown): Shown | undefined {
  return isObject(state) && has(state, { uri: "string", target: "string" }) ? (state as unknown as Shown) : undefined;
}

/** The panel's own document, before it is sent a page: its script alone may run, and nothing comes from a network. */
export function shell(style: string, script: string, source: string, nonce: string): string {
  const policy = `default-src 'none'; script-src 'nonce-${nonce}'; style-src 'nonce-${nonce}'; img-src ${source} data:`;
  return document(policy, "Report", style, `<div id="report"></div>\n<script nonce="${nonce}" src="${escape(script)}"></script>`, nonce);
}

/** The report as a file for anybody: charts are pictures in it, and no script. */
export function exported(page: ReportPage, body: string): string {
  return document("default-src 'none'; style-src 'unsafe-inline'", page.title, page.style, body, "");
}

function document(policy: string, title: string, style: string, body: string, nonce: string): string {
  const own = nonce === "" ? "" : ` nonce="${nonce}"`;
  return `<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="${policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>${escape(title)}</title>
<style${own}>${style}</style></head><body>
${body}
</body></html>
`;
}

/** Text as HTML shows it. */
export function escape(text: string): string {
  const names: Record<string, string> = { "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;", "'": "&#39;" };
  return text.replace(/[&<>"']/g, (character) => names[character] ?? character);
}
