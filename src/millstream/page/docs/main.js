/** The API reference: shows /openapi.json, which the server makes of its own routes. */

import { apiJson } from "../common/api.js";
import { element, find } from "../common/dom.js";
import { mountNav } from "../common/nav.js";
import { operationView } from "./operation.js";
import { prose } from "./prose.js";

/** @typedef {{method: string, path: string, operation: any, view: HTMLDetailsElement}} Shown */

/** @param {any} spec @returns {Shown[]} */
function operations(spec) {
  return Object.entries(spec.paths).flatMap(([path, methods]) =>
    Object.entries(methods).map(([method, operation]) => ({
      method,
      path,
      operation,
      view: operationView(spec, method, path, operation),
    })),
  );
}

/** @param {any} spec @param {Shown[]} all @returns {HTMLElement[]} */
function sections(spec, all) {
  return spec.tags.map((/** @type {{name: string, description: string}} */ tag) =>
    element(
      "section",
      { "aria-labelledby": `tag-${tag.name}` },
      element("h2", { id: `tag-${tag.name}` }, tag.name.charAt(0).toUpperCase() + tag.name.slice(1)),
      element("p", { class: "muted" }, tag.description),
      ...all.filter(({ operation }) => operation.tags?.includes(tag.name)).map(({ view }) => view),
    ),
  );
}

/** @param {Shown[]} all @param {string} text */
function filter(all, text) {
  const words = text.toLowerCase().split(/\s+/).filter(Boolean);
  for (const { method, path, operation, view } of all) {
    const about = `${method} ${path} ${operation.summary} ${operation.description ?? ""}`.toLowerCase();
    view.hidden = !words.every((word) => about.includes(word));
  }
  for (const section of document.querySelectorAll("#routes > section")) {
    /** @type {HTMLElement} */ (section).hidden = !section.querySelector("details.operation:not([hidden])");
  }
}

/** Opens the route that the address names. */
function openNamed() {
  const named = location.hash.length > 1 && document.getElementById(decodeURIComponent(location.hash.slice(1)));
  if (!(named instanceof HTMLDetailsElement)) return;
  named.open = true;
  named.scrollIntoView();
}

/** @param {boolean} [ask] */
async function start(ask) {
  const status = find("#status");
  try {
    const spec = await apiJson("/openapi.json", { ask });
    const all = operations(spec);
    find("#about").replaceChildren(prose(spec.info.description ?? ""));
    find("#routes").replaceChildren(...sections(spec, all));
    const field = find("#filter");
    field.addEventListener("input", () => filter(all, field.value));
    filter(all, field.value); // it may be filled in before the reference is here
    status.hidden = true;
    openNamed();
  } catch (error) {
    const again = element("button", { type: "button", class: "button", onclick: () => void start(true) }, "Try again");
    status.replaceChildren(error instanceof Error ? `${error.message} ` : "The reference could not be loaded. ", again);
  }
}

mountNav();
addEventListener("hashchange", openNamed);
void start();
