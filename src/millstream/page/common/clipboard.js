/** Copies text, also on pages without HTTPS, where browsers have no clipboard API. */

import { element, icon } from "./dom.js";
import { announce } from "./announce.js";

/**
 * @param {string} text
 * @param {HTMLElement} [button] shows for a moment that it worked
 */
export async function copyText(text, button) {
  if (navigator.clipboard) await navigator.clipboard.writeText(text);
  else copyBySelection(text);
  announce("Copied.");
  if (!button) return;
  button.replaceChildren(icon("check"));
  setTimeout(() => button.replaceChildren(icon("copy")), 1500);
}

/** @param {string} text */
function copyBySelection(text) {
  const area = element("textarea", { class: "visually-hidden", value: text });
  const focused = document.activeElement;
  document.body.append(area);
  area.select();
  document.execCommand("copy");
  area.remove();
  if (focused instanceof HTMLElement) focused.focus();
}
