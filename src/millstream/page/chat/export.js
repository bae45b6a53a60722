/** A conversation as a file: Markdown of the branch that is shown, or JSON of everything. */

import { openDialog } from "../common/dialogs.js";
import { element } from "../common/dom.js";
import { shownPath } from "./tree.js";

/** @typedef {import("./types.js").Conversation} Conversation */

/** @param {Conversation} conversation */
export async function exportConversation(conversation) {
  const text =
    "Markdown holds the messages that are shown. JSON holds every version and the settings. Images and audio are named, not included.";
  const kind = await openDialog(
    "Export",
    [element("p", {}, text)],
    [
      { value: "md", label: "Markdown" },
      { value: "json", label: "JSON" },
    ],
  );
  if (kind === "md") download(conversation, "md", "text/markdown", toMarkdown(conversation));
  if (kind === "json") download(conversation, "json", "application/json", JSON.stringify(conversation, null, 2));
}

/** @param {Conversation} conversation */
export function toMarkdown(conversation) {
  const system = conversation.settings.system.trim();
  const quoted = system ? [`> ${system.replaceAll("\n", "\n> ")}`] : [];
  const parts = [`# ${conversation.title}`, ...quoted, ...shownPath(conversation).flatMap(messageParts)];
  return `${parts.join("\n\n")}\n`;
}

/** @param {import("./types.js").Message} message @returns {string[]} */
function messageParts(message) {
  const { role, model, attachments = [], reasoning, text, calls = [], error } = message;
  const who = role === "user" ? "You" : role === "tool" ? "Result" : model || "Model";
  return [
    `## ${who}`,
    ...attachments.map((file) => `*${file.kind}: ${file.name}*`),
    reasoning ? `<details><summary>Reasoning</summary>\n\n${reasoning.trim()}\n\n</details>` : "",
    text.trim(),
    ...calls.map((call) => `Calls \`${call.name}\`:\n\n\`\`\`json\n${call.arguments}\n\`\`\``),
    error ? `*Failed: ${error}*` : "",
  ].filter(Boolean);
}

/** @param {Conversation} conversation @param {string} ending @param {string} type @param {string} text */
function download(conversation, ending, type, text) {
  const name =
    conversation.title
      .replace(/[^\p{L}\p{N}]+/gu, "-")
      .replace(/^-|-$/g, "")
      .slice(0, 60) || "chat";
  const url = URL.createObjectURL(new Blob([text], { type }));
  element("a", { href: url, download: `${name}.${ending}` }).click();
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
}
