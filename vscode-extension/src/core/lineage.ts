/** Evolutions and their versions: validation of the server's answers, and what the menus show. */

import { has, type Fields } from "./fields";

/** A version of an evolution: an item of `versions` in `mtmc/lineage`. */
export interface Version {
  readonly number: number;
  /** Number of the version that it was made from; null for the user's code. */
  readonly parent: number | null;
  readonly status: string;
  readonly title: string;
  readonly reason: string;
  /** Over the user's code; 0 if it is unknown. */
  readonly speedup: number;
  /** Whether there is a text with this version. */
  readonly written: boolean;
}

/** An item of `mtmc/lineage`. */
export interface Evolution {
  readonly run: string;
  readonly uri: string;
  readonly target: string;
  readonly started: number;
  /** Number of the best version. */
  readonly best: number;
  /** Whether speedups are estimates of the cost model. */
  readonly estimated: boolean;
  readonly versions: readonly Version[];
}

/** The text of a file with a version. */
export interface VersionOf {
  readonly uri: string;
  readonly target: string;
  readonly run: string;
  readonly version: number;
}

/** What can be done with a version. */
export type VersionAction = { readonly kind: "open" | "compareWithAnother" | "keep" } | { readonly kind: "compare"; readonly with: number };

/** Validates the answer of `mtmc/lineage`; invalid items are ignored. */
export function readEvolutions(answer: unknown): Evolution[] {
  const kinds = { run: "string", uri: "string", target: "string", started: "number", best: "number", estimated: "boolean", versions: "array" } as const;
  const items = Array.isArray(answer) ? answer.filter((item): item is Evolution & Fields => has(item, kinds)) : [];
  return items.map((item) => ({ ...item, versions: item.versions.filter(isVersion) })).filter(({ versions }) => versions.length > 0);
}

function isVersion(item: unknown): item is Version {
  const kinds = { number: "number", status: "string", title: "string", reason: "string", speedup: "number", written: "boolean" } as const;
  return has(item, kinds) && (item["parent"] === null || typeof item["parent"] === "number");
}

/** The text of the row of an evolution in a menu. */
export function evolutionRow({ run, target, versions, started }: Evolution): { label: string; description: string } {
  return { label: target, description: `${versions.length - 1} versions, ${new Date(started * 1000).toLocaleString()}, run ${run}` };
}

/** The text of the row of a version in a menu. */
export function versionRow({ best, estimated }: Evolution, version: Version): { label: string; description: string; detail: string } {
  const speed = version.speedup > 0 ? `${version.speedup.toFixed(2)}x your code${estimated ? ", estimated" : ""}` : "";
  const place = version.parent === null ? "" : `${version.number === best ? "best, " : ""}${version.status}, from ${version.parent}`;
  return {
    label: `${version.number}  ${version.title}`,
    description: [speed, place].filter((part) => part !== "").join(" · "),
    detail: version.reason,
  };
}

/** The versions with a text, the best first, then the newest. */
export function ordered({ best, versions }: Evolution): Version[] {
  const rank = ({ number }: Version): number => (number === best ? Infinity : number);
  return versions.filter(({ written }) => written).sort((one, other) => rank(other) - rank(one));
}

/** What can be done with a version, with the words of a menu. */
export function versionActions({ best }: Evolution, version: Version): { label: string; action: VersionAction }[] {
  const actions: { label: string; action: VersionAction }[] = [{ label: "Open the file with this version", action: { kind: "open" } }];
  const compare = (label: string, number: number): void => {
    if (number !== version.number) actions.push({ label, action: { kind: "compare", with: number } });
  };
  if (version.parent !== null) {
    compare("Compare with your code", 0);
    if (version.parent !== 0) compare(`Compare with version ${version.parent}, which it was made from`, version.parent);
    if (best !== 0 && best !== version.parent) compare(`Compare with the best version, ${best}`, best);
  }
  actions.push({ label: "Compare with another version", action: { kind: "compareWithAnother" } });
  if (version.parent !== null) actions.push({ label: "Verify it, and review its steps to keep them", action: { kind: "keep" } });
  return actions;
}
