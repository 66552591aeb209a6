// Polls /stats and shows it.

import { getJson } from "/web/api.js";

const EVERY_MS = 1000;
const KEPT = 120; // polls in the charts
const $ = (id) => document.getElementById(id);
const history = [];
let last = null;

function make(tag, className, ...children) {
  const node = document.createElement(tag);
  if (className) node.className = className;
  node.append(...children.map((c) => (c instanceof Node ? c : String(c))));
  return node;
}

const count = (n) => Math.round(n).toLocaleString("en");
const rate = (n) => (n >= 100 ? count(n) : n.toFixed(1));
const seconds = (s) => (s == null ? "–" : s < 1 ? `${Math.round(s * 1000)} ms` : `${s.toFixed(s < 10 ? 2 : 1)} s`);
const percent = (part, whole) => (whole ? `${((100 * part) / whole).toFixed(0)} %` : "–");

function bytes(n) {
  for (const unit of ["B", "KiB", "MiB", "GiB"]) {
    if (n < 1024 || unit === "GiB") return `${n < 10 && unit !== "B" ? n.toFixed(1) : Math.round(n)} ${unit}`;
    n /= 1024;
  }
}

function duration(s) {
  const [d, h, m] = [Math.floor(s / 86400), Math.floor(s / 3600) % 24, Math.floor(s / 60) % 60];
  return d ? `${d} d ${h} h` : h ? `${h} h ${m} min` : m ? `${m} min ${s % 60} s` : `${s} s`;
}

function tile(name, value, detail, share) {
  const node = make("div", "tile", make("div", "name", name), make("div", "value", value), make("div", "detail", detail));
  if (share !== undefined) node.append(bar(share));
  return node;
}

function bar(share) {
  const meter = make("meter");
  meter.max = 1;
  meter.value = Math.min(1, share || 0);
  return meter;
}

function table(heads, rows, none) {
  if (!rows.length) return make("p", "none", none);
  const head = make("tr", "", ...heads.map((h) => make("th", "", h)));
  const body = rows.map((row) => make("tr", "", ...row.map((cell) => make("td", "", cell))));
  return make("table", "", make("thead", "", head), make("tbody", "", ...body));
}

function tiles(s) {
  const r = s.requests;
  const pages = s.capacity.kv_capacity_pages;
  return [
    tile("Running", `${r.running} / ${s.capacity.max_concurrency}`, `${r.prefilling} reading, ${r.decode_ready} writing`, r.running / s.capacity.max_concurrency),
    tile("Waiting", r.waiting, r.waiting ? `longest ${seconds(s.queue.longest_wait_seconds)}` : `room for ${s.capacity.max_pending_requests}`, r.waiting / Math.max(1, s.capacity.max_pending_requests)),
    tile("Generated", `${rate(s.recent.generated_tokens_per_second)} tok/s`, `${count(s.counters.generated_tokens)} tokens in all`),
    tile("Prompts", `${rate(s.recent.prompt_tokens_per_second)} tok/s`, `${count(s.counters.computed_prefill_tokens)} new, ${count(s.counters.reused_prompt_tokens)} reused`),
    tile("KV pages", `${count(s.occupancy.kv_pages)} / ${count(pages)}`, `${count(pages * s.capacity.kv_page_tokens)} tokens fit`, s.occupancy.kv_pages / pages),
    tile("First token", seconds(s.latency.first_token_seconds.p50), `95 % within ${seconds(s.latency.first_token_seconds.p95)}`),
  ];
}

function line(svg, series, most) {
  const path = (values) => values.map((v, i) => `${i ? "L" : "M"}${((600 * (KEPT - values.length + i)) / (KEPT - 1)).toFixed(1)} ${(156 - (150 * v) / most).toFixed(1)}`).join("");
  const parts = [40, 80, 120].map((y) => draw("line", { x1: 0, x2: 600, y1: y, y2: y, class: "rule" }));
  series.forEach((values, i) => {
    const kind = "ab"[i];
    const start = (600 * (KEPT - values.length)) / (KEPT - 1);
    parts.push(draw("path", { d: `${path(values)}L600 160L${start.toFixed(1)} 160Z`, class: `area ${kind}` }));
    parts.push(draw("path", { d: path(values), class: `stroke ${kind}` }));
  });
  svg.replaceChildren(...parts);
}

