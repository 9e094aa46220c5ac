// Pictures that go with the next message: chosen by the button, dropped on the chat, or pasted.

import { add } from "./generating.js";

const TYPES = ["image/png", "image/jpeg", "image/gif", "image/webp", "image/tiff"];

// Wires a form whose `.pictures` shows what waits; returns what takes it from there.
export function pictures(form, area) {
  const box = form.querySelector(".pictures"), input = form.querySelector(".files");
  let waiting = []; // {url, node}

  async function attach(files) {
    for (const file of files) {
      if (!TYPES.includes(file.type)) continue;
      const url = await read(file);
      const node = add(box, "picture", "button");
      node.type = "button";
      node.title = `Remove ${file.name}`;
      show(node, url, file.name);
      const one = { url, node };
      node.addEventListener("click", () => {
        waiting = waiting.filter(other => other !== one);
        node.remove();
      });
      waiting.push(one);
    }
  }

  form.querySelector(".attach").addEventListener("click", () => input.click());
  input.addEventListener("change", async () => {
    await attach(input.files);
    input.value = "";
  });
  form.addEventListener("paste", event => {
    const files = [...event.clipboardData.files].filter(({ type }) => TYPES.includes(type));
    if (!files.length) return; // text goes where it always goes
    event.preventDefault();
    attach(files);
  });
  area.addEventListener("dragover", event => event.preventDefault());
  area.addEventListener("drop", event => {
    event.preventDefault();
    attach(event.dataTransfer.files);
  });

  return () => {
    const urls = waiting.map(({ url }) => url);
    waiting = [];
    box.replaceChildren();
    return urls;
  };
}

// What a message of a person is in the API: a text alone, or pictures in front of it.
export function content(text, urls) {
  if (!urls.length) return text;
  return [...urls.map(url => ({ type: "image_url", image_url: { url } })), { type: "text", text }];
}

export function show(parent, url, name = "") {
  const image = add(parent, "", "img");
  image.src = url;
  image.alt = name || "a picture of this message";
}

function read(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(file);
  });
}
