// Chats and settings, kept in this browser alone.

const MOST = 50; // chats
const SETTINGS = { system: "", temperature: "", top_p: "", top_k: "", max_tokens: "", seed: "", thinking: "", tools: "", key: "" };

function read(name, otherwise) {
  try {
    return JSON.parse(localStorage.getItem(name)) ?? otherwise;
  } catch {
    return otherwise;
  }
}

export function loadSettings() {
  return { ...SETTINGS, ...read("ninfer.settings", {}) };
}

export function saveSettings(settings) {
  localStorage.setItem("ninfer.settings", JSON.stringify(settings));
}

export function loadChats() {
  return read("ninfer.chats", []);
}

// The newest first. Old ones go when there are too many, or too much for the browser to keep.
export function saveChats(chats) {
  const kept = chats.filter((chat) => chat.messages.length).slice(0, MOST);
  for (;;) {
    try {
      localStorage.setItem("ninfer.chats", JSON.stringify(kept));
      return;
    } catch (error) {
      if (!kept.length) throw error;
      kept.pop();
    }
  }
}

// The fields of a request that the settings stand for. Throws with the name of the one that is wrong.
export function requestFields(settings) {
  const fields = {};
  for (const name of ["temperature", "top_p", "top_k", "max_tokens", "seed"]) {
    if (settings[name] === "") continue;
    fields[name] = Number(settings[name]);
    if (!Number.isFinite(fields[name])) throw new Error(`${name} is not a number`);
  }
  if (settings.thinking) fields.enable_thinking = settings.thinking === "on";
  if (settings.tools.trim()) {
    let tools;
    try {
      tools = JSON.parse(settings.tools);
    } catch (error) {
      throw new Error(`the tools are not JSON: ${error.message}`);
    }
    if (!Array.isArray(tools)) throw new Error("the tools are not a JSON array");
    if (tools.length) fields.tools = tools;
  }
  return fields;
}
