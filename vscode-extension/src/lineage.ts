/** The versions of evolutions: menus, documents with a version, and diffs. A document's URI contains its parameters, so that it survives a reload. */

import * as vscode from "vscode";
import { evolutionRow, ordered, versionActions, versionRow, type Evolution, type Version, type VersionOf } from "./core/lineage";
import { fileName } from "./core/tree";
import type { Server } from "./server";

/** URI scheme of the file with a version. */
const SCHEME = "mtmc-version";
const NO_EVOLUTION = "No function of this file was evolved yet. In a terminal: mtmc evolve FILE::NAME.";

function uriOf(of: VersionOf): vscode.Uri {
  return vscode.Uri.from({ scheme: SCHEME, path: vscode.Uri.parse(of.uri).path, query: JSON.stringify(of) });
}

/** The user's file of a document: itself, or the one that a version is of; undefined for other documents. */
export function fileOf(uri: vscode.Uri): string | undefined {
  if (uri.scheme === SCHEME) return (JSON.parse(uri.query) as VersionOf).uri;
  return uri.scheme === "file" ? uri.toString() : undefined;
}

/** Provides the documents, and asks what to show. */
export class Lineages implements vscode.TextDocumentContentProvider, vscode.Disposable {
  private readonly registration: vscode.Disposable;

  constructor(private readonly server: Server) {
    this.registration = vscode.workspace.registerTextDocumentContentProvider(SCHEME, this);
  }

  async provideTextDocumentContent(uri: vscode.Uri): Promise<string> {
    const of = JSON.parse(uri.query) as VersionOf;
    // After a reload, the file must be open before the server reads its store.
    await vscode.workspace.openTextDocument(vscode.Uri.parse(of.uri));
    return (await this.server.version(of)) ?? "This version is no longer stored.\n";
  }

  /** Asks for a version of an evolution of a file, and what to do with it. */
  async show(uri: string): Promise<void> {
    await vscode.workspace.openTextDocument(vscode.Uri.parse(uri));
    const evolutions = await this.server.lineage(uri);
    if (evolutions.length === 0) {
      void vscode.window.showInformationMessage(NO_EVOLUTION);
      return;
    }
    const rows = evolutions.map((evolution) => ({ ...evolutionRow(evolution), evolution }));
    const row = rows.length === 1 ? rows[0] : await vscode.window.showQuickPick(rows, { title: `Evolutions of ${fileName(uri)}`, placeHolder: "Choose an evolution" });
    if (row === undefined) return;
    const version = await this.pick(row.evolution, `Versions of ${row.evolution.target}`);
    if (version !== undefined) await this.act(row.evolution, version);
  }

  private async pick(evolution: Evolution, title: string, without?: Version): Promise<Version | undefined> {
    const versions = ordered(evolution).filter(({ number }) => number !== without?.number);
    const rows = versions.map((version) => ({ ...versionRow(evolution, version), version }));
    const options = { title, placeHolder: "Choose a version by its number, its actions or its reason", matchOnDescription: true, matchOnDetail: true };
    return (await vscode.window.showQuickPick(rows, options))?.version;
  }

  private async act(evolution: Evolution, version: Version): Promise<void> {
    const title = `Version ${version.number} of ${evolution.target}`;
    const action = (await vscode.window.showQuickPick(versionActions(evolution, version), { title, placeHolder: versionRow(evolution, version).label }))?.action;
    const { uri, target, run } = evolution;
    const of = { uri, target, run, version: version.number };
    if (action?.kind === "open") await vscode.window.showTextDocument(uriOf(of), { preview: true });
    if (action?.kind === "keep") await vscode.commands.executeCommand("mtmc.keepVersion", of);
    if (action?.kind === "compare") await this.compare({ ...of, version: action.with }, of);
    if (action?.kind === "compareWithAnother") {
      const other = await this.pick(evolution, `Compare version ${version.number} of ${target} with`, version);
      if (other !== undefined) await this.compare({ ...of, version: other.number }, of);
    }
  }

  private async compare(before: VersionOf, after: VersionOf): Promise<void> {
    const name = (of: VersionOf): string => (of.version === 0 ? "your code" : `version ${of.version}`);
    const title = `${fileName(after.uri)} · ${after.target}: ${name(before)} | ${name(after)}`;
    await vscode.commands.executeCommand("vscode.diff", uriOf(before), uriOf(after), title, { preview: true });
  }

  dispose(): void {
    this.registration.dispose();
  }
}
