// Requests to the server that served the page: a body, or server-sent events as they come.

export function message(error) {
  if (typeof error === "string") return error;
  return error?.error?.message ?? error?.error ?? error?.message ?? JSON.stringify(error);
}

async function checked(answer) {
  if (answer.ok) return answer;
  const text = await answer.text();
  let told = text;
  try { told = message(JSON.parse(text)); } catch { /* plain text is told as it is */ }
  throw new Error(`${answer.status}: ${told || answer.statusText}`);
}

export async function get(path, signal) {
  return (await checked(await fetch(path, { signal }))).json();
}

export async function text(path) {
  return (await checked(await fetch(path))).text();
}

// Yields each event's object; an error event is thrown. Aborting the signal cancels the request.
export async function* events(path, body, key, signal) {
  const headers = { "content-type": "application/json" };
  if (key) headers.authorization = `Bearer ${key}`;
  const answer = await checked(await fetch(path, {
    method: "POST", headers, signal, body: JSON.stringify(body),
  }));
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const frames = (rest + value).split("\n\n");
      rest = frames.pop();
      for (const frame of frames) {
        if (!frame.startsWith("data:")) continue; // a keep-alive comment
        const data = frame.slice(5).trim();
        if (data === "[DONE]") return;
        const event = JSON.parse(data);
        if (event.error) throw new Error(message(event));
        yield event;
      }
    }
  } finally {
    await reader.cancel().catch(() => {}); // it may have ended by itself
  }
}
