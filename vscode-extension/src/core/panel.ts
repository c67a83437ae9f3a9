/** The report page, and the messages between its panel and the extension. */

import { has, isObject } from "./fields";

/** The answer of `mtmc/report`. */
export interface ReportPage {
  readonly title: string;
  /** HTML without drawn charts: each chart has a `figure` element with the name of the chart as id. */
  readonly body: string;
  readonly style: string;
  /** Vega-Lite specifications by name. */
  readonly charts: Readonly<Record<string, unknown>>;
}

/** The run that a panel shows; VS Code stores it across reloads. */
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

/** Validates the answer of `mtmc/report`; undefined if the run does not exist. */
export function readPage(answer: unknown): ReportPage | undefined {
  const isPage = has(answer, { title: "string", body: "string", style: "string", charts: "object" });
  return isPage ? (answer as unknown as ReportPage) : undefined;
}

/** Validates a stored panel state; undefined if it is invalid. */
export function readShown(state: unknown): Shown | undefined {
  return isObject(state) && has(state, { uri: "string", target: "string" }) ? (state as unknown as Shown) : undefined;
}

/** The initial document of the panel. Its policy allows only its own script and no network access. */
export function shell(style: string, script: string, source: string, nonce: string): string {
  const policy = `default-src 'none'; script-src 'nonce-${nonce}'; style-src 'nonce-${nonce}'; img-src ${source} data:`;
  return document(policy, "Report", style, `<div id="report"></div>\n<script nonce="${nonce}" src="${escape(script)}"></script>`, nonce);
}

/** The report as a standalone file without scripts; charts are embedded as images. */
export function exported(page: ReportPage, body: string): string {
  return document("default-src 'none'; style-src 'unsafe-inline'", page.title, page.style, body, "");
}

function document(policy: string, title: string, style: string, body: string, nonce: string): string {
  const nonceAttribute = nonce === "" ? "" : ` nonce="${nonce}"`;
  return `<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="${policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>${escape(title)}</title>
<style${nonceAttribute}>${style}</style></head><body>
${body}
</body></html>
`;
}

/** Escapes HTML. */
export function escape(text: string): string {
  const names: Record<string, string> = { "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;", "'": "&#39;" };
  return text.replace(/[&<>"']/g, (character) => names[character] ?? character);
}
