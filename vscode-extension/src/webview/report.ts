/** Draws the report in its panel: the server's page, and its charts by vega without any `eval`. */

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

/** A chart that is drawn, and how wide it is where there is room. */
interface Chart {
  readonly view: View;
  readonly place: HTMLElement;
  readonly width: number;
  /** What its axes and their words take beside that. */
  readonly beside: number;
}

/** Narrower than this, a chart is shrunk as a whole. */
const LEAST_WIDTH = 160;

async function show(message: Extract<ToPanel, { kind: "page" }>): Promise<void> {
  const open = new Set([...root.querySelectorAll("details[open]")].map((details) => details.id));
  for (const { view } of charts) view.finalize();
  host.setState(message.state);
  // The server escapes whatever it did not write itself, and the page's policy lets no script of it run.
  root.innerHTML = message.page.body;
  for (const details of root.querySelectorAll("details")) details.open ||= open.has(details.id);
  charts = await Promise.all(Object.entries(message.page.charts).map(([name, chart]) => draw(name, chart)));
  host.postMessage({ kind: "drawn", charts: charts.length });
}

async function draw(name: string, chart: unknown): Promise<Chart> {
  const place = document.createElement("div");
  document.getElementById(name)?.prepend(place);
  const runtime = parse(compile(chart as TopLevelSpec).spec, undefined, { ast: true });
  const view = await new View(runtime, { expr: expressionInterpreter, renderer: "svg", container: place, hover: true }).runAsync();
  const width = view.width();
  const drawn = { view, place, width, beside: (place.querySelector("svg")?.width.baseVal.value ?? width) - width };
  await fit(drawn);
  return drawn;
}

/** Draws a chart as wide as there is room: shrunk as a whole, its words would be too small to read. */
async function fit({ view, place, width, beside }: Chart): Promise<void> {
  const room = Math.min(width, Math.max(LEAST_WIDTH, place.clientWidth - beside));
  if (place.clientWidth > 0 && room !== view.width()) await view.width(room).runAsync();
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
