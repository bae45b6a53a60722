/** One message of the conversation, drawn. */

import { copyText } from "../common/clipboard.js";
import { element, icon, iconButton } from "../common/dom.js";
import { MarkdownView } from "../common/markdown.js";
import { attachmentView } from "./attachment-view.js";
import { callViews } from "./tool-calls.js";
import { duration } from "./words.js";

/** @typedef {import("./types.js").Message} Message */

/**
 * What a person can do with a message.
 * @typedef {object} Actions
 * @property {(message: Message) => void} edit
 * @property {(message: Message) => void} retry
 * @property {(message: Message, step: number) => void} turn shows another version
 * @property {(message: Message, callId: string, result: string) => void} giveResult
 * @property {(message: Message, answer: HTMLElement) => void} readAloud or stops reading
 */

/** What is said of an answer by how it ended. */
const NOTES = {
  length: "The answer ends here: it reached the maximum length.",
  stopped: "You stopped this answer.",
  interrupted: "The page was closed before this answer was complete.",
};

const READ = "Read aloud";

export class MessageView {
  /** @param {Message} message @param {Actions} actions */
  constructor(message, actions) {
    this.message = message;
    this.settled = false;
    this.actions = actions;
    /** @type {HTMLElement | null} */
    this.speak = null;
    this.reasoning = element("div", { class: "prose" });
    this.summary = element("span", {}, "Reasoning");
    this.fold = element(
      "details",
      { class: "reasoning", hidden: true },
      element("summary", {}, this.summary),
      this.reasoning,
    );
    this.content = element("div", { class: message.role === "user" ? "bubble" : "prose" });
    this.files = element("div", { class: "files" });
    this.calls = element("div", { class: "calls" });
    this.status = element("div", { class: "status" });
    this.versions = element("span", { class: "versions" });
    this.figures = element("span", { class: "figures muted" });
    this.buttons = element("div", { class: "message-buttons" }, this.versions, ...this.makeButtons(), this.figures);
    const who = message.role === "user" ? "You" : message.role === "tool" ? "Result" : message.model || "Model";
    this.element = element(
      "article",
      {
        class: `message ${message.role}`,
        "aria-label": message.role === "user" ? "Your message" : `${who}`,
        dataset: { id: message.id },
      },
      element("h3", { class: message.role === "user" ? "visually-hidden" : "who" }, who),
      this.fold,
      this.files,
      this.content,
      this.calls,
      this.status,
      this.buttons,
    );
    this.markdown = new MarkdownView(this.content);
    this.thoughts = new MarkdownView(this.reasoning);
    for (const file of message.attachments ?? []) this.files.append(attachmentView(file));
  }

  /** @returns {HTMLElement[]} */
  makeButtons() {
    const copy = iconButton("copy", "Copy", () => void copyText(this.message.text, copy));
    if (this.message.role === "user") {
      return [copy, iconButton("edit", "Edit", () => this.actions.edit(this.message))];
    }
    if (this.message.role === "tool") return [copy];
    this.speak = iconButton("speaker", READ, () => this.actions.readAloud(this.message, this.content), {
      class: "icon-button read-aloud",
    });
    return [copy, iconButton("retry", "Try again", () => this.actions.retry(this.message)), this.speak];
  }

  /** @param {boolean} reading */
  showReading(reading) {
    if (!this.speak) return;
    this.speak.replaceChildren(icon(reading ? "stop" : "speaker"));
    this.speak.ariaLabel = this.speak.title = reading ? "Stop reading" : READ;
  }

  /** @param {{versions: Message[], open: string[]}} place its siblings, and its calls that lack a result */
  draw({ versions, open }) {
    const { message } = this;
    const writing = message.role === "assistant" && message.seconds === undefined;
    this.element.classList.toggle("writing", writing);
    this.element.setAttribute("aria-busy", String(writing));
    if (message.role === "assistant") this.markdown.draw(message.text);
    else this.content.textContent = message.text;
    this.content.hidden = !message.text;
    this.drawReasoning(writing);
    this.drawCalls(open);
    this.drawStatus(writing);
    this.drawVersions(versions);
    this.figures.textContent = figures(message);
    this.buttons.hidden = writing;
  }

  /** Calls are drawn anew only if they changed: a result may be half typed. @param {string[]} open */
  drawCalls(open) {
    const shown = JSON.stringify([this.message.calls, open]);
    if (shown === this.calls.dataset.shown) return;
    this.calls.dataset.shown = shown;
    this.calls.replaceChildren(...callViews(this.message, open, this.actions.giveResult));
  }

  /** @param {boolean} writing */
  drawReasoning(writing) {
    const { reasoning = "", text } = this.message;
    this.fold.hidden = !reasoning;
    if (!reasoning) return;
    this.summary.textContent = writing && !text ? "Thinking…" : "Reasoning";
    this.thoughts.draw(reasoning);
  }

  /** @param {boolean} writing */
  drawStatus(writing) {
    const { error, finish, text, reasoning } = this.message;
    const parts = [];
    if (writing && !text && !reasoning)
      parts.push(
        element(
          "span",
          { class: "dots", role: "img", "aria-label": "Waiting for the answer" },
          element("i"),
          element("i"),
          element("i"),
        ),
      );
    if (error) parts.push(element("div", { class: "notice error" }, error));
    const note = NOTES[/** @type {keyof typeof NOTES} */ (finish)];
    if (note && !writing) parts.push(element("div", { class: "note muted" }, note));
    this.status.replaceChildren(...parts);
  }

  /** @param {Message[]} versions */
  drawVersions(versions) {
    const at = versions.findIndex((each) => each.id === this.message.id);
    this.versions.hidden = versions.length < 2;
    if (versions.length < 2) return this.versions.replaceChildren();
    const back = iconButton("back", "Previous version", () => this.actions.turn(this.message, -1), {
      disabled: at === 0,
    });
    const forward = iconButton("forward", "Next version", () => this.actions.turn(this.message, 1), {
      disabled: at === versions.length - 1,
    });
    this.versions.replaceChildren(back, element("span", { class: "count" }, `${at + 1} / ${versions.length}`), forward);
  }
}

/** Tokens and times of an answer. @param {Message} message */
function figures({ usage, seconds, firstToken }) {
  if (!usage || !seconds) return "";
  const rate = usage.completion / Math.max(seconds - (firstToken ?? 0), 0.001);
  const parts = [`${usage.completion} tokens`];
  if (usage.completion > 1) parts.push(`${rate < 10 ? rate.toFixed(1) : Math.round(rate)} per second`);
  if (firstToken) parts.push(`first after ${duration(firstToken)}`);
  return parts.join(" · ");
}

/** @param {string} title @param {string} text */
export function emptyView(title, text) {
  return element(
    "div",
    { class: "empty" },
    icon("wheel"),
    element("h2", {}, title),
    element("p", { class: "muted" }, text),
  );
}
