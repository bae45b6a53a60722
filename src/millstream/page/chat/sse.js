/** Server-sent events over fetch: `EventSource` can neither POST nor send a key. */

/**
 * Yields the data of each event.
 * @param {ReadableStream<Uint8Array>} body
 * @returns {AsyncGenerator<string>}
 */
export async function* events(body) {
  const reader = body.getReader();
  const decoder = new TextDecoder();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      rest += done ? decoder.decode() : decoder.decode(value, { stream: true });
      const blocks = rest.split(/\r?\n\r?\n/);
      rest = blocks.pop() ?? "";
      for (const block of blocks) {
        const data = dataOf(block);
        if (data !== "") yield data;
      }
      if (done) return;
    }
  } finally {
    await reader.cancel().catch(() => {}); // it is closed already if the request was aborted
  }
}

/** Lines of one event that are data; a ping is a comment and has none. @param {string} block */
function dataOf(block) {
  return block
    .split(/\r?\n/)
    .filter((line) => line.startsWith("data:"))
    .map((line) => line.slice(5).replace(/^ /, ""))
    .join("\n");
}
