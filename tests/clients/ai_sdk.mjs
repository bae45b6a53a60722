// Drives one provider of the AI SDK: node ai_sdk.mjs PROVIDER MODE URL. Prints what came out as one line of JSON.
// The packages are found from the working folder, as Node finds those of a project.
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

const require = createRequire(`${process.cwd()}/project.js`);
const load = async (name) => import(pathToFileURL(require.resolve(name)));
const [provider, mode, url] = process.argv.slice(2);
globalThis.AI_SDK_LOG_WARNINGS = false;

const { generateObject, generateText, stepCountIs, streamText, tool } = await load("ai");
const { z } = await load("zod");
const settings = { baseURL: `${url}/v1`, apiKey: "none" };
const models = {
  chat: async () => (await load("@ai-sdk/openai")).createOpenAI(settings).chat("org/player"),
  responses: async () => (await load("@ai-sdk/openai")).createOpenAI(settings).responses("org/player"),
  anthropic: async () => (await load("@ai-sdk/anthropic")).createAnthropic(settings)("org/player"),
  compatible: async () =>
    (await load("@ai-sdk/openai-compatible")).createOpenAICompatible({
      name: "mill",
      includeUsage: true,
      ...settings,
    })("org/player"),
};
const model = await models[provider]();

const runs = [];
const weather = tool({
  description: "The weather of a city.",
  inputSchema: z.object({ city: z.string() }),
  execute: async ({ city }) => {
    runs.push(city);
    return { celsius: 7 };
  },
});
const common = { model, maxRetries: 0, maxOutputTokens: 256 };
const question = { ...common, tools: { weather }, stopWhen: stepCountIs(4), prompt: "What is the weather in Oslo?" };

async function whole() {
  const result = await generateText(question);
  return { text: result.text, steps: result.steps.length, usage: result.totalUsage.outputTokens };
}

async function streamed() {
  const errors = [];
  const result = streamText({ ...question, onError: ({ error }) => errors.push(String(error)) });
  let text = "";
  for await (const part of result.textStream) text += part;
  if (errors.length) throw new Error(errors.join("; "));
  return { text, steps: (await result.steps).length, usage: (await result.totalUsage).outputTokens };
}

async function structured() {
  const schema = z.object({ city: z.string() });
  return { object: (await generateObject({ ...common, schema, prompt: "Name a city." })).object };
}

const answer = await { whole, streamed, structured }[mode]();
console.log(JSON.stringify({ ...answer, runs }));
