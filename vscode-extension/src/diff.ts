/** Diff editors of steps. The URI of each virtual document contains its parameters, so that diffs survive a window reload. */

import * as vscode from "vscode";
import { acceptedSteps, type Argument, type Review, type Step } from "./core/model";
import { fileName } from "./core/tree";
import type { Server } from "./server";
import type { Runs } from "./state";

/** URI scheme of the two sides of a diff. */
export const SCHEME = "mtmc-step";

interface Side extends Argument {
  readonly step: number;
  readonly side: "before" | "after";
}

function keyOf({ uri, target, step }: Argument): string {
  return `${uri}#${target}#${step ?? ""}`;
}

function uriOf(side: Side): vscode.Uri {
  const path = vscode.Uri.parse(side.uri).path;
  return vscode.Uri.from({ scheme: SCHEME, path, query: JSON.stringify(side) });
}

/** The step of a diff editor; undefined for other documents. */
export function stepOf(uri: vscode.Uri | undefined): (Argument & { step: number }) | undefined {
  if (uri?.scheme !== SCHEME) return undefined;
  const { uri: file, target, step } = JSON.parse(uri.query) as Side;
  return { uri: file, target, step };
}

/** Provides the documents and opens the diff editors. */
export class Diffs implements vscode.TextDocumentContentProvider, vscode.Disposable {
  private readonly subscriptions: vscode.Disposable[];
  /** Pending steps when they were last seen. */
  private pending = new Set<string>();

  constructor(
    private readonly server: Server,
    private readonly runs: Runs,
  ) {
    this.subscriptions = [
      vscode.workspace.registerTextDocumentContentProvider(SCHEME, this),
      runs.onChange(() => {
        this.closeDecided();
      }),
    ];
  }

  /** Closes the diffs of steps that were kept or discarded meanwhile, from wherever. */
  private closeDecided(): void {
    const pending = new Set(this.runs.reviews.flatMap((review) => review.pending.map((step) => keyOf({ ...review, step }))));
    for (const tab of vscode.window.tabGroups.all.flatMap((group) => group.tabs)) {
      const of = tab.input instanceof vscode.TabInputTextDiff ? stepOf(tab.input.modified) : undefined;
      if (of !== undefined && this.pending.has(keyOf(of)) && !pending.has(keyOf(of))) void vscode.window.tabGroups.close(tab, true);
    }
    this.pending = pending;
  }

  async provideTextDocumentContent(uri: vscode.Uri): Promise<string> {
    const side = JSON.parse(uri.query) as Side;
    // After a reload, the file must be open before the server loads its runs.
    await vscode.workspace.openTextDocument(vscode.Uri.parse(side.uri));
    const texts = await this.server.step({ uri: side.uri, target: side.target, step: side.step });
    return texts?.[side.side] ?? "This step no longer exists: the function was optimised again.\n";
  }

  /** Opens the diff of one step. */
  async ofStep(argument: Argument & { step: number }): Promise<void> {
    const { uri, target, step } = argument;
    const known = this.runs.reviews.find((review) => review.uri === uri && review.target === target)?.run.steps.find(({ index }) => index === step);
    const name = `${fileName(uri)} · ${target}, step ${known?.position ?? ""}`;
    await this.open({ uri, target, step, side: "before" }, { uri, target, step, side: "after" }, name);
  }

  /** Opens the combined diff of all accepted steps, or of the steps up to `step`. */
  async fromOriginal(review: Review, step?: number): Promise<void> {
    const steps = acceptedSteps(review);
    const last = steps.findIndex((candidate) => candidate.index === step);
    await this.between(review, steps.slice(0, last < 0 ? steps.length : last + 1), last < 0 ? `all ${steps.length} steps` : `your code | with steps 1 to ${last + 1}`);
  }

  /** Opens the diff between the version of a step and the final version. */
  async toFinal(review: Review, step: number): Promise<void> {
    const steps = acceptedSteps(review);
    const index = steps.findIndex((candidate) => candidate.index === step);
    await this.between(review, steps.slice(index + 1), `with steps 1 to ${index + 1} | final`);
  }

  private async between(review: Review, steps: readonly Step[], label: string): Promise<void> {
    const [first, last] = [steps[0], steps.at(-1)];
    if (first === undefined || last === undefined) {
      void vscode.window.showInformationMessage(`No further step of ${review.target} was accepted, so there is nothing to compare.`);
      return;
    }
    const of = { uri: review.uri, target: review.target };
    const name = `${fileName(review.uri)} · ${review.target}: ${label}`;
    await this.open({ ...of, step: first.index, side: "before" }, { ...of, step: last.index, side: "after" }, name);
  }

  private async open(before: Side, after: Side, name: string): Promise<void> {
    await vscode.commands.executeCommand("vscode.diff", uriOf(before), uriOf(after), name, { preview: true });
  }

  dispose(): void {
    for (const subscription of this.subscriptions) subscription.dispose();
  }
}
