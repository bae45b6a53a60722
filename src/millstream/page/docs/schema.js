/** JSON schemas in words and tables. */

import { element } from "../common/dom.js";
import { prose } from "./prose.js";

const DEEPEST = 4;

/** Follows a reference of the document. @param {any} spec @param {any} part @returns {any} */
export function resolve(spec, part) {
  if (!part?.$ref) return part ?? {};
  return (
    part.$ref
      .slice(2)
      .split("/")
      .reduce((/** @type {any} */ at, /** @type {string} */ name) => at?.[name], spec) ?? {}
  );
}

/** A type in a few words, such as "number, 0 to 2". @param {any} spec @param {any} schema @returns {string} */
export function typeWords(spec, schema) {
  const found = resolve(spec, schema);
  if ("const" in found) return JSON.stringify(found.const);
  if (found.enum) return found.enum.map((/** @type {unknown} */ value) => JSON.stringify(value)).join(", ");
  const options = found.anyOf ?? found.oneOf;
  if (options) {
    const words = options.map((/** @type {any} */ option) => typeWords(spec, option));
    return [...new Set(words)].filter((word) => word !== "null").join(" or ");
  }
  if (found.type === "array") return `list of ${typeWords(spec, found.items ?? {}) || "anything"}`;
  const names = [found.type].flat().filter((/** @type {string} */ name) => name && name !== "null");
  return [found.title && found.type === "object" ? found.title : names.join(" or "), bounds(found)]
    .filter(Boolean)
    .join(", ");
}

/** @param {any} schema */
function bounds(schema) {
  const least = schema.minimum ?? schema.ge ?? schema.exclusiveMinimum;
  const most = schema.maximum ?? schema.le ?? schema.lt;
  const shown = (/** @type {unknown} */ value) => typeof value === "number" && Math.abs(value) < 2 ** 31 - 1;
  if (shown(least) && shown(most)) return `${least} to ${most}`;
  if (shown(least)) return `at least ${least}`;
  return shown(most) ? `at most ${most}` : "";
}

/**
 * A table of an object's fields.
 * @param {any} spec
 * @param {any} schema
 * @param {number} [depth]
 * @returns {HTMLElement}
 */
export function propertyTable(spec, schema, depth = 0) {
  const found = resolve(spec, schema);
  const required = new Set(found.required ?? []);
  const rows = Object.entries(found.properties ?? {})
    .sort(([one], [other]) => Number(required.has(other)) - Number(required.has(one)))
    .map(([name, field]) => row(spec, name, field, required.has(name), depth));
  if (!rows.length) return element("p", { class: "muted" }, typeWords(spec, found) || "An object.");
  const head = ["Field", "Type", "Meaning"].map((name) => element("th", { scope: "col" }, name));
  return element(
    "div",
    { class: "table", tabindex: "0", role: "region", "aria-label": "Fields" },
    element("table", {}, element("thead", {}, element("tr", {}, ...head)), element("tbody", {}, ...rows)),
  );
}

/** @param {any} spec @param {string} name @param {any} field @param {boolean} required @param {number} depth */
function row(spec, name, field, required, depth) {
  const found = resolve(spec, field);
  const meaning = prose(field.description ?? found.description ?? "");
  const inner = depth < DEEPEST ? inside(spec, found) : null;
  const preset = field.default;
  const shows = preset !== undefined && preset !== null && preset !== "" && JSON.stringify(preset) !== "[]";
  return element(
    "tr",
    {},
    element(
      "th",
      { scope: "row" },
      element("code", {}, name),
      required && element("span", { class: "required" }, "required"),
    ),
    element(
      "td",
      {},
      typeWords(spec, field),
      shows && element("div", { class: "muted" }, `default ${JSON.stringify(preset)}`),
    ),
    element("td", {}, meaning, inner && lazyFields(spec, inner, depth)),
  );
}

/** The object that a field holds, alone or in a list. @param {any} spec @param {any} found @returns {any} */
function inside(spec, found) {
  const options = [found, ...(found.anyOf ?? found.oneOf ?? [])].map((option) => resolve(spec, option));
  for (const option of options) {
    if (option.properties) return option;
    const item = option.type === "array" ? inside(spec, resolve(spec, option.items)) : null;
    if (item) return item;
  }
  return null;
}

/** Schemas may hold themselves, so fields inside fields are made when they are opened. @param {any} spec @param {any} schema @param {number} depth */
function lazyFields(spec, schema, depth) {
  const view = element("details", {}, element("summary", {}, "Fields"));
  view.addEventListener("toggle", () => {
    if (view.open && view.childElementCount === 1) view.append(propertyTable(spec, schema, depth + 1));
  });
  return view;
}
