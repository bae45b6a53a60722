// The linter of the pages' scripts. Types are checked by tsc, layout by prettier.
export default [
  { ignores: ["**/vendor/**"] },
  {
    linterOptions: { reportUnusedDisableDirectives: "error" },
    rules: {
      "array-callback-return": "error",
      complexity: ["error", 15],
      eqeqeq: ["error", "always", { null: "ignore" }],
      "max-lines": ["error", 300],
      "max-lines-per-function": ["error", 60],
      "no-duplicate-imports": "error",
      "no-eval": "error",
      "no-implied-eval": "error",
      "no-new-func": "error",
      "no-restricted-properties": [
        "error",
        { property: "innerHTML", message: "Use element(), or MarkdownView for text of a model." },
        { property: "insertAdjacentHTML", message: "Use element(), or MarkdownView for text of a model." },
      ],
      "no-self-compare": "error",
      "no-shadow": "error",
      "no-unreachable": "error",
      "no-unused-vars": ["error", { argsIgnorePattern: "^_", varsIgnorePattern: "^_" }],
      "no-var": "error",
      "prefer-const": "error",
      "require-atomic-updates": "off",
    },
  },
];
