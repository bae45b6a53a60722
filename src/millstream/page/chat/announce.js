/** An answer is read to screen readers once, when it is complete, not token by token. */

import { announce } from "../common/announce.js";

const READ_ALOUD = 2000;

/** @param {import("./types.js").Message} message */
export function announceAnswer(message) {
  if (message.error) announce(`The answer failed: ${message.error}`);
  else if (message.finish === "stopped") announce("Stopped.");
  else if (message.text.length > READ_ALOUD)
    announce("The answer is complete. It is long: read it in the conversation.");
  else announce(`Answer: ${message.text}`);
}
