/** Sound as a WAV file: one channel of 16-bit samples. */

const HEADER = 44;

/** @param {AudioBuffer} sound its channels are averaged @returns {Blob} */
export function wavFile(sound) {
  const bytes = new ArrayBuffer(HEADER + 2 * sound.length);
  const view = new DataView(bytes);
  const text = (/** @type {number} */ at, /** @type {string} */ letters) =>
    [...letters].forEach((letter, index) => view.setUint8(at + index, letter.charCodeAt(0)));
  text(0, "RIFF");
  view.setUint32(4, bytes.byteLength - 8, true);
  text(8, "WAVEfmt ");
  view.setUint32(16, 16, true);
  view.setUint16(20, 1, true); // PCM
  view.setUint16(22, 1, true); // channels
  view.setUint32(24, sound.sampleRate, true);
  view.setUint32(28, 2 * sound.sampleRate, true);
  view.setUint16(32, 2, true);
  view.setUint16(34, 16, true);
  text(36, "data");
  view.setUint32(40, 2 * sound.length, true);
  const channels = Array.from({ length: sound.numberOfChannels }, (_, index) => sound.getChannelData(index));
  for (let index = 0; index < sound.length; index += 1) {
    const mean = channels.reduce((sum, channel) => sum + channel[index], 0) / channels.length;
    view.setInt16(HEADER + 2 * index, Math.round(Math.max(-1, Math.min(1, mean)) * 32767), true);
  }
  return new Blob([bytes], { type: "audio/wav" });
}
