// Requests to the server: the key, errors in words, server-sent events. Of the page it knows only the
// dialog that asks for the key.

import { read, write } from './store.js';

const KEY = 'ridgeline.key';
let key = read(KEY, 'sessionStorage');
let asking = null;

function askKey(wasWrong) {
  const dialog = document.getElementById('key-dialog');
  asking ??= new Promise((resolve, reject) => {
    document.getElementById('key-problem').textContent = wasWrong ? 'That key does not open it.' : '';
    dialog.returnValue = '';
    dialog.addEventListener('close', () => {
      asking = null;
      if (dialog.returnValue !== 'ok') {
        reject(new Error('this server needs an API key'));
        return;
      }
      const field = dialog.querySelector('input');
      key = field.value.trim();
      field.value = '';
      write(KEY, key, 'sessionStorage');
      resolve();
    }, { once: true });
    dialog.showModal();
  });
  return asking;
}

const problem = (message, code) => Object.assign(new Error(message), { code });

/** Fetch a path beside the page, so that a prefix may stand before both; asks for the key when one is needed. Throws an Error with what went wrong, and its code. */
export async function call(path, options = {}) {
  for (;;) {
    const used = key;
    const headers = { ...options.headers };
    if (used) headers.authorization = `Bearer ${used}`;
    const response = await fetch(path, { ...options, headers, cache: 'no-store' }).catch((error) => {
      throw error.name === 'AbortError' ? error : problem('the server cannot be reached', 'unreachable');
    });
    if (response.ok) return response;
    if (response.status !== 401) throw await failure(response);
    if (used === key) await askKey(Boolean(used));
  }
}

async function failure(response) {
  const body = await response.json().catch(() => null);
  return problem(body?.error?.message ?? `the server answered ${response.status}`, body?.error?.code);
}

const lost = () => problem('the connection to the server was lost', 'lost');

/** Return the models that the server has. */
export async function fetchModels() {
  return (await (await call('v1/models')).json()).data;
}

/** Yield the data of each server-sent event, parsed. */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = '';
  for (;;) {
    const { value, done } = await reader.read().catch((error) => {
      throw error.name === 'AbortError' ? error : lost(); // the browser's own words say little
    });
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

/** Return what the server says of a model: the fields of its samplers, and whether it reasons. Loads it. */
export async function fetchProps(model) {
  const named = model ? `?model=${encodeURIComponent(model)}` : '';
  return (await call(`props${named}`)).json();
}

/** Return the ids of a prompt's tokens, and of each the logprobs of itself and of the `num_likeliest`. */
export async function readPrompt(body, num_likeliest) {
  const response = await call('v1/chat/completions', {
    method: 'POST',
    headers: { 'content-type': 'application/json' },
    body: JSON.stringify({ ...body, max_tokens: 0, prompt_logprobs: num_likeliest, return_token_ids: true }),
  });
  const { prompt_token_ids: ids, prompt_logprobs: logprobs } = await response.json();
  return { ids, logprobs };
}

/**
 * Ask for an answer; return how it ended. `onBegin` gets the request's id, and what of it was capped
 * or ignored; `onDelta` each piece, and the name of the model.
 */
export async function complete(body, { onBegin, onDelta }, signal) {
  const response = await call('v1/chat/completions', {
    method: 'POST',
    headers: { 'content-type': 'application/json' },
    body: JSON.stringify({
      ...body, stream: true, stream_options: { include_usage: true }, include_timings: true,
    }),
    signal,
  });
  const told = (name) => response.headers.get(`x-${name}`);
  onBegin({ id: told('request-id'), capped: told('ridgeline-capped'), ignored: told('ridgeline-ignored') });
  const end = {};
  for await (const event of events(response)) {
    if (event === '[DONE]') return end;
    if (event.error) throw problem(event.error.message, event.error.code);
    const choice = event.choices[0];
    if (choice?.delta) onDelta(choice.delta, event.model);
    if (choice?.finish_reason) end.reason = choice.finish_reason;
    if (event.usage) end.usage = event.usage;
    if (event.metrics) end.timings = event.metrics;
  }
  throw lost();
}
