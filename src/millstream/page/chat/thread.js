/** The conversation on the screen: its messages in order, drawn as they change, scrolled as the reader wants. */

import { find } from "../common/dom.js";
import { editForm } from "./edit-form.js";
import { emptyView, MessageView } from "./message.js";
import { shownPath, siblings } from "./tree.js";

/** @typedef {import("./types.js").Conversation} Conversation */
/** @typedef {import("./types.js").Message} Message */

const NEAR = 80;
const DRAW_EVERY = 60;

export class Thread {
  /** @param {import("./message.js").Actions & {edited: (message: Message, text: string) => void}} actions */
  constructor(actions) {
    /** @type {import("./message.js").Actions} */
    this.actions = {
      ...actions,
      edit: (message) => this.edit(message),
      turn: (message, step) => {
        actions.turn(message, step);
        this.focusVersions(message.parent, step);
      },
    };
    this.edited = actions.edited;
    this.element = /** @type {HTMLElement} */ (find("#thread"));
    this.toEnd = /** @type {HTMLElement} */ (find("#to-end"));
    /** @type {Map<string, MessageView>} */
    this.views = new Map();
    /** @type {Conversation | null} */
    this.conversation = null;
    this.follows = true;
    this.timer = 0;
    this.element.addEventListener("scroll", () => this.noteScroll());
    this.toEnd.addEventListener("click", () => this.scrollToEnd());
  }

  /** @param {Conversation} conversation */
  show(conversation) {
    this.conversation = conversation;
    this.views.clear();
    this.element.replaceChildren();
    this.draw();
    this.scrollToEnd();
  }

  /** Draws soon, and not more often than a person can see. */
  drawSoon() {
    this.timer ||= window.setTimeout(() => {
      this.timer = 0;
      this.draw();
    }, DRAW_EVERY);
  }

  draw() {
    const { conversation } = this;
    if (!conversation) return;
    const path = shownPath(conversation);
    const shown = new Set(path.map((message) => message.id));
    for (const [id, view] of this.views) {
      if (!shown.has(id)) {
        view.element.remove();
        this.views.delete(id);
      }
    }
    this.element.querySelector(".empty")?.remove();
    if (!path.length)
      this.element.append(emptyView("What would you like to know?", "Ask a question, or paste a text to work on."));
    path.forEach((message, index) => this.place(message, index, path));
    if (this.follows) this.scrollToEnd();
    this.noteScroll();
  }

  /** @param {Message} message @param {number} index @param {Message[]} path */
  place(message, index, path) {
    let view = this.views.get(message.id);
    const isNew = !view;
    view ??= new MessageView(message, this.actions);
    this.views.set(message.id, view);
    if (this.element.children[index] !== view.element)
      this.element.insertBefore(view.element, this.element.children[index] ?? null);
    const conversation = /** @type {Conversation} */ (this.conversation);
    if (!isNew && view.settled && index !== path.length - 1) return;
    view.draw({ versions: siblings(conversation, message), open: openCalls(message, path.slice(index + 1)) });
    view.settled = message.seconds !== undefined && index !== path.length - 1;
  }

  /** Draws versions anew, where siblings were added. */
  redraw() {
    for (const view of this.views.values()) view.settled = false;
    this.draw();
  }

  /** The buttons of a version are gone with it: the focus goes to those of the next. @param {string} parent @param {number} step */
  focusVersions(parent, step) {
    const view = [...this.views.values()].find((each) => each.message.parent === parent);
    const [back, forward] = view?.versions.querySelectorAll("button") ?? [];
    const wanted = step < 0 ? [back, forward] : [forward, back];
    wanted.find((button) => button && !button.disabled)?.focus();
  }

  /** Offers to read answers aloud. @param {boolean} speaks */
  offerReading(speaks) {
    this.element.classList.toggle("speaks", speaks);
  }

  /** @param {string} id of the message that is read aloud; empty if none */
  showReading(id) {
    for (const [each, view] of this.views) view.showReading(each === id);
  }

  scrollToEnd() {
    this.element.scrollTop = this.element.scrollHeight;
    this.follows = true;
  }

  noteScroll() {
    const { scrollTop, scrollHeight, clientHeight } = this.element;
    this.follows = scrollHeight - scrollTop - clientHeight < NEAR;
    this.toEnd.hidden = this.follows;
  }

  /** The message becomes a field; sending it starts another branch. @param {Message} message */
  edit(message) {
    const view = this.views.get(message.id);
    if (!view || view.element.querySelector("form.edit")) return;
    const close = () => {
      form.remove();
      view.content.hidden = !message.text;
      view.buttons.hidden = false;
    };
    const form = editForm(message.text, {
      send: (text) => {
        close();
        this.edited(message, text);
      },
      cancel: () => {
        close();
        /** @type {HTMLElement | null} */ (view.buttons.querySelector("[aria-label=Edit]"))?.focus();
      },
    });
    view.content.hidden = true;
    view.buttons.hidden = true;
    view.content.after(form);
    /** @type {HTMLTextAreaElement} */ (form.querySelector("textarea")).focus();
  }

  editLast() {
    const last = this.conversation && shownPath(this.conversation).findLast((message) => message.role === "user");
    if (last) this.edit(last);
  }
}

/**
 * The calls whose results can still be given: nothing but results follows.
 * @param {Message} message
 * @param {Message[]} after
 */
function openCalls(message, after) {
  if (!message.finish || after.some((each) => each.role !== "tool")) return [];
  const given = new Set(after.map((each) => each.callId));
  return (message.calls ?? []).map((call) => call.id).filter((id) => !given.has(id));
}
