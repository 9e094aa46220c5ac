// The dashboard: reads /metrics once a second and draws the last two minutes.

import { text } from "./server.js";

const PERIOD = 1000; // ms between two readings
const KEPT = 120; // readings

// title, unit, digits, and the value: from this reading and what changed since the one before
const PLOTS = [
  ["Streams", "", 0, now => now.get("tgi_batch_current_size")],
  ["Waiting", "", 0, now => now.get("tgi_queue_size")],
  ["Rows in a step", "", 0, now => now.get("tgi_batch_decode_rows")],
  ["KV cache in use", "%", 1, now => 100 * now.get("tgi_kv_cache_usage")],
  ["Tokens", "/s", 0, (now, since) => rate(since, "tgi_request_inter_token_latency_duration_count")],
  ["Time to first token, p50", "ms", 1, (now, since) => 1e3 * quantile(since, "tgi_request_time_to_first_token_duration", 0.5)],
  ["Inter-token latency, p50", "ms", 2, (now, since) => 1e3 * quantile(since, "tgi_request_inter_token_latency_duration", 0.5)],
  ["Inter-token latency, p99", "ms", 2, (now, since) => 1e3 * quantile(since, "tgi_request_inter_token_latency_duration", 0.99)],
  ["Step gap, p50", "µs", 0, (now, since) => 1e6 * quantile(since, "tgi_batch_step_gap_duration", 0.5)],
];

export function read(exposition) {
  const series = new Map();
  for (const line of exposition.split("\n")) {
    if (!line || line[0] === "#") continue;
    const space = line.lastIndexOf(" ");
    series.set(line.slice(0, space), Number(line.slice(space + 1)));
  }
  return series;
}

function rate(since, name) {
  return since ? since.of(name) / since.seconds : NaN;
}

// The quantile of what was observed between two readings: the bound of its bucket.
function quantile(since, name, q) {
  if (!since) return NaN;
  const all = since.of(`${name}_count`);
  if (!all) return NaN;
  for (const [bound, series] of since.buckets(name))
    if (since.of(series) >= q * all) return bound;
  return NaN;
}

class Since {
  constructor(before, now, seconds) {
    Object.assign(this, { before, now, seconds });
  }
  of(series) {
    return (this.now.get(series) ?? 0) - (this.before.get(series) ?? 0);
  }
  *buckets(name) {
    const start = `${name}_bucket{le="`;
    for (const series of this.now.keys())
      if (series.startsWith(start) && !series.includes("+Inf"))
        yield [Number(series.slice(start.length, -2)), series];
  }
}

class Plot {
  constructor([title, unit, digits, value], parent) {
    Object.assign(this, { unit, digits, value, points: [] });
    const figure = document.createElement("figure");
    const caption = document.createElement("figcaption");
    this.label = document.createElement("b");
    caption.append(title, this.label);
    this.canvas = document.createElement("canvas");
    figure.append(caption, this.canvas);
    parent.append(figure);
  }

  add(now, since) {
    const value = this.value(now, since);
    this.points.push(value);
    if (this.points.length > KEPT) this.points.shift();
    this.label.textContent = Number.isFinite(value) ? `${value.toFixed(this.digits)} ${this.unit}` : "–";
    this.draw();
  }

  draw() {
    const scale = devicePixelRatio;
    const width = this.canvas.width = this.canvas.clientWidth * scale;
    const height = this.canvas.height = this.canvas.clientHeight * scale;
    const context = this.canvas.getContext("2d");
    const top = 1.1 * Math.max(...this.points.filter(Number.isFinite), 1e-9);
    const x = index => width * (index + KEPT - this.points.length) / (KEPT - 1);
    const y = value => height - scale - (height - 2 * scale) * value / top;
    context.strokeStyle = getComputedStyle(this.canvas).color;
    context.lineWidth = 1.5 * scale;
    context.lineJoin = "round";
    context.beginPath();
    let pen = false;
    this.points.forEach((value, index) => {
      if (!Number.isFinite(value)) { pen = false; return; }
      if (pen) context.lineTo(x(index), y(value));
      else { context.moveTo(x(index), y(value)); context.lineTo(x(index) + scale, y(value)); }
      pen = true;
    });
    context.stroke();
  }
}

let plots = null, timer = null, before = null, at = 0;

async function reading() {
  const state = document.getElementById("state");
  try {
    const now = read(await text("metrics")), time = performance.now();
    const since = before && new Since(before, now, (time - at) / 1000);
    [before, at] = [now, time];
    for (const plot of plots) plot.add(now, since);
    const restarts = now.get("tgi_shard_restarts") ?? 0;
    state.textContent = (now.get("tgi_shard_ready") ? "Serving" : "Not serving") +
      `, ${now.get("tgi_kv_blocks_free")} of ${now.get("tgi_kv_blocks_total")} KV blocks free` +
      (restarts ? `, shard restarted ${restarts} times` : "");
  } catch (error) {
    state.textContent = `No answer: ${error.message}`;
  }
}

// Reads while the dashboard is shown, and not otherwise.
export function watch(shown) {
  clearInterval(timer);
  if (!shown) return;
  plots ??= PLOTS.map(row => new Plot(row, document.getElementById("plots")));
  reading();
  timer = setInterval(reading, PERIOD);
}
