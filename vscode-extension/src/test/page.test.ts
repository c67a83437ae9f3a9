import assert from "node:assert/strict";
import { test } from "node:test";
import { addedLines, page } from "../core/page";
import { step } from "./samples";

const AFTER = `import torch


def f(x):
    if f_fits(x):  # mtmc: dispatch
        return f_launch(x)
    return x + 1


# mtmc: begin f
import triton  # noqa: E402
import triton.language as tl  # noqa: E402


@triton.jit
def _helper(x):
    return x


# A comment of the kernel.
@triton.jit(do_not_specialize=["n"])
def f_kernel(
    x_ptr,
):
    """f, in one kernel."""

    tl.store(x_ptr, 1)


@triton.jit
def f_old_kernel(x_ptr):
    pass


def f_fits(x) -> bool:
    return True


def f_launch(x):
    return x
# mtmc: end f
`;
/** A diff in which the lines from one text to another are new; by default all. */
function diff(from = "", to = ""): string {
  const [first, last] = [from, to].map((text) => AFTER.slice(0, AFTER.indexOf(text)).split("\n").length - 1);
  const isNew = (index: number): boolean => from === "" || (index >= (first ?? 0) && index < (last ?? 0));
  const lines = AFTER.trimEnd().split("\n").map((line, index) => `${isNew(index) ? "+" : " "}${line}`);
  return ["--- a/model.py", "+++ b/model.py", `@@ -1 +1,${lines.length} @@`, ...lines].join("\n");
}

test("the page begins with the title and the numbers, then the kernels as code", () => {
  const { text, added, notes } = page(step(1, { diff: diff() }), AFTER, "f", false);
  const lines = text.split("\n");
  assert.deepEqual(lines.slice(0, 6), [
    "# 1/2 Fuse part 1",
    "# not timed: no GPU · exact to 1e-07 (yours 2e-07) · 1",
    "# checks passed in Triton's interpreter",
    "",
    "# A comment of the kernel.",
    '@triton.jit(do_not_specialize=["n"])',
  ]);
  assert.deepEqual(notes.slice(0, 3), [0, 1, 2]);
  assert.equal(added[0]?.first, 4);
  assert.equal(lines[added[0].last], "    tl.store(x_ptr, 1)", "with the empty line inside the kernel");
});

test("imports, helpers, guard and launcher are folded into one sentence", () => {
  const { text } = page(step(1, { diff: diff() }), AFTER, "f", false);
  assert.match(text.replaceAll("\n# ", " "), /Folded: imports \(2 lines\), helpers of the kernels \(3 lines\), guard \(2 lines\), launcher \(2 lines\)\./);
  assert.doesNotMatch(text, /def f_fits|import triton|_helper/);
  assert.match(text, /# f begins with:\n {4}if f_fits\(x\): {2}# mtmc: dispatch\n {8}return f_launch\(x\)/);
});

test("all lines can be shown", () => {
  const { text } = page(step(1, { diff: diff() }), AFTER, "f", true);
  assert.match(text, /def f_fits[\s\S]*def f_launch/);
  assert.doesNotMatch(text, /Folded/);
});

test("kernels that the step does not change are folded", () => {
  const { text, added } = page(step(1, { diff: diff("# A comment", "@triton.jit\ndef f_old") }), AFTER, "f", false);
  assert.match(text, /unchanged kernels \(3 lines\)/);
  assert.doesNotMatch(text, /dispatch/);
  assert.equal(added.length, 1);
});

test("added lines are counted in the new file, over several hunks", () => {
  assert.deepEqual([...addedLines("--- a\n+++ b\n@@ -1,2 +1,3 @@\n a\n+b\n c\n@@ -9,2 +10,2 @@\n-x\n+y\n z")], [1, 9]);
});
