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
let views: View[] = [];

async function show(message: Extract<ToPanel, { kind: "page" }>): Promise<void> {
  const open = new Set([...root.querySelectorAll("details[open]")].map((details) => details.id));
  for (const view of views) view.finalize();
  host.setState(message.state);
  // The server escapes whatever it did not write itself, and the page's policy lets no script of it run.
  root.innerHTML = message.page.body;
  for (const details of root.querySelectorAll("details")) details.open ||= open.has(details.id);
  views = await Promise.all(Object.entries(message.page.charts).map(([name, chart]) => draw(name, chart)));
  host.postMessage({ kind: "drawn", charts: views.length });
}

async function draw(name: string, chart: unknown): Promise<View> {
  const place = document.createElement("div");
  document.getElementById(name)?.prepend(place);
  const runtime = parse(compile(chart as TopLevelSpec).spec, undefined, { ast: true });
  return new View(runtime, { expr: expressionInterpreter, renderer: "svg", container: place, hover: true }).runAsync();
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
host.postMessage({ kind: "ready" });
