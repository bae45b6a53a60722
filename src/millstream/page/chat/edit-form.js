/** A message of one's own as a field. */

import { element } from "../common/dom.js";
import { grow, sendsOnEnter } from "./text-field.js";

/**
 * @param {string} text
 * @param {{send: (text: string) => void, cancel: () => void}} actions
 */
export function editForm(text, { send, cancel }) {
  const field = element("textarea", { class: "input", "aria-label": "Edit your message", value: text });
  const form = element(
    "form",
    { class: "edit" },
    field,
    element(
      "div",
      { class: "dialog-buttons" },
      element("button", { class: "button", type: "button", onclick: cancel }, "Cancel"),
      element("button", { class: "button primary", type: "submit" }, "Send"),
    ),
  );
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    if (field.value.trim()) send(field.value);
  });
  form.addEventListener("keydown", (event) => {
    if (event.key !== "Escape") return;
    event.stopPropagation();
    cancel();
  });
  sendsOnEnter(field, () => form.requestSubmit());
  grow(field);
  return form;
}
