// Ollama's, Anthropic's and LangChain's packages for Node, and three providers of Vercel's AI SDK.
import assert from 'node:assert/strict';
import test from 'node:test';
import Anthropic from '@anthropic-ai/sdk';
import { createAnthropic } from '@ai-sdk/anthropic';
import { createOpenAI } from '@ai-sdk/openai';
import { ChatOpenAI } from '@langchain/openai';
import { generateObject, generateText, jsonSchema, streamText, tool } from 'ai';
import { Ollama } from 'ollama';
import { createOllama } from 'ollama-ai-provider-v2';

const url = process.env.RIDGELINE_URL;
const model = process.env.RIDGELINE_MODEL;
const messages = [{ role: 'user', content: 'Name three colours.' }];
const city = { type: 'object', properties: { city: { type: 'string', maxLength: 20 } }, required: ['city'] };
const asked = { prompt: 'Name three colours.', maxOutputTokens: 8, maxRetries: 0 };

test('ollama: lists, chats, streams, forms, vectors', async () => {
  const ollama = new Ollama({ host: url });
  assert.ok((await ollama.list()).models.length);
  assert.ok((await ollama.show({ model })).model_info);
  const options = { num_predict: 8, repeat_penalty: 1.1, num_ctx: 2048 };
  assert.ok((await ollama.chat({ model, messages, options })).message.content);
  let text = '';
  for await (const part of await ollama.chat({ model, messages, options, stream: true })) text += part.message.content;
  assert.ok(text);
  assert.ok((await ollama.generate({ model, prompt: 'Hi', options })).response);
  const shaped = await ollama.chat({ model, messages, format: city, options: { num_predict: 60 } });
  assert.deepEqual(Object.keys(JSON.parse(shaped.message.content)), ['city']);
  assert.ok((await ollama.embed({ model, input: 'Hi' })).embeddings[0].length);
});

test('@anthropic-ai/sdk: messages, streams, counts, errors', async () => {
  const client = new Anthropic({ baseURL: url, apiKey: 'x', maxRetries: 0 });
  const ask = { model, max_tokens: 8, messages };
  const first = await client.messages.create({ ...ask, output_config: { effort: 'low' } });
  assert.equal(first.content[0].type, 'text');
  const whole = await client.messages.stream(ask).finalMessage();
  assert.ok(whole.usage.output_tokens);
  const turns = [...messages, { role: 'assistant', content: whole.content }, ...messages];
  assert.ok((await client.messages.create({ ...ask, messages: turns, thinking: { type: 'adaptive' } })).id);
  assert.ok((await client.messages.countTokens({ model, messages })).input_tokens > 3);
  await assert.rejects(client.messages.create({ ...ask, model: 'nope' }), Anthropic.NotFoundError);
});

const providers = {
  '@ai-sdk/openai, responses': () => createOpenAI({ baseURL: `${url}/v1`, apiKey: 'x' })(model),
  '@ai-sdk/openai, chat': () => createOpenAI({ baseURL: `${url}/v1`, apiKey: 'x' }).chat(model),
  '@ai-sdk/anthropic': () => createAnthropic({ baseURL: `${url}/v1`, apiKey: 'x' })(model),
  'ollama-ai-provider-v2': () => createOllama({ baseURL: `${url}/api` })(model),
};
for (const [name, made] of Object.entries(providers)) {
  test(`${name}: text, streams, objects, tools`, async () => {
    const sdk = made();
    assert.ok((await generateText({ ...asked, model: sdk })).text);
    const stream = streamText({ ...asked, model: sdk, onError({ error }) { throw error; } });
    let text = '';
    for await (const part of stream.textStream) text += part;
    assert.ok(text);
    const shaped = await generateObject({ model: sdk, schema: jsonSchema({ ...city, additionalProperties: false }), prompt: 'A city, as JSON', maxOutputTokens: 80, maxRetries: 0 });
    assert.equal(typeof shaped.object.city, 'string');
    const tools = { weather: tool({ description: 'Weather', inputSchema: jsonSchema(city), execute: async () => 'sunny' }) };
    assert.ok(await generateText({ ...asked, model: sdk, tools, maxOutputTokens: 40 }));
  });
}

test('@langchain/openai: turns, streams, typed answers', async () => {
  const chat = new ChatOpenAI({ model, apiKey: 'x', maxTokens: 60, maxRetries: 0, configuration: { baseURL: `${url}/v1` } });
  assert.ok((await chat.invoke('Name three colours.')).content);
  let text = '';
  for await (const part of await chat.stream('Name three colours.')) text += part.content;
  assert.ok(text);
  const typed = await chat.withStructuredOutput({ title: 'Place', ...city, additionalProperties: false }, { method: 'jsonSchema' }).invoke('A city, as JSON');
  assert.equal(typeof typed.city, 'string');
});
