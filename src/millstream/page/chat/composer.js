/** The field at the bottom: text, files, send and stop. */

import { element, find, icon, iconButton } from "../common/dom.js";
import { attachmentView } from "./attachment-view.js";
import { acceptedTypes, misfit, takeFiles } from "./files.js";
import { grow, sendsOnEnter } from "./text-field.js";

/** @typedef {import("./files.js").PendingFile} PendingFile */

export class Composer {
  /**
   * @param {object} actions
   * @param {(text: string, files: PendingFile[]) => void} actions.send
   * @param {() => void} actions.stop
   * @param {() => void} actions.editLast
   * @param {(capability: string) => boolean} actions.can
   * @param {(text: string) => void} actions.notice an empty text clears it
   * @param {HTMLElement} microphone
   */
  constructor(actions, microphone) {
    this.actions = actions;
    this.form = /** @type {HTMLFormElement} */ (find("#composer"));
    this.field = /** @type {HTMLTextAreaElement} */ (find("#message"));
    this.fileInput = /** @type {HTMLInputElement} */ (find("#file"));
    this.pendingArea = /** @type {HTMLElement} */ (find("#pending"));
    /** @type {PendingFile[]} */
    this.pending = [];
    this.running = false;
    this.attach = iconButton("attach", "Add files", () => this.fileInput.click(), { hidden: true });
    this.sendButton = element(
      "button",
      { type: "submit", class: "icon-button send", "aria-label": "Send", title: "Send" },
      icon("arrow"),
    );
    this.stopButton = iconButton("stop", "Stop (Esc)", () => actions.stop(), {
      class: "icon-button send",
      hidden: true,
    });
    find("#composer-buttons").append(this.attach, microphone, this.sendButton, this.stopButton);
    this.fit = grow(this.field);
    this.listen();
  }

  listen() {
    const submit = () => this.submit();
    this.form.addEventListener("submit", (event) => {
      event.preventDefault();
      submit();
    });
    sendsOnEnter(this.field, submit);
    this.field.addEventListener("keydown", (event) => {
      if (event.key === "ArrowUp" && !this.field.value && !this.running) this.actions.editLast();
    });
    this.field.addEventListener("input", () => this.actions.notice(""));
    this.field.addEventListener("paste", (event) => {
      const files = [...(event.clipboardData?.files ?? [])];
      if (!files.length) return;
      event.preventDefault();
      this.add(files);
    });
    this.fileInput.addEventListener("change", () => {
      this.add([...(this.fileInput.files ?? [])]);
      this.fileInput.value = "";
    });
    this.listenToDrops();
  }

  /** A file may be dropped anywhere on the page. */
  listenToDrops() {
    const hasFiles = (/** @type {DragEvent} */ event) => event.dataTransfer?.types.includes("Files") ?? false;
    const mark = (/** @type {boolean} */ on) => this.form.classList.toggle("dropping", on);
    addEventListener("dragover", (event) => {
      if (!hasFiles(event)) return;
      event.preventDefault();
      mark(true);
    });
    addEventListener("dragleave", (event) => !event.relatedTarget && mark(false));
    addEventListener("drop", (event) => {
      if (!hasFiles(event)) return;
      event.preventDefault();
      mark(false);
      this.add([...(event.dataTransfer?.files ?? [])]);
    });
  }

  /** @param {File[]} files */
  add(files) {
    const { accepted, problems } = takeFiles(files, this.actions.can);
    this.pending.push(...accepted);
    this.actions.notice(problems.join(" "));
    this.drawPending();
    this.field.focus();
  }

  drawPending() {
    this.pendingArea.replaceChildren(
      ...this.pending.map((file) => {
        const remove = () => {
          this.pending = this.pending.filter((each) => each !== file);
          this.drawPending();
          this.field.focus();
        };
        const button = iconButton("close", `Remove ${file.attachment.name}`, remove);
        return element("div", { class: "pending-file" }, attachmentView(file.attachment, file.blob), button);
      }),
    );
  }

  submit() {
    const text = this.field.value;
    if (this.running || (!text.trim() && !this.pending.length)) return;
    const problem = this.pending.map((file) => misfit(file.attachment, this.actions.can)).find(Boolean);
    if (problem) return this.actions.notice(problem);
    const files = this.pending;
    this.pending = [];
    this.field.value = "";
    this.fit();
    this.drawPending();
    this.actions.notice("");
    this.actions.send(text, files);
  }

  /** @param {boolean} running */
  setRunning(running) {
    const focused = document.activeElement;
    this.running = running;
    this.sendButton.hidden = running;
    this.stopButton.hidden = !running;
    if (focused === this.stopButton || focused === this.sendButton) this.field.focus();
  }

  /** Puts a text where the caret is. @param {string} text */
  insert(text) {
    const { field } = this;
    const before = field.value.slice(0, field.selectionStart);
    const after = field.value.slice(field.selectionEnd);
    const start = before && !/\s$/.test(before) ? " " : "";
    const end = after && !/^\s/.test(after) ? " " : "";
    field.setRangeText(start + text + end, before.length, field.selectionEnd, "end");
    this.fit();
    field.focus();
  }

  /** Offers what the chosen model takes. */
  refresh() {
    const accepted = acceptedTypes(this.actions.can);
    this.fileInput.accept = accepted;
    this.attach.hidden = !accepted;
  }
}
