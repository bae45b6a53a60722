/** An image or an audio file of a message, shown. The file comes from the store. */

import { element } from "../common/dom.js";
import { readFile } from "./store.js";

/** @param {import("./types.js").Attachment} file @param {Blob} [blob] if it is at hand already */
export function attachmentView(file, blob) {
  const frame = element("figure", { class: `file ${file.kind}` });
  void show(frame, file, blob);
  return frame;
}

/** @param {HTMLElement} frame @param {import("./types.js").Attachment} file @param {Blob} [given] */
async function show(frame, file, given) {
  const blob = given ?? (await readFile(file.id));
  if (!blob) {
    frame.append(element("figcaption", { class: "muted" }, `${file.name} (no longer in this browser)`));
    return;
  }
  const url = URL.createObjectURL(blob);
  if (file.kind === "image") {
    const image = element("img", { alt: file.name, src: url });
    image.addEventListener("load", () => URL.revokeObjectURL(url));
    image.addEventListener("error", () => image.replaceWith(element("figcaption", {}, file.name)));
    frame.append(image);
  } else {
    frame.append(element("audio", { controls: true, src: url, "aria-label": file.name }));
    frame.append(element("figcaption", { class: "muted" }, file.name));
  }
}
