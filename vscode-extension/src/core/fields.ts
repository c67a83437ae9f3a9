/** Looks at values that come from outside. */

export type Fields = Readonly<Record<string, unknown>>;
type Kinds = Readonly<Record<string, "string" | "number" | "boolean" | "array" | "object">>;

/** Whether something is an object with names. */
export function isObject(value: unknown): value is Fields {
  return typeof value === "object" && value !== null && !Array.isArray(value);
}

/** Whether something is an object with these fields, of these kinds. */
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
