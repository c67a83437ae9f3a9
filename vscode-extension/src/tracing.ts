/** Writes the messages between the editor and the language server to the log. */

import * as vscode from "vscode";

/**
 * A log channel whose level depends on the setting `mtmc.trace.server`. The client library only checks the level of the channel,
 * which users would otherwise have to set separately.
 */
export function createTracing(log: vscode.LogOutputChannel): { readonly channel: vscode.LogOutputChannel; readonly watch: vscode.Disposable } {
  const changed = new vscode.EventEmitter<vscode.LogLevel>();
  const level = (): vscode.LogLevel =>
    vscode.workspace.getConfiguration("mtmc").get<string>("trace.server", "off") === "off" ? vscode.LogLevel.Info : vscode.LogLevel.Trace;
  const watch = vscode.workspace.onDidChangeConfiguration((event) => {
    if (event.affectsConfiguration("mtmc.trace.server")) changed.fire(level());
  });
  const overrides: Partial<vscode.LogOutputChannel> = {
    get logLevel() {
      return level();
    },
    onDidChangeLogLevel: changed.event,
    trace: (message, ...rest: unknown[]) => {
      log.info(message, ...rest);
    },
  };
  // Methods of the log need the original object, so use a proxy instead of a copy.
  const channel = new Proxy(overrides, {
    get: (target, name): unknown => (name in target ? Reflect.get(target, name) : Reflect.get(log, name)),
  }) as vscode.LogOutputChannel;
  return { channel, watch: vscode.Disposable.from(watch, changed) };
}
