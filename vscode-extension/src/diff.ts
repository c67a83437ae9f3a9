/** Diff editors of steps. The URI of each virtual document contains its parameters, so that diffs survive a window reload. */

import * as vscode from "vscode";
import { acceptedSteps, type Argument, type Review, type Step } from "./core/model";
import { fileName } from "./core/tree";
import type { Server } from "./server";

const SCHEME = "mtmc-step";

interface Side extends Argument {
  readonly step: number;
  readonly side: "before" | "after";
}

function uriOf(side: Side): vscode.Uri {
  const path = vscode.Uri.parse(side.uri).path;
  return vscode.Uri.from({ scheme: SCHEME, path, query: JSON.stringify(side) });
}

/** Provides the documents and opens the diff editors. */
export class Diffs implements vscode.TextDocumentContentProvider, vscode.Disposable {
  private readonly registered = vscode.workspace.registerTextDocumentContentProvider(SCHEME, this);

  constructor(private readonly server: Server) {}

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
    const name = `${fileName(uri)} · ${target}, step ${step}`;
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
    this.registered.dispose();
  }
}
