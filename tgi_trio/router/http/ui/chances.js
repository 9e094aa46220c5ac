// A token that tells, when pointed at, what chance the model gave to it and to its rivals.

const box = document.getElementById("chances");

// `chances` is {chosen: {text, logprob}, rivals: [{text, logprob}, ...]}, or nothing.
export function tokenSpan(text, chances) {
  const span = document.createElement("span");
  span.className = "token";
  span.textContent = text;
  if (chances?.chosen) {
    span.addEventListener("mouseenter", () => show(span, chances));
    span.addEventListener("mouseleave", () => { box.hidden = true; });
  }
  return span;
}

function show(span, { chosen, rivals }) {
  const others = rivals.filter(rival => rival.text !== chosen.text);
  const rows = [chosen, ...others].sort((one, other) => other.logprob - one.logprob);
  box.replaceChildren(...rows.map(row => line(row, row === chosen)));
  box.hidden = false;
  const place = span.getBoundingClientRect();
  const left = Math.min(place.left, document.documentElement.clientWidth - box.offsetWidth - 8);
  box.style.left = `${left + scrollX}px`;
  box.style.top = `${place.bottom + scrollY + 6}px`;
}

function line({ text, logprob }, chosen) {
  const row = document.createElement("div");
  row.className = chosen ? "chance chosen" : "chance";
  const share = Math.exp(logprob);
  const name = part("span", "name", JSON.stringify(text).slice(1, -1));
  const meter = document.createElement("meter");
  meter.value = share;
  row.append(name, meter, part("span", "share", `${(100 * share).toFixed(share < 0.1 ? 1 : 0)} %`));
  return row;
}

function part(tag, className, text) {
  const node = document.createElement(tag);
  node.className = className;
  node.textContent = text;
  return node;
}
