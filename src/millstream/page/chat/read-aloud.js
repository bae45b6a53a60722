/** Reads answers aloud: the server speaks them, and the page plays the samples as they come. */

import { api } from "../common/api.js";
import { announce } from "../common/announce.js";

/** Samples per second of the format `pcm`. */
const RATE = 24000;
/** Seconds of sound that may wait to be heard: the rest stays on the server. */
const AHEAD = 20;
const LOOK_EVERY = 100;
/** Characters that one request may have. */
const LONGEST = 65536;

export class Reader {
  /**
   * @param {object} events
   * @param {(id: string) => void} events.changed the message that is read now; empty if none
   * @param {(error: unknown) => void} events.failed
   */
  constructor(events) {
    this.events = events;
    this.reading = "";
    /** @type {AbortController | null} */
    this.current = null;
  }

  /** Reads a message, or stops if it is being read. @param {string} id @param {string} text @param {string} model */
  toggle(id, text, model) {
    if (this.reading === id) return this.stop();
    this.stop();
    void this.read(id, text, model);
  }

  stop() {
    this.current?.abort();
    this.set("", null);
  }

  /** @param {string} id @param {AbortController | null} current */
  set(id, current) {
    this.current = current;
    if (this.reading === id) return;
    this.reading = id;
    this.events.changed(id);
  }

  /** @param {string} id @param {string} text @param {string} model */
  async read(id, text, model) {
    const current = new AbortController();
    const sound = new AudioContext({ sampleRate: RATE }); // in the click itself: browsers allow it only there
    current.signal.addEventListener("abort", () => void sound.close());
    this.set(id, current);
    try {
      const json = { model, input: text.slice(0, LONGEST), response_format: "pcm" };
      const response = await api("/v1/audio/speech", { json, signal: current.signal });
      await play(response, sound, current.signal);
    } catch (error) {
      if (current.signal.aborted) return;
      announce("Reading aloud failed.");
      this.events.failed(error);
    } finally {
      if (!current.signal.aborted) {
        void sound.close();
        this.set("", null);
      }
    }
  }
}

/** Plays a response while it arrives. Returns when it was heard. @param {Response} response @param {AudioContext} sound @param {AbortSignal} signal */
async function play(response, sound, signal) {
  const reader = /** @type {ReadableStream<Uint8Array>} */ (response.body).getReader();
  let end = 0;
  let rest = new Uint8Array(0);
  for (;;) {
    const { done, value } = await reader.read();
    if (done) break;
    const bytes = joined(rest, value);
    rest = bytes.slice(bytes.length & ~1);
    end = Math.max(end, sound.currentTime + 0.05);
    end += schedule(sound, bytes.subarray(0, bytes.length & ~1), end);
    await until(() => end - sound.currentTime < AHEAD, signal);
  }
  await until(() => sound.currentTime >= end, signal);
}

/** Returns the seconds that it takes. @param {AudioContext} sound @param {Uint8Array} bytes @param {number} at */
function schedule(sound, bytes, at) {
  const count = bytes.length / 2;
  if (!count) return 0;
  const view = new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength);
  const buffer = sound.createBuffer(1, count, RATE);
  const samples = buffer.getChannelData(0);
  for (let index = 0; index < count; index += 1) samples[index] = view.getInt16(2 * index, true) / 32768;
  const source = sound.createBufferSource();
  source.buffer = buffer;
  source.connect(sound.destination);
  source.start(at);
  return buffer.duration;
}

/** @param {Uint8Array} first @param {Uint8Array} second */
function joined(first, second) {
  const both = new Uint8Array(first.length + second.length);
  both.set(first);
  both.set(second, first.length);
  return both;
}

/** @param {() => boolean} condition @param {AbortSignal} signal */
async function until(condition, signal) {
  while (!condition()) {
    signal.throwIfAborted();
    await new Promise((resolve) => setTimeout(resolve, LOOK_EVERY));
  }
  signal.throwIfAborted();
}

/** What of an answer can be read aloud: its text without code and formulas. @param {HTMLElement} answer */
export function spokenText(answer) {
  const copy = /** @type {HTMLElement} */ (answer.cloneNode(true));
  for (const code of copy.querySelectorAll("div.code")) code.replaceWith("(Code.)\n");
  for (const other of copy.querySelectorAll("math, button, svg")) other.remove();
  for (const block of copy.querySelectorAll("p, li, h1, h2, h3, h4, h5, h6, tr, blockquote")) block.append("\n");
  for (const cell of copy.querySelectorAll("td, th")) cell.append(", ");
  return (copy.textContent ?? "").replace(/[ \t]+/g, " ").trim();
}
