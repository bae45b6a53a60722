// A streamed chat with the AI SDK in Node.
//
//   npm install ai @ai-sdk/openai-compatible
//   node chat.mjs

import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { streamText } from "ai";

const url = process.env.MILLSTREAM_URL ?? "http://127.0.0.1:8000";
const millstream = createOpenAICompatible({
  name: "millstream",
  baseURL: `${url}/v1`,
  apiKey: process.env.MILLSTREAM_API_KEY ?? "none",
});

const { data } = await (await fetch(`${url}/v1/models`)).json();
const { textStream } = streamText({
  model: millstream(data[0].id),
  prompt: "What is the capital of France?",
  temperature: 0,
});
for await (const text of textStream) process.stdout.write(text);
console.log();
