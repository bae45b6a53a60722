/** Errors in words, each with what to do about it. */

/** What helps, by the code of the server's error. */
const HELP = {
  context_length_exceeded: "Start a new chat, edit an earlier message to make it shorter, or lower the maximum length.",
  engine_busy: "Many requests are waiting. Try again in a moment.",
  server_overloaded: "Try again in a moment.",
  too_many_connections: "Try again in a moment.",
  engine_unavailable: "The model is restarting. Try again in a moment.",
  insufficient_memory: "Unload another model on the dashboard, or choose a smaller one.",
  invalid_media: "Remove the file, or send it in another format.",
  model_not_found: "Choose another model above.",
  request_too_large: "Send fewer or smaller files.",
  incomplete: "Try again; if it happens often, look at the server's log.",
  engine_error: "Try again; if it happens often, look at the server's log.",
};

/** @param {unknown} error @returns {string} */
export function inWords(error) {
  const message = error instanceof Error && error.message ? error.message : "Something went wrong.";
  const code = error instanceof Object && "code" in error ? String(error.code) : "";
  const help = HELP[/** @type {keyof typeof HELP} */ (code)] ?? "";
  return help && !message.includes(help) ? `${message} ${help}` : message;
}

/** @param {number} seconds */
export function duration(seconds) {
  return seconds < 10 ? `${seconds.toFixed(1)} s` : `${Math.round(seconds)} s`;
}
