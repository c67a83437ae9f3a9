import tseslint from "typescript-eslint";

export default tseslint.config(
  { ignores: ["out/", "dist/", "node_modules/", "scripts/", "e2e/", ".e2e/", "*.mjs"] },
  ...tseslint.configs.strictTypeChecked,
  {
    languageOptions: { parserOptions: { project: ["./tsconfig.json", "./src/webview/tsconfig.json"], tsconfigRootDir: import.meta.dirname } },
    rules: {
      // Numbers read well in messages.
      "@typescript-eslint/restrict-template-expressions": ["error", { allowNumber: true }],
      // VS Code's Disposable is a class by which others, with a dispose of their own, are typed.
      "@typescript-eslint/no-unsafe-class-instance-assignment": "off",
      // node:test's describe and test give promises that the runner itself waits for.
      "@typescript-eslint/no-floating-promises": [
        "error",
        { allowForKnownSafeCalls: [{ from: "package", name: ["describe", "test"], package: "node:test" }] },
      ],
    },
  },
);
