// User files for the tests, and the expected files after keeping some of their steps.
import { spawnSync } from "node:child_process";
import { writeFileSync } from "node:fs";
import { join } from "node:path";
import { HERE, PYTHON } from "./editor.mjs";

/** Three steps: kernels separated by sorts, which have no kernel. */
export const BLOCK = `import torch


# mtmc: x=f32[B,C] B=8 C=32
def block(x):
    scores = torch.softmax(torch.relu(x) + 1.0, -1)
    ranked = torch.sort(scores, -1).values
    gated = torch.sigmoid(ranked) * ranked
    mixed = torch.sort(gated, 0).values
    return torch.exp(-mixed) / (1.0 + mixed)
`;

/** Five steps, to take several of them out. */
export const LADDER = `import torch


# mtmc: x=f32[B,C] B=8 C=32
def ladder(x):
    a = torch.sort(torch.relu(x) + 1.0, -1).values
    b = torch.sort(torch.sigmoid(a) * a, 0).values
    c = torch.sort(torch.tanh(b) - b, -1).values
    d = torch.sort(torch.exp(-c) * (1.0 + c), 0).values
    e = torch.sort(torch.cos(d + 1.0) * d, -1).values
    f = torch.sort(torch.relu(e - 0.5) * 2.0, 0).values
    g = torch.sort(torch.abs(f) + torch.sigmoid(f), -1).values
    return torch.softmax(g * 0.5, -1)
`;

/** The first two steps of BLOCK. */
export const PAIR = `import torch


# mtmc: x=f32[B,C] B=8 C=32
def pair(x):
    scores = torch.softmax(torch.relu(x) + 1.0, -1)
    ranked = torch.sort(scores, -1).values
    return torch.sigmoid(ranked) * ranked
`;

/** PAIR in the middle of a long file, so that its function has to be scrolled into view. */
export const TALL = PAIR.replace("\n\n\n# mtmc", `\n\n${"# A line above.\n".repeat(90)}\n\n# mtmc`) + `\n\n${"# A line below.\n".repeat(90)}`;

/** One step. */
export const SMALL = `import torch


# mtmc: x=f32[8,48]
def small(x):
    return torch.softmax(torch.relu(x) + 1, -1)
`;

/** A function that raises in its second line, for inputs that do not fit. */
export const FAILING = `import torch


# mtmc: x=f32[8,48] y=f32[8,47]
def failing(x, y):
    scores = torch.relu(x)
    return scores + y
`;

/** A function without a workload. */
export const UNKNOWN = `import torch


def unknown(y):
    return torch.sigmoid(y)
`;

/** A file whose import blocks, so a run never reaches its first step. */
export const ENDLESS = `import time

import torch

time.sleep(3600)


# mtmc: x=f32[8,48]
def endless(x):
    return torch.tanh(x)
`;

/** A kernel with an error that static checks detect. */
export const KERNEL = `import torch
import triton
import triton.language as tl


@triton.jit
def copy(x_ptr, y_ptr):
    offsets = tl.arange(0, 100)
    tl.store(y_ptr + offsets, tl.load(x_ptr + offsets))
`;

const written = new Map();

/** The file with only the given steps, written by the coder without an editor. */
export function expected(path, target, text, steps) {
  const key = JSON.stringify([path, target, text, steps]);
  if (written.has(key)) return written.get(key);
  writeFileSync(path, text);
  const done = spawnSync(PYTHON, [join(HERE, "expected.py"), path, target, ...steps.map(String)], { encoding: "utf8", cwd: join(HERE, "../..") });
  if (done.status !== 0) throw new Error(done.stderr);
  written.set(key, done.stdout);
  return done.stdout;
}
