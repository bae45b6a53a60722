/** Tells screen readers what happened. An answer is read once, when it is complete, not token by token. */

import { find } from "../common/dom.js";

const READ_ALOUD = 2000;

/** @param {string} text */
export function announce(text) {
  const region = find("#live");
  region.textContent = "";
  setTimeout(() => (region.textContent = text), 50); // a text that is set again would not be read again
}

/** @param {import("./types.js").Message} message */
export function announceAnswer(message) {
  if (message.error) announce(`The answer failed: ${message.error}`);
  else if (message.finish === "stopped") announce("Stopped.");
  else if (message.text.length > READ_ALOUD) announce("The answer is complete. It is long: read it in the conversation.");
  else announce(`Answer: ${message.text}`);
}
