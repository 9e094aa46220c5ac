// Files that go with the next message: chosen by the button, dropped on the chat, or pasted.

import { add } from "./generating.js";

// By the first half of a file's type: the part of a message that holds it, the element that shows it.
const KINDS = {
  image: { part: "image_url", tag: "img" },
  video: { part: "video_url", tag: "video" },
  audio: { part: "audio_url", tag: "audio" },
};
const UNSERVED = "image/svg+xml"; // no pixels

// Wires a form whose `.attachments` shows what waits; returns what takes it from there.
export function attachments(form, area) {
  const box = form.querySelector(".attachments"), input = form.querySelector(".files");
  let waiting = []; // {kind, url, node}

  async function attach(files) {
    for (const file of files) {
      const kind = kindOf(file);
      if (!kind) continue;
      const url = await read(file);
      const node = add(box, "attachment", "button");
      node.type = "button";
      node.title = `Remove ${file.name}`;
      if (kind === "image") show(node, { kind, url }, file.name);
      else node.append(file.name);
      const one = { kind, url, node };
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
    const files = [...event.clipboardData.files].filter(kindOf);
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
    const taken = waiting.map(({ kind, url }) => ({ kind, url }));
    waiting = [];
    box.replaceChildren();
    return taken;
  };
}

// What a message of a person is in the API: a text alone, or files in front of it.
export function content(text, attached) {
  if (!attached.length) return text;
  const parts = attached.map(({ kind, url }) => {
    const { part } = KINDS[kind];
    return { type: part, [part]: { url } };
  });
  return [...parts, { type: "text", text }];
}

export function show(parent, { kind, url }, name = "") {
  const shown = add(parent, "", KINDS[kind].tag);
  shown.src = url;
  if (kind === "image") shown.alt = name || "a picture of this message";
  else shown.controls = true;
}

// The kind of a file; null for what no message takes.
function kindOf({ type }) {
  const kind = type.split("/")[0];
  return type !== UNSERVED && Object.hasOwn(KINDS, kind) ? kind : null;
}

function read(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(file);
  });
}
