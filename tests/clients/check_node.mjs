// The openai package for Node, and Vercel's AI SDK.
import assert from 'node:assert/strict';
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
