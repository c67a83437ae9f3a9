/** Shows the report in its panel: the server's page, with charts drawn by vega without `eval`. */

import { parse, View } from "vega";
import { expressionInterpreter } from "vega-interpreter";
import { compile, type TopLevelSpec } from "vega-lite";
import type { FromPanel, ToPanel } from "../core/panel";
import { picture } from "./picture";

interface Host {
  postMessage(message: FromPanel): void;
  setState(state: unknown): void;
}
declare function acquireVsCodeApi(): Host;

const host = acquireVsCodeApi();
const root = document.getElementById("report") as HTMLElement;
let charts: Chart[] = [];

/** A drawn chart and its preferred width. */
interface Chart {
  readonly view: View;
  readonly container: HTMLElement;
  readonly width: number;
  /** Additional width of axes and labels. */
  readonly axesWidth: number;
}

/** Minimum width of a chart in pixels; below it, the whole chart is scaled down. */
const MIN_WIDTH = 160;

async function show(message: Extract<ToPanel, { kind: "page" }>): Promise<void> {
  const open = new Set([...root.querySelectorAll("details[open]")].map((details) => details.id));
  for (const { view } of charts) view.finalize();
  host.setState(message.state);
  // The server escapes all foreign text, and the page policy blocks scripts in it.
  root.innerHTML = message.page.body;
  for (const details of root.querySelectorAll("details")) details.open ||= open.has(details.id);
  charts = await Promise.all(Object.entries(message.page.charts).map(([name, chart]) => draw(name, chart)));
  host.postMessage({ kind: "drawn", charts: charts.length });
}

async function draw(name: string, chart: unknown): Promise<Chart> {
  const container = document.createElement("div");
  document.getElementById(name)?.prepend(container);
  const runtime = parse(compile(chart as TopLevelSpec).spec, undefined, { ast: true });
  const view = await new View(runtime, { expr: expressionInterpreter, renderer: "svg", container: container, hover: true }).runAsync();
  const width = view.width();
  const drawn = { view, container, width, axesWidth: (container.querySelector("svg")?.width.baseVal.value ?? width) - width };
  await fit(drawn);
  return drawn;
}

/** Fits a chart to the available width by drawing it again: scaling it down would make labels unreadable. */
async function fit({ view, container, width, axesWidth }: Chart): Promise<void> {
  const available = Math.min(width, Math.max(MIN_WIDTH, container.clientWidth - axesWidth));
  if (container.clientWidth > 0 && available !== view.width()) await view.width(available).runAsync();
}

window.addEventListener("message", (event: MessageEvent<ToPanel>) => {
  const message = event.data;
  const failed = (error: unknown): void => {
    host.postMessage({ kind: "failed", reason: String(error) });
  };
  if (message.kind === "page") show(message).catch(failed);
  if (message.kind === "askHtml") host.postMessage({ kind: "html", body: root.innerHTML });
  if (message.kind === "askPng") {
    picture([...root.querySelectorAll("svg")]).then((data) => {
      host.postMessage({ kind: "png", data });
    }, failed);
  }
});
window.addEventListener("resize", () => {
  for (const chart of charts) void fit(chart);
});
host.postMessage({ kind: "ready" });
