// OpenAI's own package: helpers that run tools, parse answers and go on from responses.
import OpenAI, { NotFoundError } from "openai";
import { zodResponseFormat, zodTextFormat } from "openai/helpers/zod";
import { z } from "zod";

const [url, question, found, obeying] = process.argv.slice(2);
const clientOf = (at) => new OpenAI({ baseURL: `${at}/v1`, apiKey: "-", maxRetries: 0 });
const client = clientOf(url);
const model = "tgi";

const commands = [];
const shell = {
  type: "function",
  function: {
    name: "shell",
    parse: JSON.parse,
    parameters: { type: "object", properties: { command: { type: "string" } }, required: ["command"] },
    function: async ({ command }) => {
      commands.push(command);
      return found;
    },
  },
};
const messages = [{ role: "user", content: question }];
const run = client.chat.completions.runTools({ model, messages, tools: [shell], stream: true });
const ran = await run.finalContent();

const Side = z.object({ side: z.enum(["left", "right"]) });
const asked = { model, messages: [{ role: "user", content: "Where?" }] };
const chat = await clientOf(obeying).chat.completions.parse({
  ...asked,
  response_format: zodResponseFormat(Side, "side"),
});
const response = await clientOf(obeying).responses.parse({
  model,
  input: "Where?",
  text: { format: zodTextFormat(Side, "side") },
});

const first = await client.responses.stream({ model, input: "Hello" }).finalResponse();
const second = await client.responses.create({
  model,
  input: question,
  previous_response_id: first.id,
  tools: [{ type: "function", name: "shell", parameters: shell.function.parameters, strict: false }],
});
const listed = [];
for await (const item of client.responses.inputItems.list(second.id, { order: "asc", limit: 2 })) {
  listed.push(item.type);
}
await client.responses.delete(second.id);
const gone = await client.responses.retrieve(second.id).catch((error) => error instanceof NotFoundError);

console.log(
  JSON.stringify({
    ran,
    commands,
    chat: chat.choices[0].message.parsed,
    response: response.output_parsed,
    output: second.output.map((item) => item.type),
    listed,
    gone,
  }),
);
