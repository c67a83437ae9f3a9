import assert from "node:assert/strict";
import { test } from "node:test";
import { fileName, rows, type Row } from "../core/tree";
import type { PastRun, Step } from "../core/model";
import { job, review, step } from "./samples";

test("the context of each row matches its available commands", () => {
  const [row] = rows([review({ kept: [1], pending: [3, 4], run: { ...review().run, steps: [step(1), step(2, { status: "failed", outcome: "" }), step(3), step(4)] } })], [], []);
  assert.equal(row?.context, "run-pending-kept");
  assert.deepEqual(row.children.map((child) => child.context), ["step-kept", "step-pending", "step-pending"]);
  assert.deepEqual(row.children.map((child) => child.argument.step), [1, 3, 4]);
  assert.deepEqual(row.children[0]?.children.map((child) => child.context), ["tried"]);
  assert.match(row.description, /^model\.py · not timed · 2 pending · 1 kept$/);
});

test("screen readers get the state that the icon of a step shows", () => {
  const [row] = rows([review({ kept: [1], pending: [3] })], [], []);
  assert.deepEqual(row?.children.map((child) => child.description), ["verified", "verified"]);
  assert.deepEqual(row.children.map((child) => child.spoken?.split(" · ")[1]), ["kept", "pending"]);
  assert.deepEqual(row.children[0]?.children.map((child) => child.spoken?.split(" · ")[1]), ["rejected"]);
});

test("trials are below the version that they began with, each with its reason, and the active one is last", () => {
  const rejected = step(1, { parent: 0, status: "rejected", reason: "not faster: 0.98x", outcome: "" });
  const failed = step(3, { status: "failed", reason: "it does not compile", outcome: "" });
  const growing = review({ kept: [], pending: [2], run: { ...review().run, status: "running", steps: [rejected, step(2, { parent: 0 }), failed] } });
  const [row] = rows([growing], [job({ step: 4, action: "split the sum", stage: "verifying" })], []);
  const shown = (all: readonly Row[] | undefined): string[] | undefined => all?.map(({ label, description }) => `${label} | ${description}`);
  assert.deepEqual(shown(row?.children), ["fuse part 1 | rejected: not faster: 0.98x", "2/2 Fuse part 2 | verified"]);
  assert.deepEqual(shown(row?.children[1]?.children), ["fuse part 3 | failed: it does not compile", "Split the sum | verifying"]);
  assert.deepEqual(shown(row?.children[0]?.children), ["not faster: 0.98x | "]);
  assert.equal(row?.children[0]?.isFolded, true);
  const [begun] = rows([], [job({ step: 1, action: "fuse all", stage: "compiling" })], []);
  assert.deepEqual(shown(begun?.children), ["Fuse all | compiling"]);
});

test("a search with branches shows each trial below the version that it changed", () => {
  const branch = (index: number, parent: number, status: "accepted" | "rejected" | "failed" = "rejected"): Step =>
    step(index, { parent, prior: 0.5, status, ...(status === "accepted" ? {} : { reason: "another branch is faster", outcome: "" }) });
  const steps = [branch(1, 0), branch(2, 0, "accepted"), branch(3, 1), branch(4, 3, "failed"), branch(5, 2, "accepted"), branch(6, 2)];
  const growing = review({ kept: [], pending: [2, 5], run: { ...review().run, status: "running", steps } });
  const [row] = rows([growing], [job({ step: 7, action: "split the sum" })], []);
  const outline = (all: readonly Row[]): unknown[] => all.map(({ argument, children, context }) => [context === "trial" ? "now" : context === "reason" ? "why" : argument.step, ...outline(children)]);
  assert.deepEqual(outline(row?.children ?? []), [[1, ["why"], [3, ["why"], [4, ["why"]]]], [2, [6, ["why"]]], [5], ["now"]]);
  assert.equal(row?.children[0]?.isFolded, false);
});

test("a timed run shows the outcome of its last step", () => {
  const timing = { median_us: 4, baselines: [], best: "eager", method: "", roofline: 0.5 };
  const last = step(3, { timing, outcome: "3.10x (3.05 to 3.16) over eager · verified" });
  const run = { ...review().run, status: "improved" as const, steps: [step(1), step(3, last)] };
  assert.equal(rows([review({ run })], [], [])[0]?.description, "model.py · 3.10x (3.05 to 3.16) over eager · 1 pending · 1 kept");
});

test("a changed function offers no commands for its steps", () => {
  const [row] = rows([review({ stale: true })], [], []);
  assert.equal(row?.context, "run-kept");
  assert.deepEqual(new Set(row.children.map((child) => child.context)), new Set(["step-stale"]));
});

test("an active run can be cancelled, an unfinished one can be resumed", () => {
  const running = { ...review().run, status: "running" as const };
  assert.equal(rows([review({ isActive: true, run: running })], [job()], [])[0]?.context, "run-active-pending-kept");
  assert.equal(rows([review({ run: running })], [], [])[0]?.context, "run-resumable-pending-kept");
  assert.deepEqual(rows([], [job()], []).map((row) => row.description), ["model.py · step 2: fuse all: verifying"]);
});

test("a plan is shown with its function, or alone before the first run", () => {
  const actions = [{ kind: "fuse", text: "fuse all", rationale: "less traffic", expected: { saved_us: 12.4 } }];
  const plan = { uri: "file:///work/model.py", target: "f", device: "H200", actions };
  for (const [row, isFolded] of [[rows([review()], [], [plan])[0], true], [rows([], [], [plan])[0], undefined]] as const) {
    const shown = row?.children[0];
    assert.equal(shown?.isFolded, isFolded);
    assert.equal(shown?.label, "Plan");
    assert.equal(shown.description, "1 action · H200");
    assert.deepEqual(shown.children.map((child) => [child.label, child.description, child.children[0]?.label]), [["1. fuse all", "estimated saving 12 us", "less traffic"]]);
  }
});

test("every row has a unique id", () => {
  const plan = { uri: "file:///work/model.py", target: "g", device: "H200", actions: [{ kind: "a", text: "a", rationale: "" }] };
  const all = rows([review(), review({ uri: "file:///work/two.py" })], [job({ target: "h" })], [plan]);
  const ids = all.flatMap((row) => [row.id, ...row.children.flatMap((child) => [child.id, ...child.children.map((one) => one.id)])]);
  assert.equal(new Set(ids).size, ids.length);
  assert.equal(fileName("file:///work/a%20b.py"), "a b.py");
});

test("earlier runs are listed last, with their steps and reports", () => {
  const past: PastRun = { run: "r0", uri: "file:///work/model.py", target: "f", started: 0, status: "no_gain", device: "", steps: [{ index: 1, text: "fuse all", status: "rejected", reason: "It was slower.", outcome: "" }] };
  const all = rows([review()], [], [], [past]);
  const [row] = all.at(-1)?.children ?? [];
  assert.equal(all.at(-1)?.label, "Earlier runs");
  assert.match(row?.description ?? "", /^model\.py · no gain · /);
  assert.deepEqual(row?.argument, { uri: past.uri, target: "f", past: "r0" });
  assert.deepEqual(row.children.map((child) => [child.label, child.description, child.tooltip, child.context]), [["1. fuse all", "rejected: It was slower.", "fuse all\nIt was slower.", "past-step"]]);
});
