/** What is said between the editor and the language server, in the log. */

import * as vscode from "vscode";

/**
 * The log as the protocol's client writes its trace to it: open where the setting `mtmc.trace.server` says so. The client itself
 * looks at the log's level alone, which users would have to find and set besides.
 */
export function tracing(log: vscode.LogOutputChannel): { readonly channel: vscode.LogOutputChannel; readonly watch: vscode.Disposable } {
  const changed = new vscode.EventEmitter<vscode.LogLevel>();
  const level = (): vscode.LogLevel =>
    vscode.workspace.getConfiguration("mtmc").get<string>("trace.server", "off") === "off" ? vscode.LogLevel.Info : vscode.LogLevel.Trace;
  const watch = vscode.workspace.onDidChangeConfiguration((event) => {
    if (event.affectsConfiguration("mtmc.trace.server")) changed.fire(level());
  });
  const own: Partial<vscode.LogOutputChannel> = {
    get logLevel() {
      return level();
    },
    onDidChangeLogLevel: changed.event,
    trace: (message, ...rest: unknown[]) => {
      log.info(message, ...rest);
    },
  };
  // The log's own methods need the log: it is asked for them, and not copied.
  const channel = new Proxy(own, {
    get: (target, name): unknown => (name in target ? Reflect.get(target, name) : Reflect.get(log, name)),
  }) as vscode.LogOutputChannel;
  return { channel, watch: vscode.Disposable.from(watch, changed) };
}
