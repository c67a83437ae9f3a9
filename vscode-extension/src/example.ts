/** The example of the walkthrough. */

import * as vscode from "vscode";
import type { Argument } from "./core/model";

const NAME = "rmsnorm_residual.py";
const TARGET = "rmsnorm_residual";

/** Opens the example with the cursor in its function. Copies it to the workspace, or to the storage folder without a workspace. */
export async function openExample(context: vscode.ExtensionContext): Promise<Argument> {
  const folder = vscode.workspace.workspaceFolders?.[0]?.uri ?? vscode.Uri.joinPath(context.globalStorageUri, "example");
  const target = vscode.Uri.joinPath(folder, NAME);
  await vscode.workspace.fs.createDirectory(folder);
  if (!(await exists(target))) {
    await vscode.workspace.fs.copy(vscode.Uri.joinPath(context.extensionUri, "dist", NAME), target);
  }
  const document = await vscode.workspace.openTextDocument(target);
  const editor = await vscode.window.showTextDocument(document);
  const position = document.positionAt(document.getText().indexOf("hidden = x"));
  editor.selection = new vscode.Selection(position, position);
  return { uri: document.uri.toString(), target: TARGET };
}

async function exists(uri: vscode.Uri): Promise<boolean> {
  try {
    await vscode.workspace.fs.stat(uri);
    return true;
  } catch (error) {
    if (error instanceof vscode.FileSystemError && error.code === "FileNotFound") return false;
    throw error;
  }
}
