/** Streams one answer of a model into a message. */

import { api, ApiError } from "../common/api.js";
import { requestBody } from "./request.js";
import { events } from "./sse.js";
import { inWords } from "./words.js";

/** @typedef {import("./types.js").Message} Message */

/**
 * Fills `message` as the answer arrives, and calls `changed` after each part. Never throws: what went wrong is in the
 * message.
 * @param {Message} message an empty answer
 * @param {Message[]} path the messages before it
 * @param {import("./types.js").Settings} settings
 * @param {{signal: AbortSignal, changed: () => void}} options
 */
export async function streamAnswer(message, path, settings, { signal, changed }) {
  const start = performance.now();
  try {
    const body = await requestBody(message.model ?? "", settings, path);
    const response = await api("/v1/chat/completions", { json: body, signal, ask: true });
    if (!response.body) throw new ApiError("The server sent no answer.", response.status);
    for await (const data of events(response.body)) {
      if (data === "[DONE]") break;
      message.firstToken ??= (performance.now() - start) / 1000;
      take(message, JSON.parse(data));
      changed();
    }
    if (!message.finish) throw new ApiError("The connection broke before the answer was complete.", 0, "incomplete");
  } catch (error) {
    if (signal.aborted) {
      message.finish = "stopped";
    } else {
      message.finish = "failed";
      message.error = inWords(error);
    }
  }
  message.seconds = (performance.now() - start) / 1000;
  changed();
}

/** @param {Message} message @param {any} chunk */
function take(message, chunk) {
  if (chunk.error) throw new ApiError(chunk.error.message, 0, chunk.error.code ?? "");
  if (chunk.usage) message.usage = usageOf(chunk.usage);
  const choice = chunk.choices?.[0];
  if (!choice) return;
  const delta = choice.delta ?? {};
  message.text += delta.content ?? "";
  if (delta.reasoning_content) message.reasoning = (message.reasoning ?? "") + delta.reasoning_content;
  for (const part of delta.tool_calls ?? []) takeCall((message.calls ??= []), part);
  if (choice.finish_reason) message.finish = choice.finish_reason;
}

/** @param {any} usage @returns {import("./types.js").Usage} */
function usageOf(usage) {
  return {
    prompt: usage.prompt_tokens,
    completion: usage.completion_tokens,
    cached: usage.prompt_tokens_details?.cached_tokens ?? 0,
    reasoning: usage.completion_tokens_details?.reasoning_tokens ?? 0,
  };
}

/** Calls arrive in parts: the name first, then pieces of the arguments. @param {any[]} calls @param {any} part */
function takeCall(calls, part) {
  const call = (calls[part.index ?? calls.length] ??= { id: "", name: "", arguments: "" });
  call.id ||= part.id ?? "";
  call.name += part.function?.name ?? "";
  call.arguments += part.function?.arguments ?? "";
}
