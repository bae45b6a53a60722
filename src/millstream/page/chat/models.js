/** The models of the server: polled, shown in the picker with their state and progress. */

import { apiJson } from "../common/api.js";
import { element, find } from "../common/dom.js";

/** @typedef {import("./types.js").ModelInfo} ModelInfo */

const CALM = 5000;
const LOADING = 700;
const STATES = { ready: "", loading: "loading", unloaded: "loads when used", failed: "failed", unloading: "unloading" };

export class Models {
  /** @param {{chosen: () => void, changed: () => void, failed: (error: unknown) => void}} events */
  constructor(events) {
    this.events = events;
    /** @type {ModelInfo[]} */
    this.all = [];
    this.select = /** @type {HTMLSelectElement} */ (find("#model"));
    this.stateLine = /** @type {HTMLElement} */ (find("#model-state"));
    this.progress = /** @type {HTMLProgressElement} */ (find("#model-progress"));
    this.wanted = "";
    this.timer = 0;
    this.select.addEventListener("change", () => {
      this.wanted = this.select.value;
      this.draw();
      events.chosen();
    });
    document.addEventListener("visibilitychange", () => !document.hidden && this.pollNow());
    addEventListener("millstream:key", () => this.pollNow());
  }

  /** @returns {ModelInfo | undefined} the model that the picker shows */
  get current() {
    return this.all.find((model) => model.id === this.select.value);
  }

  /** @param {string} capability such as "vision" */
  can(capability) {
    return this.current?.capabilities?.includes(capability) ?? false;
  }

  /** The first model of the server that can do something, whichever is chosen; empty if there is none. @param {string} capability */
  first(capability) {
    return this.all.find((model) => model.capabilities?.includes(capability))?.id ?? "";
  }

  /** Shows a conversation's model, as soon as the server has it. @param {string} id */
  choose(id) {
    this.wanted = id;
    this.draw();
  }

  /** @param {boolean} [ask] ask for the key, even if that was declined before */
  pollNow(ask) {
    clearTimeout(this.timer);
    void this.poll(ask);
  }

  /** @param {boolean} [ask] */
  async poll(ask) {
    try {
      this.all = (await apiJson("/v1/models", { ask })).data;
      this.draw();
      this.events.changed();
    } catch (error) {
      this.events.failed(error);
    }
    clearTimeout(this.timer);
    const busy = this.all.some((model) => model.state === "loading" || model.state === "unloading");
    if (!document.hidden) this.timer = window.setTimeout(() => void this.poll(), busy ? LOADING : CALM);
  }

  draw() {
    const chats = this.all.filter(canChat);
    const shown = JSON.stringify(chats.map((model) => [model.id, model.state]));
    if (shown !== this.select.dataset.shown) {
      this.select.dataset.shown = shown;
      this.select.replaceChildren(...chats.map(option));
    }
    const known = chats.some((model) => model.id === this.wanted);
    const best = chats.find((model) => model.state === "ready") ?? chats[0];
    this.select.value = known ? this.wanted : (best?.id ?? "");
    const { current } = this;
    const loading = current?.state === "loading";
    this.stateLine.textContent = stateWords(current);
    this.stateLine.title = current?.error ?? "";
    this.stateLine.classList.toggle("failed", current?.state === "failed");
    this.progress.hidden = !loading;
    if (current?.progress != null) this.progress.value = current.progress;
    else this.progress.removeAttribute("value");
  }
}

/** Models that embed, speak or transcribe are no choice for a chat. Of some nothing is known before they are loaded. @param {ModelInfo} model */
function canChat({ capabilities = [] }) {
  return !capabilities.length || capabilities.includes("completion");
}

/** @param {ModelInfo} model */
function option(model) {
  const words = STATES[/** @type {keyof typeof STATES} */ (model.state)] ?? model.state;
  return element("option", { value: model.id }, words ? `${model.id} (${words})` : model.id);
}

/** @param {ModelInfo | undefined} model */
function stateWords(model) {
  if (!model) return "";
  if (model.state === "loading") {
    const share = model.progress == null ? "" : ` ${Math.round(model.progress * 100)} %`;
    return `${capital(model.phase || "loading")}${share}`;
  }
  if (model.state === "failed") return model.error ? `Failed: ${model.error}` : "Failed";
  return "";
}

/** @param {string} text */
function capital(text) {
  return text.charAt(0).toUpperCase() + text.slice(1);
}
