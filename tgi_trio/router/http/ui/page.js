// The tabs, the settings and the two ways to generate. Answers only ever become text nodes.

import { events, get, message } from "./server.js";
import { tokenSpan } from "./chances.js";
import { watch } from "./dashboard.js";

const RIVALS = 5; // top tokens asked for; the server's default limit

const settings = document.getElementById("settings");

function wish(name) {
  const { value, type } = settings.elements[name];
  return type === "number" ? (value === "" ? undefined : Number(value)) : value;
}

function add(parent, className) {
  const node = document.createElement("div");
  node.className = className;
  parent.append(node);
  return node;
}

// Wires a form to `generate(text, box, signal)`, which returns the receipt.
function generating(section, box, generate) {
  const form = section.querySelector("form");
  const [send, stop, receipt] = [".send", ".stop", ".receipt"].map(name => form.querySelector(name));
  let running = null;
  const busy = yes => { send.hidden = yes; stop.hidden = !yes; };
  form.addEventListener("submit", async event => {
    event.preventDefault();
    if (running) return;
    running = new AbortController();
    busy(true);
    const began = performance.now();
    let first = null, tokens = 0;
    const heard = () => { first ??= performance.now(); tokens += 1; };
    try {
      await generate(form.elements.text.value, heard, running.signal);
    } catch (error) {
      if (error.name !== "AbortError") add(box, "message error").textContent = error.message;
    }
    const ended = performance.now();
    receipt.textContent = first === null ? "" :
      `${tokens} tokens, first after ${(first - began).toFixed(0)} ms, ` +
      `${(1000 * (tokens - 1) / Math.max(ended - first, 1)).toFixed(0)} tokens/s`;
    running = null;
    busy(false);
  });
  stop.addEventListener("click", () => running?.abort());
  form.elements.text.addEventListener("keydown", event => {
    if (event.key === "Enter" && !event.shiftKey && form.closest("#chat")) {
      event.preventDefault();
      form.requestSubmit();
    }
  });
}

// ---- chat

const chat = document.getElementById("chat");
const log = chat.querySelector(".log");
let history = [];

generating(chat, log, async (text, heard, signal) => {
  chat.querySelector("form").reset();
  add(log, "message user").textContent = text;
  const box = add(log, "message assistant");
  history.push({ role: "user", content: text });
  const system = wish("system");
  const body = {
    model: "tgi", stream: true, logprobs: true, top_logprobs: RIVALS,
    messages: [...(system ? [{ role: "system", content: system }] : []), ...history],
    max_tokens: wish("max_tokens"), temperature: wish("temperature"), seed: wish("seed"),
  };
  let answer = "";
  try {
    for await (const event of events("v1/chat/completions", body, wish("key"), signal)) {
      const choice = event.choices?.[0];
      const content = choice?.delta?.content;
      if (!content) continue;
      heard();
      answer += content;
      const chances = choice.logprobs?.content?.at(-1);
      box.append(tokenSpan(content, chances && {
        chosen: { text: chances.token, logprob: chances.logprob },
        rivals: chances.top_logprobs.map(({ token, logprob }) => ({ text: token, logprob })),
      }));
      box.scrollIntoView({ block: "nearest" });
    }
  } finally {
    if (answer) history.push({ role: "assistant", content: answer });
    else { history.pop(); box.remove(); }
  }
});

chat.querySelector(".reset").addEventListener("click", () => {
  history = [];
  log.replaceChildren();
});

// ---- completion

const complete = document.getElementById("complete");
const page = complete.querySelector(".log");

generating(complete, page, async (text, heard, signal) => {
  page.replaceChildren();
  const box = add(page, "message");
  box.append(text);
  const temperature = wish("temperature");
  const parameters = {
    max_new_tokens: wish("max_tokens"), seed: wish("seed"), top_n_tokens: RIVALS, details: true,
    ...(temperature ? { temperature, do_sample: true } : {}),
  };
  for await (const event of events("generate_stream", { inputs: text, parameters }, wish("key"), signal)) {
    if (!event.token) continue;
    heard();
    if (event.token.special) continue;
    box.append(tokenSpan(event.token.text, { chosen: event.token, rivals: event.top_tokens ?? [] }));
  }
});

// ---- the page

function turn() {
  const here = ["chat", "complete", "watch"].find(name => location.hash === `#${name}`) ?? "chat";
  for (const section of document.querySelectorAll("section"))
    section.classList.toggle("here", section.id === here);
  for (const link of document.querySelectorAll("nav a"))
    link.classList.toggle("here", link.hash === `#${here}`);
  watch(here === "watch");
}

settings.elements.key.value = sessionStorage.getItem("key") ?? "";
settings.elements.key.addEventListener("change", () => sessionStorage.setItem("key", wish("key")));
settings.addEventListener("submit", event => event.preventDefault());
addEventListener("hashchange", turn);
turn();

get("info").then(
  info => { document.getElementById("model").textContent = info.model_id; },
  error => { document.getElementById("model").textContent = message(error); },
);
