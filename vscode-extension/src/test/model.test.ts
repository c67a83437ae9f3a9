import assert from "node:assert/strict";
import { test } from "node:test";
import { acceptedSteps, deviceOf, deviceText, isArgument, isSearch, lacksWorkload, adjacentReview, neighbour, planOf, readGpu, readJob, readReviews, reviewAt, pendingText, selectedStep } from "../core/model";
import { job, review } from "./samples";

test("an invalid answer is rejected with a remedy", () => {
  assert.deepEqual(readReviews([review()]), [review()]);
  assert.throws(() => readReviews(null), /update both/);
  assert.throws(() => readReviews([{ ...review(), pending: "none" }]), /update both/);
  assert.throws(() => readReviews([{ ...review(), run: { ...review().run, steps: [{ index: "1" }] } }]), /update both/);
});

test("an invalid job is ignored", () => {
  assert.deepEqual(readJob(job()), job());
  assert.equal(readJob({ ...job(), stage: 1 }), undefined);
  assert.equal(readJob(undefined), undefined);
});

test("only the result of a planning job contains a plan", () => {
  const action = { kind: "fuse", text: "fuse all", rationale: "less traffic" };
  const answer = { event: "plan", actions: [action, 7], device: { name: "H200" } };
  assert.deepEqual(planOf(job({ answer })), { device: "H200", actions: [action] });
  assert.equal(planOf(job({ answer: { event: "error" } })), undefined);
  assert.equal(planOf(job()), undefined);
});

test("a missing workload is distinguished from other failures", () => {
  assert.ok(lacksWorkload(job({ answer: { event: "error", error: { code: "no-workload", message: "" } } })));
  assert.ok(!lacksWorkload(job({ answer: { event: "error", error: { code: "syntax-error", message: "" } } })));
  assert.ok(!lacksWorkload(job()));
});

test("search jobs are distinguished from other jobs, and pending steps are counted", () => {
  assert.ok(isSearch(job({ kind: "another" })));
  assert.ok(!isSearch(job({ kind: "verify" })));
  assert.deepEqual([pendingText(1), pendingText(2)], ["1 pending step", "2 pending steps"]);
});

test("command arguments are recognised", () => {
  assert.ok(isArgument({ uri: "file:///a.py", target: "f" }));
  assert.ok(!isArgument({ uri: "file:///a.py" }));
  assert.ok(!isArgument(undefined));
});

test("the selected step is shown, and its neighbours are pending too", () => {
  const four = review({ kept: [], pending: [1, 3, 4], selected: 3 });
  assert.deepEqual([neighbour(four, true), neighbour(four, false)], [4, 1]);
  assert.deepEqual([neighbour({ ...four, selected: 4 }, true), neighbour({ ...four, selected: null }, true)], [undefined, undefined]);
});

test("rejected steps are neither selected nor accepted", () => {
  assert.equal(selectedStep(review())?.index, 3);
  assert.deepEqual(acceptedSteps(review()).map((step) => step.index), [1, 3]);
  assert.equal(selectedStep(review({ pending: [], selected: null })), undefined);
});

test("the review at a line is the one above it", () => {
  const all = [review({ target: "b", line: 20 }), review({ target: "a", line: 5 }), review({ uri: "file:///other.py", line: 1 })];
  const at = (line: number): string | undefined => reviewAt(all, "file:///work/model.py", line)?.target;
  assert.deepEqual([at(0), at(5), at(19), at(20), at(99)], ["a", "a", "a", "b", "b"]);
  assert.equal(reviewAt(all, "file:///none.py", 0), undefined);
});

test("next and previous cross files, wrap around and skip functions without pending steps", () => {
  const all = [
    review({ uri: "file:///b.py", target: "3", line: 2 }),
    review({ uri: "file:///a.py", target: "1", line: 3 }),
    review({ uri: "file:///a.py", target: "2", line: 9 }),
    review({ uri: "file:///a.py", target: "done", line: 5, pending: [] }),
    review({ uri: "file:///a.py", target: "stale", line: 6, stale: true }),
  ];
  const from = (uri: string, line: number, forward: boolean): string | undefined => adjacentReview(all, uri, line, forward)?.target;
  assert.equal(from("file:///a.py", 3, true), "2");
  assert.equal(from("file:///a.py", 9, true), "3");
  assert.equal(from("file:///b.py", 2, true), "1");
  assert.equal(from("file:///b.py", 2, false), "2");
  assert.equal(from("file:///a.py", 3, false), "3");
  assert.equal(adjacentReview([], "", 0, true), undefined);
});

test("the device text is the GPU name, or says that nothing is timed", () => {
  assert.equal(deviceOf(review().run), "CPU: verified, not timed");
  assert.equal(deviceOf({ ...review().run, environment: { gpu: "NVIDIA H200" } }), "NVIDIA H200");
  assert.equal(deviceOf(undefined), "");
  assert.equal(deviceText(readGpu({ gpu: "" }) ?? "?"), "CPU: verified, not timed");
  assert.equal(readGpu({ gpu: "NVIDIA H200" }), "NVIDIA H200");
  assert.equal(readGpu(null), undefined);
});
