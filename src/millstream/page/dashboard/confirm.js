/** A dialog that asks before something is done. */

import { element } from "../common/dom.js";

/**
 * @param {string} title
 * @param {string} text
 * @param {string} action the label of the button that does it
 * @returns {Promise<boolean>}
 */
export function confirmed(title, text, action) {
  const cancel = element("button", { class: "button", value: "" }, "Cancel");
  const dialog = element(
    "dialog",
    { class: "confirm", "aria-labelledby": "confirm-title", "aria-describedby": "confirm-text" },
    element(
      "form",
      { method: "dialog" },
      element("h2", { id: "confirm-title" }, title),
      element("p", { id: "confirm-text" }, text),
      element(
        "div",
        { class: "dialog-buttons" },
        cancel,
        element("button", { class: "button danger", value: "yes" }, action),
      ),
    ),
  );
  document.body.append(dialog);
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => {
      dialog.remove();
      resolve(dialog.returnValue === "yes");
    });
    dialog.showModal();
    cancel.focus();
  });
}
