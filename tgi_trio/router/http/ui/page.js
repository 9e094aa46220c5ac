// The tabs, the settings and the completion. Answers only ever become text nodes.

import "./chat.js";
import { events, get, message } from "./server.js";
import { tokenSpan } from "./chances.js";
import { watch } from "./dashboard.js";
import { RIVALS, add, runner, wish } from "./generating.js";

const settings = document.getElementById("settings");

// ---- completion

const complete = document.getElementById("complete");
const page = complete.querySelector(".log");
const form = complete.querySelector("form");

const run = runner(form, page, async (heard, signal, text) => {
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

form.addEventListener("submit", event => {
  event.preventDefault();
  run(form.elements.text.value);
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

// Shows what a request may call the model; another server than ours may say its id alone. It is
// asked for until it is known: the server may be starting anew, or the network have changed.
async function nameModel() {
  const place = document.getElementById("model");
  for (;;) {
    try {
      const info = await get("info", AbortSignal.timeout(10_000));
      place.textContent = (info.settings?.served_model_names ?? [info.model_id]).join(", ");
      return;
    } catch (error) {
      place.textContent = message(error);
      await new Promise(done => setTimeout(done, 2_000));
    }
  }
}
nameModel();
