/** Tells screen readers what happened, through the element #live of the page. */

import { find } from "./dom.js";

/** @param {string} text */
export function announce(text) {
  const region = find("#live");
  region.textContent = "";
  setTimeout(() => (region.textContent = text), 50); // a text that is set again would not be read again
}
