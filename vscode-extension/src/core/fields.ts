/** Type checks for untrusted values. */

export type Fields = Readonly<Record<string, unknown>>;
type Kinds = Readonly<Record<string, "string" | "number" | "boolean" | "array" | "object">>;

/** Whether a value is an object (not null or an array). */
export function isObject(value: unknown): value is Fields {
  return typeof value === "object" && value !== null && !Array.isArray(value);
}

/** Whether a value is an object that has these fields with these types. */
export function has(value: unknown, kinds: Kinds): value is Fields {
  return (
    isObject(value) &&
    Object.entries(kinds).every(([name, kind]) => {
      const field = value[name];
      if (kind === "array") return Array.isArray(field);
      if (kind === "object") return isObject(field);
      return typeof field === kind;
    })
  );
}
