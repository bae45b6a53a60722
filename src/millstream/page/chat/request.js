/** From a branch of a conversation to the body of POST /v1/chat/completions. */

import { readFile } from "./store.js";

/** @typedef {import("./types.js").Message} Message */

/** The sampling parameters that a person can set. The server checks them as well. */
export const SAMPLING = [
  {
    name: "temperature",
    label: "Temperature",
    min: 0,
    max: 2,
    step: 0.1,
    hint: "0 is the most predictable, 2 the wildest.",
  },
  { name: "top_p", label: "Top p", min: 0, max: 1, step: 0.05, hint: "Keeps the likeliest tokens up to this share." },
  { name: "max_tokens", label: "Maximum length", min: 1, max: 2147483647, step: 1, hint: "In tokens." },
  {
    name: "seed",
    label: "Seed",
    min: -9007199254740991,
    max: 9007199254740991,
    step: 1,
    hint: "The same seed gives the same answer.",
  },
  { name: "top_k", label: "Top k", min: 0, max: 2147483647, step: 1, hint: "Keeps this many tokens; 0 for all." },
  {
    name: "min_p",
    label: "Min p",
    min: 0,
    max: 1,
    step: 0.01,
    hint: "Drops tokens below this share of the likeliest.",
  },
  {
    name: "presence_penalty",
    label: "Presence penalty",
    min: -2,
    max: 2,
    step: 0.1,
    hint: "Above 0: fewer repeated words.",
  },
  {
    name: "frequency_penalty",
    label: "Frequency penalty",
    min: -2,
    max: 2,
    step: 0.1,
    hint: "Above 0: fewer frequent words.",
  },
];
export const EFFORTS = ["none", "minimal", "low", "medium", "high"];

/** @returns {import("./types.js").Settings} */
export function defaultSettings() {
  return { system: "", sampling: {}, tools: "" };
}

/**
 * @param {string} model
 * @param {import("./types.js").Settings} settings
 * @param {Message[]} path up to the message that is to be answered
 */
export async function requestBody(model, settings, path) {
  const messages = settings.system.trim() ? [{ role: "system", content: settings.system }] : [];
  for (const message of path) messages.push(await wireMessage(message));
  /** @type {Record<string, unknown>} */
  const body = { model, messages, stream: true, stream_options: { include_usage: true } };
  for (const { name } of SAMPLING) {
    const value = settings.sampling[name];
    if (value !== undefined && value !== "") body[name] = Number(value);
  }
  if (settings.sampling.reasoning_effort) body.reasoning_effort = settings.sampling.reasoning_effort;
  if (settings.tools.trim()) body.tools = JSON.parse(settings.tools);
  return body;
}

/** @param {Message} message @returns {Promise<any>} */
async function wireMessage(message) {
  if (message.role === "tool") return { role: "tool", content: message.text, tool_call_id: message.callId };
  if (message.role === "assistant") return answer(message);
  const files = message.attachments ?? [];
  if (!files.length) return { role: "user", content: message.text };
  const parts = await Promise.all(files.map(filePart));
  return { role: "user", content: [...parts, ...(message.text ? [{ type: "text", text: message.text }] : [])] };
}

/** @param {Message} message */
function answer(message) {
  const calls = message.calls?.map(({ id, name, arguments: given }) => ({
    id,
    type: "function",
    function: { name, arguments: given },
  }));
  return { role: "assistant", content: message.text, ...(calls?.length ? { tool_calls: calls } : {}) };
}

/** @param {import("./types.js").Attachment} file */
async function filePart(file) {
  const blob = await readFile(file.id);
  if (!blob) throw new Error(`The file ${file.name} is no longer in this browser. Edit the message and add it again.`);
  const url = await dataUrl(blob);
  if (file.kind === "image") return { type: "image_url", image_url: { url } };
  const format = file.type.includes("wav") ? "wav" : "mp3";
  return { type: "input_audio", input_audio: { data: url.slice(url.indexOf(",") + 1), format } };
}

/** @param {Blob} blob @returns {Promise<string>} */
function dataUrl(blob) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(String(reader.result));
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(blob);
  });
}
