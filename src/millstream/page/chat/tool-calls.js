/** Tool calls of an answer: what the model wants to call, and a field for what the tool returned. */

import { element } from "../common/dom.js";

/** @typedef {import("./types.js").Message} Message */

/**
 * @param {Message} message
 * @param {string[]} open ids of calls whose results can be given
 * @param {(message: Message, callId: string, result: string) => void} giveResult
 * @returns {HTMLElement[]}
 */
export function callViews(message, open, giveResult) {
  return (message.calls ?? []).map((call) =>
    element(
      "section",
      { class: "call", "aria-label": `Tool call ${call.name}` },
      element("h4", {}, "Calls ", element("code", {}, call.name || "…")),
      element("pre", { tabindex: "0" }, indented(call.arguments)),
      open.includes(call.id) && resultForm((result) => giveResult(message, call.id, result), call.id),
    ),
  );
}

/** @param {string} text */
function indented(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text; // it is still being written
  }
}

/** @param {(result: string) => void} give @param {string} callId */
function resultForm(give, callId) {
  const field = element("textarea", { class: "input", rows: "2", required: true, id: `result-${callId}` });
  return element(
    "form",
    {
      onsubmit: (/** @type {Event} */ event) => {
        event.preventDefault();
        give(field.value);
      },
    },
    element("label", { class: "field" }, element("span", { class: "label" }, "What the tool returned"), field),
    element("button", { class: "button", type: "submit" }, "Send the result"),
  );
}
