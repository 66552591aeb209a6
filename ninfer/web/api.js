// Requests to the server that served this page.

export class ApiError extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

function headers(key) {
  return key ? { Authorization: `Bearer ${key}` } : {};
}

async function failure(response) {
  let message = `${response.status} ${response.statusText}`;
  try {
    message = (await response.json()).error.message;
  } catch {
    // no JSON: the status has to do
  }
  return new ApiError(message, response.status);
}

export async function getJson(path, key) {
  const response = await fetch(path, { headers: headers(key), cache: "no-store" });
  if (!response.ok) throw await failure(response);
  return response.json();
}

// The chunks of a streamed chat completion. Throws ApiError, also for an error inside the stream.
export async function* streamChat(body, key, signal) {
  const response = await fetch("/v1/chat/completions", {
    method: "POST",
    headers: { ...headers(key), "Content-Type": "application/json" },
    body: JSON.stringify({ ...body, stream: true, stream_options: { include_usage: true } }),
    signal,
  });
  if (!response.ok) throw await failure(response);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  let ended = false;
  for (;;) {
    const { value, done } = await reader.read();
    if (done) break;
    text += value;
    const frames = text.split("\n\n");
    text = frames.pop();
    for (const frame of frames) {
      if (!frame.startsWith("data: ")) continue; // a comment that keeps the connection alive
      const data = frame.slice(6);
      if (data === "[DONE]") {
        ended = true;
        continue;
      }
      const chunk = JSON.parse(data);
      if (chunk.error) throw new ApiError(chunk.error.message, 0);
      yield chunk;
    }
  }
  if (!ended) throw new ApiError("the connection ended in the middle of the reply", 0);
}
