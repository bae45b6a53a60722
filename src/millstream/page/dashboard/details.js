/** The dialog with everything that is known of a request. It follows a request that is still running. */

import { element, iconButton } from "../common/dom.js";
import { keyOf } from "./contract.js";
import { clock, count, known, span } from "./format.js";
import { showState, stateLabel } from "./states.js";
import { Timeline, durations } from "./timeline.js";
import { setText } from "./update.js";

/** @typedef {import("./contract.js").RequestRecord} RequestRecord */

export class Details {
  #state = stateLabel();
  #title = element("h2", { id: "request-title" });
  #error = element("p", { class: "notice error" });
  #timeline = new Timeline();
  #list = element("dl", { class: "details" });
  #dialog = element("dialog", { class: "request", "aria-labelledby": "request-title" });
  /** The key of the request that is shown, if the dialog is open. */
  key = "";

  /** @param {HTMLElement} parent */
  constructor(parent) {
    this.#dialog.append(
      element(
        "header",
        {},
        this.#title,
        this.#state,
        iconButton("close", "Close", () => this.#dialog.close()),
      ),
      this.#error,
      this.#timeline.node,
      this.#list,
    );
    this.#dialog.addEventListener("close", () => (this.key = ""));
    this.#dialog.addEventListener("click", (event) => {
      if (event.target === this.#dialog) this.#dialog.close();
    });
    parent.append(this.#dialog);
  }

  /**
   * @param {RequestRecord} request
   * @param {number} now
   */
  open(request, now) {
    this.key = keyOf(request);
    this.show(request, now);
    this.#dialog.showModal();
  }

  /**
   * @param {RequestRecord} request
   * @param {number} now
   */
  show(request, now) {
    setText(this.#title, request.model ?? "Request");
    showState(this.#state, request.state);
    setText(this.#error, request.error ?? "");
    this.#error.hidden = !request.error;
    this.#timeline.show(request, now);
    const pairs = rows(request, now).filter(([, text]) => text !== "");
    const texts = pairs.flat().join("\n");
    if (this.#list.dataset.texts === texts) return;
    this.#list.dataset.texts = texts;
    this.#list.replaceChildren(
      ...pairs.map(([label, text]) =>
        element("div", { class: "pair" }, element("dt", {}, label), element("dd", {}, text)),
      ),
    );
  }
}

/** @type {Record<string, string>} */
const PHASE_LABELS = { prepare: "Prepared in", queue: "Queued for", prefill: "Prefill", decode: "Decode" };

/**
 * @param {RequestRecord} request
 * @param {number} now
 * @returns {[string, string][]}
 */
function rows(request, now) {
  const phases = durations(request, now).map(
    ({ name, seconds }) => /** @type {[string, string]} */ ([PHASE_LABELS[name], span(seconds)]),
  );
  return [
    ["Began", clock(request.started)],
    ...phases,
    ["First token after", known(request.first_token) ? span(request.first_token) : ""],
    ["Total", span(request.total ?? now - request.started)],
    ["Prompt", known(request.prompt_tokens) ? promptWords(request) : ""],
    ["Answer", known(request.completion_tokens) ? `${count(request.completion_tokens)} tokens` : ""],
    ["Drafts", request.drafted_tokens ? draftWords(request) : ""],
    ["Ended by", request.finish_reason ?? ""],
    ["API", [request.dialect, request.endpoint].filter(Boolean).join(", ")],
    ["Request id", request.id],
  ];
}

/** @param {RequestRecord} request */
function promptWords(request) {
  const cached = request.cached_tokens ? `, ${count(request.cached_tokens)} of them cached` : "";
  return `${count(request.prompt_tokens)} tokens${cached}`;
}

/** @param {RequestRecord} request */
function draftWords(request) {
  return `${count(request.accepted_tokens ?? 0)} of ${count(request.drafted_tokens ?? 0)} tokens were right`;
}
