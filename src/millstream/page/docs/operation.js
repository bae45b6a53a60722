/** One route: what it takes, what it returns, and a form to try it. */

import { copyText } from "../common/clipboard.js";
import { element, iconButton } from "../common/dom.js";
import { prose } from "./prose.js";
import { propertyTable, resolve } from "./schema.js";
import { tryForm } from "./try.js";

/**
 * @param {any} spec
 * @param {string} method
 * @param {string} path
 * @param {any} operation
 * @returns {HTMLDetailsElement} its content is made when it is opened first
 */
export function operationView(spec, method, path, operation) {
  const body = element("div", { class: "operation-body" });
  const view = element(
    "details",
    { class: "operation", id: operation.operationId },
    element(
      "summary",
      {},
      element("span", { class: `method ${method}` }, method.toUpperCase()),
      element("code", {}, path),
      element("span", { class: "summary muted" }, operation.summary),
    ),
    body,
  );
  view.addEventListener("toggle", () => {
    if (view.open && !body.childElementCount) body.append(...parts(spec, method, path, operation));
  });
  return view;
}

/** @param {any} spec @param {string} method @param {string} path @param {any} operation */
function parts(spec, method, path, operation) {
  const made = [];
  if (operation.description) made.push(prose(operation.description));
  if (operation.parameters?.length) made.push(heading("Parameters"), parameterTable(spec, operation.parameters));
  const content = operation.requestBody?.content?.["application/json"];
  if (content) {
    made.push(heading("Body"), propertyTable(spec, content.schema));
    const examples = Object.values(content.examples ?? {});
    if (examples.length)
      made.push(heading("Examples"), ...examples.map((example) => exampleView(method, path, example)));
  }
  made.push(heading("Responses"), responseList(spec, operation.responses));
  made.push(heading("Try it"), tryForm(method, path, operation));
  return made;
}

/** @param {string} text */
function heading(text) {
  return element("h3", {}, text);
}

/** @param {any} spec @param {any[]} parameters */
function parameterTable(spec, parameters) {
  const schema = {
    type: "object",
    required: parameters.filter((each) => each.required).map((each) => each.name),
    properties: Object.fromEntries(
      parameters.map((each) => [
        each.name,
        { ...each.schema, description: each.description ?? each.schema.description },
      ]),
    ),
  };
  return propertyTable(spec, schema);
}

/** @param {string} method @param {string} path @param {any} example */
function exampleView(method, path, example) {
  const json = JSON.stringify(example.value, null, 2);
  const address = new URL(path, location.origin);
  const quoted = json.replaceAll("'", "'\\''");
  const command = `curl ${address} -X ${method.toUpperCase()} -H 'Content-Type: application/json' -d '${quoted}'`;
  const button = iconButton("copy", "Copy as a curl command", () => void copyText(command, button));
  return element(
    "div",
    { class: "prose" },
    element(
      "div",
      { class: "code" },
      element("div", { class: "code-bar" }, element("span", {}, example.summary ?? "Example"), button),
      element("pre", { tabindex: "0" }, json),
    ),
  );
}

/** @param {any} spec @param {Record<string, any>} responses */
function responseList(spec, responses) {
  return element(
    "dl",
    { class: "responses" },
    ...Object.entries(responses).flatMap(([status, reference]) => {
      const response = resolve(spec, reference);
      const [type, content] = Object.entries(response.content ?? {})[0] ?? [];
      const isWhole = status === "200" && type === "application/json";
      return [
        element("dt", {}, element("code", {}, status)),
        element("dd", {}, prose(response.description ?? ""), isWhole && shape(spec, resolve(spec, content.schema))),
      ];
    }),
  );
}

/** @param {any} spec @param {any} schema */
function shape(spec, schema) {
  return schema.properties && element("details", {}, element("summary", {}, "Its fields"), propertyTable(spec, schema));
}
