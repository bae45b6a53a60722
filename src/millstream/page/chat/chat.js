/** The chat itself: which conversation is open, what is being written, and what a person's actions do. */

import { announce } from "../common/announce.js";
import { announceAnswer } from "./announce.js";
import { streamAnswer } from "./answer.js";
import { lastSettings } from "./settings.js";
import { deleteConversation, listConversations, readConversation, saveConversation, saveFile } from "./store.js";
import { addMessage, choose, newConversation, pathTo, shownPath, siblings } from "./tree.js";

/** @typedef {import("./types.js").Conversation} Conversation */
/** @typedef {import("./types.js").Message} Message */

const SAVE_EVERY = 1000;

export class Chat {
  /**
   * @param {object} view what shows the chat
   * @param {(conversation: Conversation) => void} view.opened
   * @param {() => void} view.grew more of an answer is there
   * @param {() => void} view.changed messages or versions are different
   * @param {(all: Conversation[], current: string) => void} view.listed
   * @param {(running: boolean) => void} view.running
   * @param {(problem: string) => void} view.problem
   * @param {() => string} view.model the id of the chosen model
   */
  constructor(view) {
    this.view = view;
    this.conversation = newConversation("", lastSettings());
    /** Answers that are being written, by conversation: they go on while another one is shown.
     * @type {Map<string, {conversation: Conversation, controller: AbortController}>} */
    this.running = new Map();
    /** Ids of deleted conversations: what is still being written there is not saved. @type {Set<string>} */
    this.deleted = new Set();
  }

  fresh() {
    this.show(newConversation(this.view.model(), lastSettings()));
  }

  /** @param {string} id */
  async open(id) {
    if (id === this.conversation.id) return;
    const found = this.running.get(id)?.conversation ?? (await readConversation(id));
    if (found) this.show(this.running.has(id) ? found : settled(found));
    else this.fresh();
  }

  /** @param {Conversation} conversation */
  show(conversation) {
    this.conversation = conversation;
    this.view.opened(conversation);
    this.view.running(this.running.has(conversation.id));
    void this.list();
  }

  async list() {
    this.view.listed(await listConversations(), this.conversation.id);
  }

  /** @param {Conversation} [conversation] */
  async save(conversation = this.conversation) {
    if (this.deleted.has(conversation.id)) return;
    try {
      await saveConversation(conversation);
    } catch (error) {
      const why = error instanceof Error ? error.message : String(error);
      this.view.problem(`This browser could not save the conversation (${why}). Export it if you need it later.`);
    }
  }

  /** @param {string} text @param {import("./files.js").PendingFile[]} files */
  async send(text, files) {
    for (const { attachment, blob } of files) await saveFile(attachment.id, blob);
    const parent = shownPath(this.conversation).at(-1)?.id ?? "";
    await this.ask({ parent, text, attachments: files.map((file) => file.attachment) });
  }

  /** An edited message is another version beside the first. @param {Message} message @param {string} text */
  async edited(message, text) {
    await this.ask({ parent: message.parent, text, attachments: message.attachments ?? [] });
  }

  /** @param {Pick<Message, "parent" | "text" | "attachments">} fields */
  async ask(fields) {
    const { conversation } = this;
    const message = addMessage(conversation, { role: "user", ...fields });
    await this.answer(conversation, message);
  }

  /** @param {Message} message an answer */
  async retry(message) {
    await this.answer(this.conversation, this.conversation.messages[message.parent]);
  }

  /** The model goes on when every call has its result. @param {Message} message @param {string} callId @param {string} text */
  async giveResult(message, callId, text) {
    const { conversation } = this;
    const last = /** @type {Message} */ (shownPath(conversation).at(-1));
    const result = addMessage(conversation, { role: "tool", parent: last.id, text, callId });
    const given = pathTo(conversation, result.id)
      .filter((each) => each.role === "tool")
      .map((each) => each.callId);
    if (message.calls?.every((call) => given.includes(call.id))) return this.answer(conversation, result);
    await this.save();
    this.view.changed();
  }

  /** Shows another version of a message. @param {Message} message @param {number} step */
  turn(message, step) {
    const versions = siblings(this.conversation, message);
    const other = versions[versions.findIndex((each) => each.id === message.id) + step];
    if (!other) return;
    choose(this.conversation, other);
    this.view.changed();
    void this.save();
    announce(`Version ${versions.indexOf(other) + 1} of ${versions.length}.`);
  }

  /** @param {Conversation} conversation @param {Message} question */
  async answer(conversation, question) {
    if (this.running.has(conversation.id)) return;
    const path = pathTo(conversation, question.id);
    const model = this.view.model();
    conversation.model = model;
    const message = addMessage(conversation, { role: "assistant", parent: question.id, text: "", model });
    const controller = new AbortController();
    this.running.set(conversation.id, { conversation, controller });
    const isShown = () => this.conversation.id === conversation.id;
    if (isShown()) {
      this.view.changed();
      this.view.running(true);
    }
    await this.save(conversation);
    void this.list();
    const saving = setInterval(() => void this.save(conversation), SAVE_EVERY);
    await streamAnswer(message, path, conversation.settings, {
      signal: controller.signal,
      changed: () => isShown() && this.view.grew(),
    });
    clearInterval(saving);
    this.running.delete(conversation.id);
    if (isShown()) this.view.running(false);
    conversation.updated = Date.now();
    await this.save(conversation);
    if (isShown()) this.view.changed();
    announceAnswer(message);
    void this.list();
  }

  /** Leaves the request, and the server frees its row. */
  stop() {
    this.running.get(this.conversation.id)?.controller.abort();
  }

  /** @param {string} title */
  async rename(title) {
    Object.assign(this.conversation, { title, renamed: true });
    await this.save();
    await this.list();
  }

  async remove() {
    this.stop();
    this.deleted.add(this.conversation.id);
    await deleteConversation(this.conversation);
    this.fresh();
  }
}

/** Answers that were being written when the page was closed are over. @param {Conversation} conversation */
function settled(conversation) {
  for (const message of Object.values(conversation.messages)) {
    if (message.role !== "assistant" || message.seconds !== undefined) continue;
    message.finish ??= "interrupted";
    message.seconds = 0;
  }
  return conversation;
}
