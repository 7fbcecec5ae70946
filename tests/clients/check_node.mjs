// The openai package for Node and in a browser's page, and Vercel's AI SDK.
import assert from 'node:assert/strict';
import { spawn, spawnSync } from 'node:child_process';
import { readFile } from 'node:fs/promises';
import { createServer } from 'node:http';
import path from 'node:path';
import test from 'node:test';
import { createOpenAICompatible } from '@ai-sdk/openai-compatible';
import { generateObject, generateText, jsonSchema, streamText, tool } from 'ai';
import OpenAI from 'openai';

const baseURL = `${process.env.RIDGELINE_URL}/v1`;
const model = process.env.RIDGELINE_MODEL;
const client = new OpenAI({ baseURL, apiKey: 'x', maxRetries: 0 });
const sdk = createOpenAICompatible({ name: 'ridgeline', baseURL, apiKey: 'x', includeUsage: true, supportsStructuredOutputs: true })(model);
const messages = [{ role: 'user', content: 'Name three colours.' }];
const ask = { model, messages, max_tokens: 8 };
const city = { type: 'object', properties: { city: { type: 'string', maxLength: 20 } }, required: ['city'], additionalProperties: false };

test('openai: turns and streams', async () => {
  const first = (await client.chat.completions.create(ask)).choices[0].message;
  assert.ok((await client.chat.completions.create({ ...ask, messages: [...messages, first, ...messages] })).id);
  let text = '';
  for await (const part of await client.chat.completions.create({ ...ask, stream: true })) text += part.choices[0]?.delta.content ?? '';
  assert.ok(text);
});

test('openai: completions, responses, errors, abort', async () => {
  assert.ok((await client.completions.create({ model, prompt: '2+2=', max_tokens: 4 })).choices[0].text);
  assert.ok((await client.responses.create({ model, input: 'Hi', max_output_tokens: 16 })).output_text);
  await assert.rejects(client.chat.completions.create({ ...ask, model: 'nope' }), OpenAI.NotFoundError);
  const stop = new AbortController();
  for await (const part of await client.chat.completions.create({ ...ask, max_tokens: 500, stream: true }, { signal: stop.signal })) {
    assert.ok(part);
    stop.abort();
    break;
  }
});

const PAGE = `<!doctype html><script type="module">
import OpenAI from '/node_modules/openai/index.mjs';
const client = new OpenAI({ ...${JSON.stringify({ baseURL, apiKey: 'x', maxRetries: 0 })}, dangerouslyAllowBrowser: true });
const ask = ${JSON.stringify(ask)};
let said = '';
try {
  for await (const part of await client.chat.completions.create({ ...ask, stream: true })) said += part.choices[0]?.delta.content ?? '';
  const { data, response } = await client.chat.completions.create(ask).withResponse();
  const turns = [...ask.messages, data.choices[0].message, ...ask.messages];
  const second = await client.chat.completions.create({ ...ask, messages: turns });
  const refused = await client.chat.completions.create({ ...ask, model: 'nope' }).catch((error) => error);
  const stop = new AbortController();
  const stopped = await client.chat.completions.create({ ...ask, max_tokens: 500, stream: true }, { signal: stop.signal });
  for await (const part of stopped) stop.abort();
  said += ' ' + [response.headers.get('x-request-id').length, second.choices[0].finish_reason, refused.constructor === OpenAI.NotFoundError, refused.status];
} catch (error) { said = String(error); }
await fetch('/said', { method: 'POST', body: said });
</script>`;

test('openai: in a page of another origin', { skip: spawnSync('chromium', ['--version']).error && 'needs chromium' }, async () => {
  let hear;
  const said = new Promise((resolve) => { hear = resolve; });
  const pages = createServer(async (request, response) => {
    if (request.url === '/said') {
      for await (const part of request) hear(String(part));
      response.end();
    } else if (request.url.startsWith('/node_modules/openai/')) {
      response.setHeader('content-type', 'text/javascript');
      response.end(await readFile(path.join(process.cwd(), path.normalize(request.url))).catch(() => ''));
    } else response.setHeader('content-type', 'text/html').end(PAGE);
  });
  await new Promise((resolve) => { pages.listen(0, '127.0.0.1', resolve); });
  const flags = ['--headless=new', '--no-sandbox', '--disable-gpu', `--user-data-dir=${path.join(process.cwd(), 'profile')}`];
  const browser = spawn('chromium', [...flags, `http://127.0.0.1:${pages.address().port}/`], { stdio: 'ignore' });
  try {
    assert.match(await said, /\w.* 32,(stop|length),true,404$/s);
  } finally {
    browser.kill();
    pages.closeAllConnections();
    pages.close();
  }
});

test('ai sdk: text and streams', async () => {
  assert.ok((await generateText({ model: sdk, prompt: 'Hi', maxOutputTokens: 8, maxRetries: 0 })).text);
  const stream = streamText({ model: sdk, prompt: 'Hi', maxOutputTokens: 8, maxRetries: 0 });
  assert.ok(await stream.text);
  assert.ok((await stream.usage).totalTokens);
});

test('ai sdk: objects and tools', async () => {
  const { object } = await generateObject({ model: sdk, schema: jsonSchema(city), prompt: 'Name a city.', maxRetries: 0, maxOutputTokens: 100 });
  assert.equal(typeof object.city, 'string');
  const weather = tool({ description: 'Weather', inputSchema: jsonSchema(city), execute: async () => 'sunny' });
  const { toolCalls } = await generateText({ model: sdk, prompt: 'Weather of Rome?', maxOutputTokens: 100, maxRetries: 0, tools: { weather }, toolChoice: 'required' });
  assert.equal(toolCalls[0].toolName, 'weather');
});
