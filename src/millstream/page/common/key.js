/** The API key: where it is kept, and the dialog that asks for it. */

import { element } from "./dom.js";

const NAME = "millstream.key";

/** @returns {string} the key that was given in this browser, or an empty string */
export function storedKey() {
  try {
    return sessionStorage.getItem(NAME) ?? localStorage.getItem(NAME) ?? "";
  } catch {
    return held;
  }
}

/** For browsers that block storage: the key until the page is closed. */
let held = "";

/**
 * @param {string} key an empty one forgets it
 * @param {boolean} [remember] keep it after the browser is closed
 */
export function storeKey(key, remember = false) {
  held = key;
  try {
    sessionStorage.removeItem(NAME);
    localStorage.removeItem(NAME);
    if (key) (remember ? localStorage : sessionStorage).setItem(NAME, key);
  } catch {
    // Storage is blocked: `held` has the key.
  }
  dispatchEvent(new CustomEvent("millstream:key"));
}

/** @type {Promise<boolean> | null} */
let asking = null;

/**
 * Asks for the key. All callers share one dialog.
 * @param {string} [reason] what the server said of the last key
 * @returns {Promise<boolean>} false if the person closed the dialog
 */
export function askForKey(reason = "") {
  asking ??= openDialog(reason).finally(() => (asking = null));
  return asking;
}

/** @param {string} reason @returns {Promise<boolean>} */
function openDialog(reason) {
  const input = element("input", {
    class: "input",
    id: "key-input",
    type: "password",
    autocomplete: "current-password",
    required: true,
    "aria-describedby": reason ? "key-reason" : null,
    "aria-invalid": reason ? "true" : null,
  });
  const remember = element("input", { type: "checkbox", id: "key-remember" });
  const dialog = element(
    "dialog",
    { class: "key-dialog", "aria-labelledby": "key-title" },
    element(
      "form",
      { method: "dialog" },
      element("h2", { id: "key-title" }, "API key"),
      element("p", {}, "This server asks for a key. It is the one that it was started with (--api-key)."),
      reason && element("p", { class: "notice error", id: "key-reason", role: "alert" }, reason),
      element("label", { class: "field" }, element("span", { class: "label" }, "Key"), input),
      element("label", { class: "check" }, remember, "Keep it in this browser"),
      element(
        "div",
        { class: "dialog-buttons" },
        element("button", { class: "button", type: "button", value: "", onclick: () => dialog.close("") }, "Not now"),
        element("button", { class: "button primary", type: "submit", value: "ok" }, "Use this key"),
      ),
    ),
  );
  document.body.append(dialog);
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => {
      const given = dialog.returnValue === "ok" && input.value.trim() !== "";
      if (given) storeKey(input.value.trim(), remember.checked);
      dialog.remove();
      resolve(given);
    });
    dialog.showModal();
    input.focus();
  });
}
