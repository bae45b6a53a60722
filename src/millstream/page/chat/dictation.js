/** A message by voice: recorded by the browser, turned into text by the server. */

import { apiJson } from "../common/api.js";
import { announce } from "../common/announce.js";
import { icon, iconButton } from "../common/dom.js";
import { wavFile } from "./wav.js";

/** Milliseconds of the longest recording. */
const LONGEST = 5 * 60 * 1000;
/** Samples per second that transcription models take. */
const RATE = 16000;
/** Milliseconds of a part of the recording. */
const PART = 250;
const RECORD = "Speak a message";
const FINISH = "Finish recording";
const WAIT = "The recording is being transcribed";

/** Browsers record on HTTPS and on this machine only. */
const SUPPORTED = isSecureContext && "mediaDevices" in navigator && "MediaRecorder" in window;

export class Dictation {
  /**
   * @param {object} actions
   * @param {(text: string) => void} actions.insert
   * @param {(text: string) => void} actions.notice an empty text clears it
   * @param {() => string} actions.model the model that transcribes; empty if there is none
   * @param {(error: unknown) => string} actions.inWords
   */
  constructor(actions) {
    this.actions = actions;
    this.button = iconButton("microphone", RECORD, () => void this.toggle(), { hidden: true });
    /** @type {MediaRecorder | null} */
    this.recorder = null;
    this.busy = false;
    this.discarded = false;
  }

  /** Offers it where a model can transcribe. */
  refresh() {
    this.button.hidden = !SUPPORTED || !this.actions.model();
  }

  /** Throws a recording away. Returns false if there is none. */
  discard() {
    if (!this.recorder) return false;
    this.discarded = true;
    this.recorder.stop();
    announce("The recording was discarded.");
    return true;
  }

  async toggle() {
    if (this.recorder) return this.recorder.stop();
    if (this.busy) return;
    this.busy = true;
    this.actions.notice("");
    try {
      const recording = await this.record();
      if (!recording) return;
      this.show("microphone", WAIT, true);
      this.actions.insert(await this.transcribe(recording));
    } catch (error) {
      this.actions.notice(this.problem(error));
    } finally {
      this.busy = false;
      this.show("microphone", RECORD, false);
    }
  }

  /** @returns {Promise<Blob | null>} null if it was thrown away */
  async record() {
    const stream = await navigator.mediaDevices.getUserMedia({ audio: true });
    /** @type {Blob[]} */
    const parts = [];
    const recorder = new MediaRecorder(stream);
    this.recorder = recorder;
    this.discarded = false;
    recorder.addEventListener("dataavailable", (event) => parts.push(event.data));
    const stopped = new Promise((resolve) => recorder.addEventListener("stop", resolve, { once: true }));
    recorder.start(PART);
    const limit = setTimeout(() => recorder.state === "recording" && recorder.stop(), LONGEST);
    this.show("stop", FINISH, false);
    announce("Recording. Press the button again to finish, or Escape to discard.");
    await stopped;
    clearTimeout(limit);
    this.recorder = null;
    for (const track of stream.getTracks()) track.stop();
    return this.discarded ? null : new Blob(parts, { type: recorder.mimeType });
  }

  /** What browsers record differs, so it is sent as WAV, which every server reads. @param {Blob} recording */
  async transcribe(recording) {
    const decoded = await new OfflineAudioContext(1, 1, RATE).decodeAudioData(await recording.arrayBuffer());
    const form = new FormData();
    form.append("file", wavFile(decoded), "speech.wav");
    form.append("model", this.actions.model());
    form.append("response_format", "json");
    const { text } = await apiJson("/v1/audio/transcriptions", { method: "POST", body: form });
    if (!text.trim()) throw new Error("No words were heard in the recording.");
    announce(`Transcribed: ${text.trim()}`);
    return text.trim();
  }

  /** @param {"microphone" | "stop"} name @param {string} label @param {boolean} waiting */
  show(name, label, waiting) {
    this.button.replaceChildren(icon(name));
    this.button.ariaLabel = this.button.title = label;
    this.button.classList.toggle("recording", name === "stop");
    // Not `disabled`: it would take the focus away.
    this.button.setAttribute("aria-disabled", String(waiting));
  }

  /** @param {unknown} error */
  problem(error) {
    const name = error instanceof DOMException ? error.name : "";
    if (name === "NotAllowedError")
      return "The microphone is blocked. Allow it in the browser's settings of this site.";
    if (name === "NotFoundError") return "No microphone was found.";
    if (name === "EncodingError") return "The recording is empty. Speak for a moment longer.";
    return this.actions.inWords(error);
  }
}
