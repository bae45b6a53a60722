/** The list of conversations, with search. On narrow screens it slides in from the left. */

import { element, find, icon } from "../common/dom.js";

/** @typedef {import("./types.js").Conversation} Conversation */

const DAY = 24 * 3600 * 1000;

export class Sidebar {
  /** @param {{fresh: () => void, open: (id: string) => void}} actions */
  constructor(actions) {
    this.actions = actions;
    this.element = /** @type {HTMLElement} */ (find("#sidebar"));
    this.list = /** @type {HTMLElement} */ (find("#conversations"));
    this.search = /** @type {HTMLInputElement} */ (find("#search"));
    this.backdrop = /** @type {HTMLElement} */ (find("#backdrop"));
    this.narrow = matchMedia("(max-width: 760px)");
    this.toggle = element(
      "button",
      {
        type: "button",
        class: "icon-button sidebar-toggle",
        "aria-label": "Conversations",
        "aria-controls": "sidebar",
        "aria-expanded": "false",
        onclick: () => this.setOpen(!this.isOpen),
      },
      icon("menu"),
    );
    /** @type {Conversation[]} */
    this.all = [];
    this.current = "";
    const fresh = find("#new-chat");
    fresh.prepend(icon("plus"));
    fresh.addEventListener("click", () => {
      this.setOpen(false);
      actions.fresh();
    });
    this.search.addEventListener("input", () => this.draw());
    this.backdrop.addEventListener("click", () => this.setOpen(false));
    this.narrow.addEventListener("change", () => this.setOpen(false));
    this.element.addEventListener("keydown", (event) => {
      if (event.key !== "Escape" || !this.isOpen) return;
      event.stopPropagation();
      this.setOpen(false);
      this.toggle.focus();
    });
    this.setOpen(false);
  }

  get isOpen() {
    return this.element.classList.contains("open");
  }

  /** @param {boolean} open */
  setOpen(open) {
    this.element.classList.toggle("open", open);
    this.toggle.setAttribute("aria-expanded", String(open));
    this.backdrop.hidden = !open;
    this.element.inert = this.narrow.matches && !open; // what is off the screen takes no focus
    if (open) this.search.focus();
  }

  /** @param {Conversation[]} all @param {string} current */
  show(all, current) {
    this.all = all;
    this.current = current;
    this.draw();
  }

  draw() {
    const words = this.search.value.toLowerCase().split(/\s+/).filter(Boolean);
    const found = this.all.filter((conversation) => matches(conversation, words));
    const groups = new Map();
    for (const conversation of found) {
      const name = dayOf(conversation.updated);
      groups.set(name, [...(groups.get(name) ?? []), conversation]);
    }
    const parts = [...groups].map(([name, members]) =>
      element(
        "section",
        {},
        element("h2", {}, name),
        element("ul", {}, ...members.map((/** @type {Conversation} */ each) => this.item(each))),
      ),
    );
    const none = words.length ? "Nothing found." : "Your conversations appear here.";
    this.list.replaceChildren(...(parts.length ? parts : [element("p", { class: "muted none" }, none)]));
  }

  /** @param {Conversation} conversation */
  item(conversation) {
    const link = element(
      "a",
      {
        href: `#c=${conversation.id}`,
        "aria-current": conversation.id === this.current ? "true" : null,
        title: conversation.title,
      },
      conversation.title,
    );
    link.addEventListener("click", () => this.setOpen(false));
    return element("li", {}, link);
  }
}

/** True if title and messages together have all words. @param {Conversation} conversation @param {string[]} words */
function matches(conversation, words) {
  if (!words.length) return true;
  const text = [conversation.title, ...Object.values(conversation.messages).map((message) => message.text)]
    .join("\n")
    .toLowerCase();
  return words.every((word) => text.includes(word));
}

/** @param {number} time */
function dayOf(time) {
  const days = Math.floor((new Date().setHours(24, 0, 0, 0) - time) / DAY);
  if (days <= 0) return "Today";
  if (days === 1) return "Yesterday";
  return days < 7 ? "This week" : "Earlier";
}
