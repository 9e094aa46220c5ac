// Vercel's AI SDK: a task of one tool with a scripted model, and an object of a model that obeys
// grammars, by each of its providers that speak to such a server.
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateObject, generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

globalThis.AI_SDK_LOG_WARNINGS = false;
const [url, provider, prompt, found, obeying] = process.argv.slice(2);
const providers = {
  anthropic: (settings) => createAnthropic(settings)("tgi"),
  chat: (settings) => createOpenAI(settings).chat("tgi"),
  compatible: (settings) =>
    createOpenAICompatible({ ...settings, name: "tgi", supportsStructuredOutputs: true })("tgi"),
  responses: (settings) => createOpenAI(settings)("tgi"), // what the provider does by itself
  "responses, unstored": (settings) => createOpenAI(settings)("tgi"),
  "responses, summary": (settings) => createOpenAI(settings)("tgi"),
};
const modelAt = (at) => providers[provider]({ baseURL: `${at}/v1`, apiKey: "-" });
const model = modelAt(url);
const openai = {
  "responses, unstored": { store: false },
  "responses, summary": { reasoningSummary: "auto", forceReasoning: true },
}[provider];
const providerOptions = openai ? { openai } : {};

const commands = [];
const shell = tool({
  description: "Run a command",
  inputSchema: z.object({ command: z.string() }),
  execute: async ({ command }) => {
    commands.push(command);
    return found;
  },
});
const asked = {
  model,
  prompt,
  providerOptions,
  tools: { shell },
  stopWhen: stepCountIs(4),
  maxRetries: 0,
};

const whole = await generateText(asked);
const stream = streamText(asked);
const kinds = [];
for await (const part of stream.fullStream) {
  if (part.type === "error") throw part.error;
  if (kinds.at(-1) !== part.type) kinds.push(part.type);
}
const schema = z.object({ side: z.enum(["left", "right"]) });
const { object } = await generateObject({
  model: modelAt(obeying),
  prompt: "Where?",
  schema,
  providerOptions,
  maxRetries: 0,
});
console.log(
  JSON.stringify({
    text: whole.text,
    thoughts: whole.steps.map((step) => step.reasoningText ?? null),
    reasons: whole.steps.map((step) => step.finishReason),
    input: whole.steps.map((step) => step.usage.inputTokens),
    streamed: await stream.text,
    kinds,
    commands,
    object,
  }),
);
