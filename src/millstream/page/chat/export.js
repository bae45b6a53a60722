/** A conversation as a file: Markdown of the branch that is shown, or JSON of everything. */

import { openDialog } from "../common/dialogs.js";
import { element } from "../common/dom.js";
import { shownPath } from "./tree.js";

/** @typedef {import("./types.js").Conversation} Conversation */

/** @param {Conversation} conversation */
export async function exportConversation(conversation) {
  const text = "Markdown holds the messages that are shown. JSON holds every version and the settings. Images and audio are named, not included.";
  const kind = await openDialog("Export", [element("p", {}, text)], [
    { value: "md", label: "Markdown" },
    { value: "json", label: "JSON" },
  ]);
  if (kind === "md") download(conversation, "md", "text/markdown", toMarkdown(conversation));
  if (kind === "json") download(conversation, "json", "application/json", JSON.stringify(conversation, null, 2));
}

/** @param {Conversation} conversation */
export function toMarkdown(conversation) {
  const parts = [`# ${conversation.title}`];
  if (conversation.settings.system.trim()) parts.push(`> ${conversation.settings.system.trim().replaceAll("\n", "\n> ")}`);
  for (const message of shownPath(conversation)) {
    const who = message.role === "user" ? "You" : message.role === "tool" ? "Result" : message.model || "Model";
    parts.push(`## ${who}`);
    for (const file of message.attachments ?? []) parts.push(`*${file.kind}: ${file.name}*`);
    if (message.reasoning) parts.push(`<details><summary>Reasoning</summary>\n\n${message.reasoning.trim()}\n\n</details>`);
    if (message.text) parts.push(message.text.trim());
    for (const call of message.calls ?? []) parts.push(`Calls \`${call.name}\`:\n\n\`\`\`json\n${call.arguments}\n\`\`\``);
    if (message.error) parts.push(`*Failed: ${message.error}*`);
  }
  return `${parts.join("\n\n")}\n`;
}

/** @param {Conversation} conversation @param {string} ending @param {string} type @param {string} text */
function download(conversation, ending, type, text) {
  const name = conversation.title.replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-|-$/g, "").slice(0, 60) || "chat";
  const url = URL.createObjectURL(new Blob([text], { type }));
  element("a", { href: url, download: `${name}.${ending}` }).click();
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
}
