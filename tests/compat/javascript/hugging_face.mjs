// @huggingface/inference, given the address of a server and no model.
import { InferenceClient } from "@huggingface/inference";

const [url, prompt] = process.argv.slice(2);
const client = new InferenceClient("-", { endpointUrl: url });
const parameters = { max_new_tokens: 8, temperature: 0 };
const asked = { messages: [{ role: "user", content: prompt }], max_tokens: 8, temperature: 0 };

const text = await client.textGeneration({ inputs: prompt, parameters });
const chat = await client.chatCompletion(asked);
let streamed = "";
for await (const chunk of client.chatCompletionStream(asked)) {
  streamed += chunk.choices[0]?.delta?.content ?? "";
}
console.log(JSON.stringify({ text: text.generated_text, chat: chat.choices[0].message.content, streamed }));
