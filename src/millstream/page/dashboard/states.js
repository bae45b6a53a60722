/** States of models and of requests: a word and a sign for each, so that colour is never the only difference. */

import { element } from "../common/dom.js";
import { setAttribute, setText } from "./update.js";

/** @type {Record<string, [string, string]>} */
const WORDS = {
  ready: ["●", "Ready"],
  loading: ["◔", "Loading"],
  unloaded: ["○", "Not loaded"],
  unloading: ["◔", "Unloading"],
  stopped: ["■", "Stopped"],
  preparing: ["◔", "Preparing"],
  queued: ["‖", "Queued"],
  prefill: ["▸", "Prefill"],
  decode: ["▸", "Decode"],
  done: ["✓", "Done"],
  cancelled: ["–", "Cancelled"],
  failed: ["✕", "Failed"],
};

export function stateLabel() {
  return element("span", { class: "state" }, element("span", { "aria-hidden": "true" }), element("span"));
}

/**
 * @param {Element} label made by `stateLabel`
 * @param {string} state
 * @param {string} [more] added to the word, such as a share
 */
export function showState(label, state, more = "") {
  const [sign, word] = WORDS[state] ?? ["?", state];
  setAttribute(label, "class", `state state-${state}`);
  setText(label.children[0], sign);
  setText(label.children[1], more ? `${word} ${more}` : word);
}
