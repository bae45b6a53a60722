/** Small dialogs: a question, a line of text, a choice. */

import { element } from "./dom.js";

/**
 * Opens a dialog with these parts and resolves with the value of the button that closed it; empty if it was dismissed.
 * @param {string} title
 * @param {import("./dom.js").Child[]} parts
 * @param {{value: string, label: string, class?: string}[]} buttons the first one that submits is the default
 * @returns {Promise<string>}
 */
export function openDialog(title, parts, buttons) {
  const id = `dialog-${title.toLowerCase().replace(/\W+/g, "-")}`;
  const dialog = element(
    "dialog",
    { "aria-labelledby": id },
    element(
      "form",
      { method: "dialog" },
      element("h2", { id }, title),
      ...parts,
      element(
        "div",
        { class: "dialog-buttons" },
        element("button", { class: "button", type: "button", onclick: () => dialog.close("") }, "Cancel"),
        ...buttons.map((button) =>
          element(
            "button",
            { class: button.class ?? "button primary", type: "submit", value: button.value },
            button.label,
          ),
        ),
      ),
    ),
  );
  document.body.append(dialog);
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => {
      dialog.remove();
      resolve(dialog.returnValue);
    });
    dialog.showModal();
  });
}

/** @param {string} title @param {string} text @param {string} yes the label of the button that agrees */
export async function confirmDialog(title, text, yes) {
  return (
    (await openDialog(title, [element("p", {}, text)], [{ value: "yes", label: yes, class: "button danger" }])) ===
    "yes"
  );
}

/** @param {string} title @param {string} label @param {string} value @returns {Promise<string | null>} null if it was dismissed */
export async function askForText(title, label, value) {
  const input = element("input", { class: "input", value, required: true, maxlength: "200" });
  const field = element("label", { class: "field" }, element("span", { class: "label" }, label), input);
  const opened = openDialog(title, [field], [{ value: "ok", label: "Save" }]);
  input.select();
  return (await opened) === "ok" ? input.value.trim() || null : null;
}
