// Requests to the server: the key, errors in words, server-sent events. It knows no page but the
// dialog that asks for the key.

let key = sessionStorage.getItem('ridgeline.key');
let asking = null;

function askKey(wasWrong) {
  const dialog = document.getElementById('key-dialog');
  asking ??= new Promise((resolve, reject) => {
    document.getElementById('key-problem').textContent = wasWrong ? 'That key does not open it.' : '';
    dialog.returnValue = '';
    dialog.addEventListener('close', () => {
      asking = null;
      if (dialog.returnValue !== 'ok') {
        reject(new Error('this server needs a key'));
        return;
      }
      const field = dialog.querySelector('input');
      key = field.value.trim();
      field.value = '';
      sessionStorage.setItem('ridgeline.key', key);
      resolve();
    }, { once: true });
    dialog.showModal();
  });
  return asking;
}

/** Fetch; asks for the key when one is needed. Throws an Error that says what went wrong. */
export async function call(path, options = {}) {
  for (;;) {
    const used = key;
    const headers = { ...options.headers };
    if (used) headers.authorization = `Bearer ${used}`;
    const response = await fetch(path, { ...options, headers, cache: 'no-store' }).catch((error) => {
      throw error.name === 'AbortError' ? error : new Error('the server cannot be reached');
    });
    if (response.ok) return response;
    if (response.status !== 401) throw await failure(response);
    if (used === key) await askKey(Boolean(used));
  }
}

async function failure(response) {
  const body = await response.json().catch(() => null);
  return new Error(body?.error?.message ?? `the server answered ${response.status}`);
}

/** Yield the data of each server-sent event, parsed. */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = '';
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const frames = (rest + value).split('\n\n');
    rest = frames.pop();
    for (const frame of frames) {
      const data = frame.startsWith('data: ') ? frame.slice(6) : '';
      if (data === '[DONE]') yield data;
      else if (data) yield JSON.parse(data);
    }
  }
}

/** Ask for an answer; tell `onText` each piece, return how it ended. */
export async function complete(body, onText, signal) {
  const response = await call('/v1/chat/completions', {
    method: 'POST',
    headers: { 'content-type': 'application/json' },
    body: JSON.stringify({
      ...body, stream: true, stream_options: { include_usage: true }, include_timings: true,
    }),
    signal,
  });
  const end = {};
  for await (const event of events(response)) {
    if (event === '[DONE]') return end;
    if (event.error) throw new Error(event.error.message);
    const choice = event.choices[0];
    if (choice?.delta?.content) onText(choice.delta.content);
    if (choice?.finish_reason) end.reason = choice.finish_reason;
    if (event.usage) end.usage = event.usage;
    if (event.metrics) end.timings = event.metrics;
  }
  throw new Error('the connection ended before the answer did');
}
