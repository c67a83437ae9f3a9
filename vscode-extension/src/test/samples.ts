/** Sample answers of the server for tests. */

import type { JobState, Review, Step } from "../core/model";

export function step(index: number, changes: Partial<Step> = {}): Step {
  return {
    index,
    action: { kind: "fuse", text: `fuse part ${index}`, rationale: `Saves memory traffic ${index}.` },
    status: "accepted",
    reason: "",
    diff: "--- a/model.py\n+++ b/model.py\n@@ -1 +1,2 @@\n+kernel\n x\n",
    verdict: { status: "correct", mode: "interpreter", checks: [{ name: "values", status: "passed" }], error: 1e-7, reference_error: 2e-7 },
    timing: null,
    parent: Math.max(0, index - 1),
    prior: null,
    title: `Fuse part ${index}`,
    position: index === 1 ? "1/2" : "2/2",
    outcome: "not timed · verified",
    numbers: "not timed: no GPU · exact to 1e-07 (yours 2e-07) · 1 checks passed in Triton's interpreter",
    reviewed: false,
    ...changes,
  };
}

export function review(changes: Partial<Review> = {}): Review {
  return {
    uri: "file:///work/model.py",
    version: 1,
    target: "f",
    line: 10,
    kept: [1],
    pending: [3],
    selected: 3,
    stale: false,
    edited: false,
    isActive: false,
    run: {
      run: "r1",
      path: "/project/model.py",
      target: "f",
      status: "unmeasured",
      environment: { python: "3.11", gpu: "" },
      started: 0,
      model: "",
      steps: [step(1), step(2, { status: "rejected", outcome: "", reason: "It was not faster." }), step(3)],
    },
    ...changes,
  };
}

export function job(changes: Partial<JobState> = {}): JobState {
  return { job: 1, kind: "optimize", uri: "file:///work/model.py", target: "f", state: "running", stage: "verifying", step: 2, action: "fuse all", summary: "", seconds: 12, result: "", answer: null, failure: null, ...changes };
}
