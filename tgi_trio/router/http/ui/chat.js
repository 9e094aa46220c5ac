// The chat: what was said, what is asked for, and tools whose results a person types.

import { events } from "./server.js";
import { Answer } from "./answer.js";
import { EXAMPLE } from "./example_tools.js";
import { RIVALS, add, runner, sendOnEnter, wish } from "./generating.js";
import { attachments, content, show } from "./attachments.js";

const chat = document.getElementById("chat");
const log = chat.querySelector(".log");
const form = chat.querySelector("form");
const tools = document.getElementById("settings").elements.tools;
const takeAttachments = attachments(form, chat);
let history = [];
let answer = null; // the last one; its results are part of it until something follows

// What is asked for beside the messages; throws where the tools are no JSON.
function options() {
  const system = wish("system"), thinking = wish("thinking"), given = tools.value.trim();
  const body = {
    model: "tgi", stream: true, logprobs: true, top_logprobs: RIVALS,
    messages: system ? [{ role: "system", content: system }, ...history] : history,
    max_tokens: wish("max_tokens"), temperature: wish("temperature"), seed: wish("seed"),
  };
  if (thinking) {
    const on = thinking === "on";
    body.chat_template_kwargs = { enable_thinking: on, thinking: on }; // by either of its names
  }
  if (given) {
    try { body.tools = JSON.parse(given); } catch (error) { throw new Error(`Tools: ${error.message}`); }
  }
  return body;
}

// Says `news`, messages that the last answer is followed by, and shows what comes.
const run = runner(form, log, async (heard, signal, news) => {
  const before = history;
  history = [...history, ...(answer ? answer.messages() : []), ...news];
  const earlier = answer;
  answer?.takeResults(false);
  answer = new Answer(log, () => run([]));
  try {
    for await (const event of events("v1/chat/completions", options(), wish("key"), signal)) {
      const choice = event.choices?.[0];
      if (choice && answer.take(choice)) heard();
    }
  } finally {
    if (answer.empty) { // as if nothing had been said
      answer.box.remove();
      history = before;
      answer = earlier;
      answer?.takeResults(true);
    } else {
      answer.end();
    }
  }
});

form.addEventListener("submit", event => {
  event.preventDefault();
  if (chat.querySelector(".stop").hidden === false) return;
  const text = form.elements.text.value, attached = takeAttachments();
  form.reset();
  const message = add(log, "message user");
  for (const each of attached) show(message, each);
  message.append(text);
  run([{ role: "user", content: content(text, attached) }]);
});
sendOnEnter(form.elements.text);

chat.querySelector(".reset").addEventListener("click", () => {
  takeAttachments();
  history = [];
  answer = null;
  log.replaceChildren();
});

document.getElementById("example").addEventListener("click", () => {
  tools.value = JSON.stringify(EXAMPLE, null, 1);
});
