/** Starts the chat page: joins the chat with what shows it. */

import { ApiError } from "../common/api.js";
import { askForText, confirmDialog } from "../common/dialogs.js";
import { element, find, iconButton } from "../common/dom.js";
import { mountNav } from "../common/nav.js";
import { Chat } from "./chat.js";
import { Composer } from "./composer.js";
import { Dictation } from "./dictation.js";
import { exportConversation } from "./export.js";
import { Models } from "./models.js";
import { Reader, spokenText } from "./read-aloud.js";
import { editSettings } from "./settings.js";
import { Sidebar } from "./sidebar.js";
import { Thread } from "./thread.js";
import { inWords } from "./words.js";

/** @param {string} text @param {...import("../common/dom.js").Child} more */
function notice(text, ...more) {
  const line = find("#notice");
  line.hidden = !text;
  line.replaceChildren(text, ...more.filter((each) => each instanceof Node));
}

/** What the last poll of the models said, if it failed: one that works clears the notice. */
let pollProblem = "";

const models = new Models({
  chosen: () => {
    chat.conversation.model = models.select.value;
    composer.refresh();
    if (Object.keys(chat.conversation.messages).length) void chat.save();
  },
  changed: () => {
    composer.refresh();
    dictation.refresh();
    thread.offerReading(Boolean(models.first("speech")));
    if (pollProblem) notice("");
    pollProblem = "";
  },
  failed: (error) => {
    const words = inWords(error);
    if (words === pollProblem && !find("#notice").hidden) return; // its button may have the focus
    pollProblem = words;
    const again = error instanceof ApiError && error.status === 401 ? "Enter the key" : "Try again";
    const button = element("button", { type: "button", class: "button", onclick: () => models.pollNow(true) }, again);
    notice(`${words} `, button);
  },
});

const chat = new Chat({
  opened: (conversation) => {
    const filled = Object.keys(conversation.messages).length > 0;
    const hash = filled ? `#c=${conversation.id}` : "";
    if (location.hash !== hash) history.replaceState(null, "", hash || location.pathname);
    if (conversation.model) models.choose(conversation.model);
    reader.stop();
    thread.show(conversation);
    if (matchMedia("(hover: hover)").matches) composer.field.focus(); // elsewhere a keyboard would cover the page
    drawBar();
  },
  grew: () => thread.drawSoon(),
  changed: () => {
    thread.redraw();
    drawBar();
  },
  listed: (all, current) => sidebar.show(all, current),
  running: (running) => composer.setRunning(running),
  problem: notice,
  model: () => models.select.value,
});

const reader = new Reader({
  changed: (id) => thread.showReading(id),
  failed: (error) => notice(inWords(error)),
});

const thread = new Thread({
  edit: () => {},
  edited: (message, text) => void chat.edited(message, text),
  retry: (message) => void chat.retry(message),
  turn: (message, step) => chat.turn(message, step),
  giveResult: (message, callId, result) => void chat.giveResult(message, callId, result),
  readAloud: (message, answer) => {
    notice("");
    reader.toggle(message.id, spokenText(answer), models.first("speech"));
  },
});

const sidebar = new Sidebar({ fresh: () => chat.fresh(), open: (id) => void chat.open(id) });

const dictation = new Dictation({
  insert: (text) => composer.insert(text),
  notice,
  model: () => models.first("transcription"),
  inWords,
});

const composer = new Composer(
  {
    send: (text, files) => {
      thread.follows = true;
      void chat.send(text, files);
    },
    stop: () => chat.stop(),
    editLast: () => thread.editLast(),
    can: (capability) => models.can(capability),
    notice,
  },
  dictation.button,
);

const tools = {
  rename: iconButton("edit", "Rename this chat", async () => {
    const title = await askForText("Rename this chat", "Title", chat.conversation.title);
    if (title) await chat.rename(title);
    drawBar();
  }),
  export: iconButton("download", "Export this chat", () => void exportConversation(chat.conversation)),
  remove: iconButton("trash", "Delete this chat", async () => {
    const text = `“${chat.conversation.title}” and all its versions are deleted from this browser.`;
    if (await confirmDialog("Delete this chat?", text, "Delete")) await chat.remove();
  }),
  settings: iconButton("settings", "Settings of this chat", async () => {
    const made = await editSettings(chat.conversation.settings, { thinks: models.can("thinking") });
    if (!made) return;
    chat.conversation.settings = made;
    if (Object.keys(chat.conversation.messages).length) await chat.save();
  }),
};

function drawBar() {
  const { conversation } = chat;
  const filled = Object.keys(conversation.messages).length > 0;
  find("#title").textContent = filled ? conversation.title : "New chat";
  document.title = `${filled ? conversation.title : "Chat"} · Millstream`;
  for (const button of [tools.rename, tools.export, tools.remove]) button.hidden = !filled;
  if (filled && location.hash !== `#c=${conversation.id}`) history.replaceState(null, "", `#c=${conversation.id}`);
}

function openFromAddress() {
  const id = /^#c=(\w+)$/.exec(location.hash)?.[1];
  if (id) void chat.open(id);
  else chat.fresh();
}

/** A link to #message would take the conversation out of the address. @param {Event} event */
function skipToMessage(event) {
  event.preventDefault();
  composer.field.focus();
}

mountNav();
find("header.nav").prepend(sidebar.toggle);
find("#chat-tools").append(tools.settings, tools.rename, tools.export, tools.remove);
find(".skip-link").addEventListener("click", skipToMessage);
addEventListener("hashchange", openFromAddress);
addEventListener("keydown", (event) => {
  if (event.key !== "Escape" || document.querySelector("dialog[open]")) return;
  if (dictation.discard()) return;
  reader.stop();
  chat.stop();
});
openFromAddress();
models.pollNow();
