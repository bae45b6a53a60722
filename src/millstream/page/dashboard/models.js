/** The cards of all models, and what their buttons do. */

import { announce } from "../common/announce.js";
import { confirmDialog } from "../common/dialogs.js";
import { Card } from "./card.js";
import { changeModel } from "./data.js";
import { plural } from "./format.js";
import { setChildren } from "./update.js";

/** @typedef {import("./contract.js").Model} Model */
/** @typedef {import("./contract.js").Status} Status */
/** @typedef {import("./history.js").History} History */

export class Models {
  /** @type {Map<string, Card>} */
  #cards = new Map();
  /** @type {Map<string, string>} */
  #problems = new Map();
  /** @type {Set<string>} */
  #changing = new Set();
  #history;
  #parent;
  #refresh;

  /**
   * @param {History} history
   * @param {HTMLElement} parent
   * @param {() => void} refresh asks the server at once
   */
  constructor(history, parent, refresh) {
    this.#history = history;
    this.#parent = parent;
    this.#refresh = refresh;
  }

  /**
   * @param {Model[]} models
   * @param {Status} status
   */
  show(models, status) {
    const nodes = models.map((model) => {
      const card = this.#cards.get(model.id) ?? new Card(model, (...args) => void this.#act(...args));
      this.#cards.set(model.id, card);
      if (model.state === "loading") this.#problems.delete(model.id); // somebody tries again
      const problem = this.#problems.get(model.id) ?? "";
      card.show(model, this.#history, status, problem, this.#changing.has(model.id));
      return card.node;
    });
    setChildren(this.#parent, nodes);
  }

  /**
   * @param {Model} model
   * @param {"load"|"unload"} action
   */
  async #act(model, action) {
    const passing = model.state === "loading" || model.state === "unloading";
    if (passing || this.#changing.has(model.id)) return;
    if (action === "unload" && !(await this.#mayUnload(model))) return;
    this.#changing.add(model.id);
    this.#problems.delete(model.id);
    announce(action === "load" ? `Loading ${model.id}.` : `Unloading ${model.id}.`);
    this.#refresh();
    try {
      await changeModel(model.id, action);
      announce(action === "load" ? `${model.id} is ready.` : `${model.id} is unloaded.`);
    } catch (error) {
      const message = error instanceof Error ? error.message : String(error);
      this.#problems.set(model.id, message);
      announce(message);
    } finally {
      this.#changing.delete(model.id);
      this.#refresh();
    }
  }

  /** @param {Model} model */
  async #mayUnload(model) {
    const busy = model.active + model.waiting;
    if (busy === 0) return true;
    const requests = busy === 1 ? "1 request is" : `${plural(busy, "request")} are`;
    return confirmDialog(
      `Unload ${model.id}?`,
      `${requests} still running. They get a short time to finish; those that do not are ended with an error.`,
      "Unload",
    );
  }
}