function draw(tag, attributes) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  return node;
}

function charts() {
  for (const [id, names, shown] of [["tokens", ["generated", "prompt"], rate], ["requests", ["running", "waiting"], count]]) {
    const series = names.map((name) => history.map((h) => h[name]));
    const most = Math.max(1, ...series.flat());
    line($(`chart-${id}`), series, most);
    $(`max-${id}`).textContent = `highest ${shown(most)}`;
  }
}

function slotRows(s) {
  return s.slots.map((slot) => {
    if (!slot.is_processing) return [slot.id, make("span", "faint", "idle"), "", ""];
    const reading = slot.phase === "prefill";
    const share = reading ? slot.n_prompt_tokens_processed / slot.n_prompt_tokens : 1;
    return [slot.id, reading ? "reading" : "writing", reading ? bar(share) : `${count(slot.n_prompt_tokens)} read`, reading ? "" : `${count(slot.n_decoded)} written`];
  });
}

function show(s) {
  $("model").textContent = s.model;
  $("uptime").textContent = `up ${duration(s.uptime_seconds)}`;
  state(s.failure ? "failed" : s.requests.running ? "busy" : "idle", s.failure ?? "");
  $("tiles").replaceChildren(...tiles(s));
  charts();
  $("slots").replaceChildren(table(["", "", "prompt", "reply"], slotRows(s), "no slots"));
  const waits = s.queue.entries.map((q) => [q.position, q.request_id, seconds(q.wait_seconds)]);
  $("queue").replaceChildren(table(["", "request", "waits"], waits, "Nobody waits."));
  const names = Object.entries(s.endpoints);
  const rows = names.map(([name, e]) => [name.replaceAll("_", " "), count(e.done), count(e.cancelled), count(e.rejected), count(e.failed)]);
  $("endpoints").replaceChildren(table(["", "done", "left", "refused", "failed"], rows, "No requests yet."));
  const latency = Object.entries(s.latency).filter(([, l]) => l.p50 !== undefined);
  const times = latency.map(([name, l]) => [name.replace("_seconds", "").replaceAll("_", " "), seconds(l.p50), seconds(l.p95), seconds(l.max)]);
  $("latency").replaceChildren(table(["", "half within", "95 % within", "longest"], times, ""));
  const memory = Object.entries(s.memory).map(([name, n]) => [name.replace("_bytes", "").replaceAll("_", " "), bytes(n)]);
  $("memory").replaceChildren(table(["", ""], memory, "unknown"));
  const a = s.acceptance;
  const cache = [["prompt tokens reused", percent(s.counters.reused_prompt_tokens, s.counters.reused_prompt_tokens + s.counters.computed_prefill_tokens)]];
  if (a) cache.push(["drafts accepted", `${count(a.accepted_tokens)} of ${count(a.drafted_tokens)}, ${percent(a.accepted_tokens, a.drafted_tokens)}`]);
  for (const tier of s.cache.tiers) cache.push([`tier ${tier.name}`, tier.capacity_bytes ? `${bytes(tier.used_bytes)} of ${bytes(tier.capacity_bytes)}` : bytes(tier.used_bytes ?? 0)]);
  $("cache").replaceChildren(table(["", ""], cache, ""));
}

function state(name, detail) {
  $("state").textContent = name;
  $("state").className = `pill ${name}`;
  $("state").title = detail;
}

async function poll() {
  try {
    last = await getJson("/stats", localStorage.getItem("ninfer.dashboard-key") ?? "");
    $("key-form").hidden = true;
    history.push({ generated: last.recent.generated_tokens_per_second, prompt: last.recent.prompt_tokens_per_second, running: last.requests.running, waiting: last.requests.waiting });
    if (history.length > KEPT) history.shift();
    show(last);
  } catch (error) {
    state("away", error.message);
    $("key-form").hidden = error.status !== 401;
  }
  setTimeout(poll, EVERY_MS);
}

$("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  localStorage.setItem("ninfer.dashboard-key", $("key").value);
});
poll();
