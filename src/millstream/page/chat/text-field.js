/** What the message fields have in common: they grow with their text, and Enter sends. */

const TALLEST = 320;

/** @param {HTMLTextAreaElement} field */
export function grow(field) {
  const fit = () => {
    field.style.height = "auto";
    field.style.height = `${Math.min(field.scrollHeight + 2, TALLEST)}px`;
  };
  field.addEventListener("input", fit);
  requestAnimationFrame(fit);
  return fit;
}

/** Enter sends, Shift+Enter is a new line. @param {HTMLTextAreaElement} field @param {() => void} send */
export function sendsOnEnter(field, send) {
  field.addEventListener("keydown", (event) => {
    // While an input method composes a word, Enter accepts that word.
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    send();
  });
}
