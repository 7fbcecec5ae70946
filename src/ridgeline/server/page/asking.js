// What is sent to the server for an answer, and in words what went wrong with it.

import { fetchModels } from './api.js';
import { canLeaveOut, toApi } from './conversation.js';
import { settings as ofPage } from './store.js';

/** Return the body of a request for an answer to messages, under a conversation's settings. */
export function request(settings, messages) {
  const body = { messages: messages.flatMap(toApi) };
  if (ofPage.model) body.model = ofPage.model;
  if (settings.tools) body.tools = JSON.parse(settings.tools);
  if (settings.schema) {
    const schema = JSON.parse(settings.schema);
    body.response_format = { type: 'json_schema', json_schema: { name: 'answer', schema } };
  }
  if (settings.system) body.messages.unshift({ role: 'system', content: settings.system });
  for (const name of ['temperature', 'top_p', 'max_tokens', 'seed']) {
    if (typeof settings[name] === 'number') body[name] = settings[name];
  }
  return body;
}

const ADVICE = { // by an error's code
  unreachable: 'The server cannot be reached. Check that it runs, then choose “Answer again”.',
  lost: 'The connection to the server was lost before the answer was complete. Check that the server runs, then choose “Answer again”.',
};

/** Return {error, isTooLong}: what went wrong, what can be done, and whether sending less can help. */
export async function explain({ message, code }, conversation) {
  const models = code === 'context_length_exceeded' ? await fetchModels().catch(() => []) : [];
  const model = models.find((one) => one.id === ofPage.model) ?? models[0];
  return model ? tooLong(conversation, model) : { error: ADVICE[code] ?? message };
}

const number = (value) => Math.round(value).toLocaleString('en');

function tooLong(conversation, model) {
  const contextTokens = model.max_model_len;
  const limit = `the model takes ${number(contextTokens)} tokens (about ${number(0.75 * contextTokens)} words), question and answer together`;
  if (canLeaveOut(conversation)) return { error: `This conversation has become too long: ${limit}.`, isTooLong: true };
  return { error: `This message is too long: ${limit}. Send a shorter one.` };
}
