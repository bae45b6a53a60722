/** A request as a row of the table. */

import { element } from "../common/dom.js";
import { UNKNOWN, clock, count, known, span } from "./format.js";
import { showState, stateLabel } from "./states.js";
import { Timeline } from "./timeline.js";
import { setAttribute, setText } from "./update.js";

/** @typedef {import("./contract.js").RequestRecord} RequestRecord */

export class RequestRow {
  #open = element("button", { type: "button", class: "open" });
  #model = element("span", { class: "model-name" });
  #error = element("span", { class: "row-error" });
  #state = stateLabel();
  #timeline = new Timeline();
  #prompt = element("td", { class: "figure wide" });
  #answer = element("td", { class: "figure wide" });
  #first = element("td", { class: "figure wide" });
  #total = element("td", { class: "figure" });
  /** @type {RequestRecord|null} */
  #request = null;

  /** @param {(request: RequestRecord) => void} open shows its details */
  constructor(open) {
    this.node = element(
      "tr",
      {},
      element("td", { class: "began" }, this.#open),
      element("td", { class: "which" }, this.#model, this.#error),
      element("td", { class: "how" }, this.#state),
      element("td", { class: "where" }, this.#timeline.node),
      this.#prompt,
      this.#answer,
      this.#first,
      this.#total,
    );
    this.node.addEventListener("click", () => this.#request && open(this.#request));
  }

  /**
   * @param {RequestRecord} request
   * @param {number} now
   */
  show(request, now) {
    this.#request = request;
    setText(this.#open, clock(request.started));
    setAttribute(this.#open, "aria-label", `${clock(request.started)}: details of this request`);
    setText(this.#model, request.model ?? UNKNOWN);
    setText(this.#error, request.error ?? "");
    this.#error.hidden = !request.error;
    showState(this.#state, request.state);
    this.#timeline.show(request, now);
    const cached = request.cached_tokens ? ` (${count(request.cached_tokens)} cached)` : "";
    setText(this.#prompt, known(request.prompt_tokens) ? count(request.prompt_tokens) + cached : UNKNOWN);
    setText(this.#answer, count(request.completion_tokens));
    setText(this.#first, span(request.first_token));
    setText(this.#total, span(request.total ?? now - request.started));
  }
}
