/** Files that a person adds to a message: dropped, pasted or chosen. */

import { newId } from "./tree.js";

/** @typedef {import("./types.js").Attachment} Attachment */
/** @typedef {{attachment: Attachment, blob: Blob}} PendingFile */

const LARGEST = 20 * 2 ** 20;
const AUDIO = ["audio/wav", "audio/x-wav", "audio/wave", "audio/vnd.wave", "audio/mpeg", "audio/mp3"];
const CAPABILITY = { image: "vision", audio: "audio" };

/**
 * @param {File[]} files
 * @param {(capability: string) => boolean} can of the chosen model
 * @returns {{accepted: PendingFile[], problems: string[]}}
 */
export function takeFiles(files, can) {
  /** @type {PendingFile[]} */
  const accepted = [];
  /** @type {string[]} */
  const problems = [];
  for (const file of files) {
    const kind = kindOf(file);
    const problem = kind ? refusal(file, kind, can) : `${file.name} is neither an image nor audio (WAV or MP3).`;
    if (problem || !kind) problems.push(problem);
    else accepted.push({ attachment: { id: newId(), kind, name: file.name || kind, type: file.type }, blob: file });
  }
  return { accepted, problems };
}

/** What the file button offers. @param {(capability: string) => boolean} can */
export function acceptedTypes(can) {
  return [
    ...(can("vision") ? ["image/*"] : []),
    ...(can("audio") ? [".wav", ".mp3", "audio/wav", "audio/mpeg"] : []),
  ].join(",");
}

/** Why a model cannot take a file that waits to be sent. @param {Attachment} file @param {(capability: string) => boolean} can */
export function misfit(file, can) {
  return can(CAPABILITY[file.kind])
    ? ""
    : `This model does not take ${word(file.kind)}. Choose one that does, or remove ${file.name}.`;
}

/** @param {File} file @returns {import("./types.js").FileKind | null} */
function kindOf(file) {
  if (file.type.startsWith("image/")) return "image";
  return AUDIO.includes(file.type) ? "audio" : null;
}

/** @param {File} file @param {import("./types.js").FileKind} kind @param {(capability: string) => boolean} can */
function refusal(file, kind, can) {
  if (!can(CAPABILITY[kind])) return `This model does not take ${word(kind)}. Choose one that does.`;
  if (file.size > LARGEST) return `${file.name} is larger than 20 MB. Send a smaller version.`;
  return "";
}

/** @param {import("./types.js").FileKind} kind */
function word(kind) {
  return kind === "image" ? "images" : "audio";
}
