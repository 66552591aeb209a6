// The chat page: what is said, as messages of the chat API plus what is shown beside them.

import { ApiError, getJson, streamChat } from "/web/api.js";
import { render } from "/web/markdown.js";
import { loadChats, loadSettings, requestFields, saveChats, saveSettings } from "/web/store.js";

const $ = (id) => document.getElementById(id);
let settings = loadSettings();
let chats = loadChats();
let chat = { id: crypto.randomUUID?.() ?? String(Date.now()), messages: [] };
let running = null; // AbortController of the reply under way

function make(tag, className, ...children) {
  const node = document.createElement(tag);
  if (className) node.className = className;
  node.append(...children);
  return node;
}

function button(label, action) {
  const node = make("button", "quiet", label);
  node.type = "button";
  node.addEventListener("click", action);
  return node;
}

// The list of chats

function title(one) {
  return one.messages.find((m) => m.role === "user")?.content.slice(0, 60) || "New chat";
}

function showChats() {
  $("chats").replaceChildren(
    ...chats.map((one) => {
      const open = button(title(one), () => openChat(one));
      open.className = one.id === chat.id ? "chat-link current" : "chat-link";
      const drop = button("×", () => dropChat(one));
      drop.setAttribute("aria-label", `Delete ${title(one)}`);
      return make("div", "chat-row", open, drop);
    }),
  );
}

function openChat(one) {
  running?.abort();
  chat = one;
  document.body.classList.remove("side-open");
  showChats();
  showLog();
}

function dropChat(one) {
  chats = chats.filter((other) => other.id !== one.id);
  saveChats(chats);
  if (one.id === chat.id) newChat();
  else showChats();
}

function newChat() {
  openChat({ id: crypto.randomUUID?.() ?? String(Date.now()), messages: [] });
  $("input").focus();
}

function keep() {
  if (!chats.includes(chat)) chats.unshift(chat);
  saveChats(chats);
  showChats();
}

// Messages

function showLog() {
  const parts = chat.messages.flatMap((m, i) => (m.role === "tool" ? [] : [message(m, i)]));
  const hint = make("div", "hint", make("h1", "", "What is on your mind?"), make("p", "", "Replies are made by the model this server runs; chats stay in this browser."));
  $("log").replaceChildren(...(parts.length ? parts : [hint]));
  toEnd(true);
}

function toEnd(always) {
  const log = $("log");
  if (always || log.scrollHeight - log.scrollTop - log.clientHeight < 120) log.scrollTop = log.scrollHeight;
}

function message(m, index) {
  const node = make("article", `message ${m.role}`);
  if (m.role === "user") {
    const edit = button("Edit", () => {
      if (running) return;
      $("input").value = m.content;
      chat.messages.splice(index);
      grow();
      showLog();
      $("input").focus();
    });
    node.append(make("div", "bubble", m.content), make("div", "actions", edit));
    return node;
  }
  fill(node, m, index);
  return node;
}

// An assistant's message: reasoning, text, calls, what went wrong, and figures.
function fill(node, m, index) {
  const parts = [];
  if (m.reasoning) parts.push(fold(node, m));
  if (m.content) parts.push(make("div", "text", render(m.content)));
  if (m.live && !m.content && !m.reasoning && !m.calls?.length) parts.push(make("div", "waiting", make("i"), make("i"), make("i")));
  for (const call of m.calls ?? []) parts.push(callCard(m, call, index));
  if (m.error) parts.push(make("p", "error", m.error));
  if (!m.live) parts.push(footer(m, index));
  node.replaceChildren(...parts);
}

function fold(node, m) {
  const closed = m.content || m.calls?.length || !m.live;
  const label = m.live && !closed ? "Thinking…" : `Thought${m.thought_s ? ` for ${m.thought_s.toFixed(1)} s` : ""}`;
  const details = make("details", "reasoning", make("summary", "", label), make("div", "text", render(m.reasoning)));
  details.open = m.fold ?? !closed; // what the reader chose holds
  details.querySelector("summary").addEventListener("click", () => (m.fold = !details.open));
  return details;
}

function callCard(m, call, index) {
  let shown = call.arguments;
  try {
    shown = JSON.stringify(JSON.parse(call.arguments), null, 2);
  } catch {
    // not whole yet
  }
  const card = make("div", "call", make("div", "call-name", "calls ", make("b", "", call.name)), make("pre", "", shown));
  const answer = chat.messages.slice(index).find((one) => one.role === "tool" && one.tool_call_id === call.id);
  if (answer) {
    card.append(make("div", "call-name", "result"), make("pre", "", answer.content));
  } else if (!m.live && index === chat.messages.length - 1) {
    const field = make("textarea", "result");
    field.rows = 2;
    field.placeholder = "What the tool answers";
    field.value = call.result ?? "";
    field.addEventListener("input", () => (call.result = field.value));
    card.append(field);
    if (call === m.calls.at(-1)) card.append(make("div", "row", button(m.calls.length > 1 ? "Send results" : "Send result", () => answerCalls(m))));
  }
  return card;
}

function answerCalls(m) {
  if (running) return;
  for (const call of m.calls) chat.messages.push({ role: "tool", tool_call_id: call.id, content: call.result ?? "" });
  showLog();
  reply();
}

