/** The table of requests: those that run, then those that ended, newest first. */

import { element } from "../common/dom.js";
import { RUNNING_STATES, keyOf } from "./contract.js";
import { Details } from "./details.js";
import { RequestRow } from "./request-row.js";
import { setChildren, setOptions, setText } from "./update.js";

/** @typedef {import("./contract.js").RequestRecord} RequestRecord */
/** @typedef {import("./contract.js").Requests} Requests */

const FIRST_ROWS = 12;

export class RequestTable {
  /** @type {Map<string, RequestRow>} */
  #rows = new Map();
  /** @type {RequestRecord[]} */
  #requests = [];
  #now = 0;
  #all = false;
  #details = new Details(document.body);
  #more = element("button", { type: "button", class: "button", hidden: true });
  #empty = element("p", { class: "muted empty" });
  #table;
  #body;
  #model;
  #state;

  /**
   * @param {HTMLTableElement} table
   * @param {HTMLSelectElement} model
   * @param {HTMLSelectElement} state
   */
  constructor(table, model, state) {
    this.#table = table;
    this.#body = table.tBodies[0];
    this.#model = model;
    this.#state = state;
    table.after(this.#empty, this.#more);
    for (const filter of [model, state]) filter.addEventListener("change", () => this.#draw());
    this.#more.addEventListener("click", () => {
      this.#all = !this.#all;
      this.#draw();
    });
  }

  /**
   * @param {Requests} requests
   * @param {string[]} models
   * @param {number} now by the server's clock
   */
  show(requests, models, now) {
    this.#requests = [...requests.running, ...requests.recent];
    this.#now = now;
    setOptions(this.#model, [["", "All models"]], models);
    this.#draw();
    const open = this.#requests.find((request) => keyOf(request) === this.#details.key);
    if (open) this.#details.show(open, now);
  }

  #draw() {
    const wanted = this.#requests.filter((request) => this.#isWanted(request));
    const shown = this.#all ? wanted : wanted.slice(0, FIRST_ROWS);
    setChildren(
      this.#body,
      shown.map((request) => this.#row(request)),
    );
    const known = new Set(this.#requests.map(keyOf));
    for (const key of this.#rows.keys()) if (!known.has(key)) this.#rows.delete(key);
    this.#table.hidden = shown.length === 0;
    this.#empty.hidden = shown.length > 0;
    const none = "No requests yet. Send one from the chat, and it appears here.";
    setText(this.#empty, this.#requests.length ? "No request matches the filters." : none);
    this.#more.hidden = wanted.length <= FIRST_ROWS;
    setText(this.#more, this.#all ? "Show fewer" : `Show all ${wanted.length}`);
  }

  /** @param {RequestRecord} request */
  #isWanted(request) {
    const state = this.#state.value;
    const inState = !state || (state === "running" ? RUNNING_STATES.includes(request.state) : request.state === state);
    return inState && (!this.#model.value || request.model === this.#model.value);
  }

  /** @param {RequestRecord} request */
  #row(request) {
    const key = keyOf(request);
    const row = this.#rows.get(key) ?? new RequestRow((shown) => this.#details.open(shown, this.#now));
    this.#rows.set(key, row);
    row.show(request, this.#now);
    return row.node;
  }
}
