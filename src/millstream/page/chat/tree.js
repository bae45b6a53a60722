/** A conversation is a tree of messages: editing and retrying add siblings, and nothing is lost. */

/** @typedef {import("./types.js").Conversation} Conversation */
/** @typedef {import("./types.js").Message} Message */

/** @returns {string} an id that is unique also on pages without HTTPS, which have no `randomUUID` */
export function newId() {
  const bytes = crypto.getRandomValues(new Uint8Array(12));
  return Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("");
}

/**
 * @param {string} model
 * @param {import("./types.js").Settings} settings
 * @returns {Conversation}
 */
export function newConversation(model, settings) {
  const now = Date.now();
  return {
    id: newId(),
    title: "New chat",
    renamed: false,
    created: now,
    updated: now,
    model,
    settings: structuredClone(settings),
    messages: {},
    selected: {},
  };
}

/** @param {Conversation} conversation @param {string} parent @returns {Message[]} in the order of their creation */
export function children(conversation, parent) {
  return Object.values(conversation.messages)
    .filter((message) => message.parent === parent)
    .sort((one, other) => one.created - other.created || one.id.localeCompare(other.id));
}

/** @param {Conversation} conversation @param {Message} message @returns {Message[]} itself among them */
export function siblings(conversation, message) {
  return children(conversation, message.parent).filter((each) => each.role === message.role);
}

/** The messages that are shown: from the first along the chosen branches. @param {Conversation} conversation */
export function shownPath(conversation) {
  /** @type {Map<string, Message[]>} */
  const byParent = new Map();
  for (const message of Object.values(conversation.messages)) {
    byParent.set(message.parent, [...(byParent.get(message.parent) ?? []), message]);
  }
  /** @type {Message[]} */
  const path = [];
  for (let options = byParent.get(""); options?.length; options = byParent.get(path[path.length - 1].id)) {
    const chosen = conversation.selected[options[0].parent];
    const newest = options.reduce((one, other) => (other.created >= one.created ? other : one));
    path.push(options.find((message) => message.id === chosen) ?? newest);
  }
  return path;
}

/** The messages before one, with the first in front. @param {Conversation} conversation @param {string} id */
export function pathTo(conversation, id) {
  /** @type {Message[]} */
  const path = [];
  for (let message = conversation.messages[id]; message; message = conversation.messages[message.parent]) {
    path.unshift(message);
  }
  return path;
}

/**
 * Adds a message and chooses its branch.
 * @param {Conversation} conversation
 * @param {Omit<Message, "id" | "created">} fields
 * @returns {Message}
 */
export function addMessage(conversation, fields) {
  const last = children(conversation, fields.parent).at(-1);
  const created = Math.max(Date.now(), (last?.created ?? 0) + 1);
  const message = { ...fields, id: newId(), created };
  conversation.messages[message.id] = message;
  conversation.selected[message.parent] = message.id;
  conversation.updated = Date.now();
  if (!conversation.renamed && !message.parent && message.role === "user") conversation.title = titleOf(message);
  return message;
}

/** @param {Conversation} conversation @param {Message} message */
export function choose(conversation, message) {
  conversation.selected[message.parent] = message.id;
}

/** @param {Message} message */
function titleOf(message) {
  const line = message.text.trim().split("\n")[0] || message.attachments?.[0]?.name || "New chat";
  return line.length > 60 ? `${line.slice(0, 57).trimEnd()}…` : line;
}