function footer(m, index) {
  const figures = [];
  if (m.usage) {
    figures.push(`${m.usage.completion_tokens} tokens`);
    if (m.timings?.predicted_per_second) figures.push(`${m.timings.predicted_per_second.toFixed(1)} tok/s`);
    if (m.usage.prompt_tokens_details?.cached_tokens) figures.push(`${m.usage.prompt_tokens_details.cached_tokens} of ${m.usage.prompt_tokens} cached`);
  }
  if (m.finish === "length") figures.push("cut at the limit");
  if (m.stopped) figures.push("stopped");
  const actions = [button("Copy", () => navigator.clipboard.writeText(m.content))];
  if (index === chat.messages.length - 1) actions.push(button("Again", () => again(index)));
  return make("div", "actions", ...actions, make("span", "figures", figures.join(" · ")));
}

function again(index) {
  if (running) return;
  chat.messages.splice(index);
  showLog();
  reply();
}

// Sending

function told() {
  const system = settings.system.trim() ? [{ role: "system", content: settings.system }] : [];
  const turns = chat.messages.map((m) => {
    if (m.role !== "assistant") return { role: m.role, content: m.content, ...(m.tool_call_id && { tool_call_id: m.tool_call_id }) };
    const calls = m.calls?.map((c) => ({ id: c.id, type: "function", function: { name: c.name, arguments: c.arguments } }));
    return { role: "assistant", content: m.content, ...(m.reasoning && { reasoning_content: m.reasoning }), ...(calls?.length && { tool_calls: calls }) };
  });
  return [...system, ...turns];
}

async function reply() {
  const messages = told();
  const m = { role: "assistant", content: "", reasoning: "", calls: [], live: true };
  const [mine, index] = [chat, chat.messages.push(m) - 1];
  const node = message(m, index);
  $("log").querySelector(".hint")?.remove();
  $("log").append(node);
  toEnd(true);
  running = new AbortController();
  const control = running;
  busy(true);
  let due = false;
  const draw = () => {
    if (due) return;
    due = true;
    requestAnimationFrame(() => {
      due = false;
      if (!m.live || chat !== mine) return;
      fill(node, m, index);
      toEnd(false);
    });
  };
  const begun = performance.now();
  try {
    for await (const chunk of streamChat({ messages, ...requestFields(settings) }, settings.key, control.signal)) {
      take(m, chunk, begun);
      draw();
    }
  } catch (error) {
    if (control.signal.aborted) m.stopped = true;
    else m.error = error.message;
    if (error instanceof ApiError && error.status === 401) openSettings("The server wants a key.");
  }
  delete m.live;
  if (running === control) {
    running = null;
    busy(false);
  }
  if (m.stopped && !m.content && !m.reasoning && !m.calls.length) mine.messages.splice(index, 1);
  if (chat === mine) {
    showLog();
    keep();
  } else saveChats(chats);
}

function take(m, chunk, begun) {
  if (chunk.usage) m.usage = chunk.usage;
  if (chunk.timings) m.timings = chunk.timings;
  const choice = chunk.choices[0];
  if (!choice) return;
  if (choice.finish_reason) m.finish = choice.finish_reason;
  const delta = choice.delta;
  if (delta.reasoning_content) m.reasoning += delta.reasoning_content;
  if ((delta.content || delta.tool_calls) && m.reasoning) m.thought_s ??= (performance.now() - begun) / 1000;
  if (delta.content) m.content += delta.content;
  for (const piece of delta.tool_calls ?? []) {
    const call = (m.calls[piece.index] ??= { id: "", name: "", arguments: "" });
    if (piece.id) call.id = piece.id;
    call.name += piece.function?.name ?? "";
    call.arguments += piece.function?.arguments ?? "";
  }
}

function busy(is) {
  $("send").hidden = is;
  $("stop").hidden = !is;
}

function send() {
  const text = $("input").value.trim();
  if (!text || running) return;
  chat.messages.push({ role: "user", content: text });
  $("input").value = "";
  grow();
  showLog();
  keep();
  reply();
}

function grow() {
  const input = $("input");
  input.style.height = "auto";
  const wanted = input.scrollHeight + input.offsetHeight - input.clientHeight; // with the border
  input.style.height = `${Math.min(wanted, 240)}px`;
  input.style.overflowY = wanted > 240 ? "auto" : "hidden";
}

// Settings

function openSettings(reason) {
  const form = $("settings").querySelector("form");
  for (const [name, value] of Object.entries(settings)) if (form.elements[name]) form.elements[name].value = value;
  complain(reason);
  if (!$("settings").open) $("settings").showModal();
}

function complain(text) {
  $("settings-error").hidden = !text;
  $("settings-error").textContent = text ?? "";
}

$("save").addEventListener("click", (event) => {
  const form = event.target.form;
  const wanted = Object.fromEntries(Object.keys(settings).map((name) => [name, form.elements[name].value]));
  try {
    requestFields(wanted);
  } catch (error) {
    event.preventDefault();
    return complain(error.message);
  }
  settings = wanted;
  saveSettings(settings);
  showModel();
});

async function showModel() {
  try {
    $("model").textContent = (await getJson("/v1/models", settings.key)).data[0].id;
  } catch (error) {
    $("model").textContent = error.message;
    if (error.status === 401) openSettings("The server wants a key.");
  }
}

$("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
$("input").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  send();
});
$("input").addEventListener("input", grow);
$("stop").addEventListener("click", () => running?.abort());
$("new").addEventListener("click", newChat);
$("menu").addEventListener("click", () => document.body.classList.toggle("side-open"));
$("open-settings").addEventListener("click", () => openSettings());
grow();
showChats();
showLog();
showModel();
