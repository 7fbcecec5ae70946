// What is sent to the server for an answer, and in words what went wrong with it.

import { fetchModels } from './api.js';
import { canLeaveOut, toApi } from './conversation.js';
import { settings as ofPage } from './store.js';

/** Return those of a conversation's settings that choose tokens, by the server's names for them, in the alphabet's order. */
export function samplingOf({ system, tools, schema, thinking, model, ...others }) {
  const isSet = (value) => typeof value === 'number' || Array.isArray(value);
  return Object.fromEntries(Object.entries(others).filter(([, value]) => isSet(value)).sort());
}

/** Return the body of a request for an answer to messages, or to go on with the last, under a conversation's settings. */
export function request(settings, messages, goesOn = false) {
  const body = { ...samplingOf(settings), messages: messages.flatMap(toApi) };
  if (ofPage.model) body.model = ofPage.model;
  if (settings.tools) body.tools = JSON.parse(settings.tools);
  if (settings.schema) {
    const schema = JSON.parse(settings.schema);
    body.response_format = { type: 'json_schema', json_schema: { name: 'answer', schema } };
  }
  if (settings.thinking) body.enable_thinking = settings.thinking === 'on';
  if (settings.system) body.messages.unshift({ role: 'system', content: settings.system });
  if (goesOn) body.continue_final_message = true;
  return body;
}

const ADVICE = { // by an error's code
  unreachable: 'The server cannot be reached. Check that it runs, then choose “Answer again”.',
  lost: 'The connection to the server was lost before the answer was complete. Check that the server runs, then choose “Answer again”.',
};

/** Return {error, isTooLong, isFull}: what went wrong, what can be done, and whether sending less can help. */
export async function explain({ message, code }, conversation) {
  const models = code === 'context_length_exceeded' ? await fetchModels().catch(() => []) : [];
  const model = models.find((one) => one.id === ofPage.model) ?? models[0];
  return model ? tooLong(conversation, model) : { error: ADVICE[code] ?? message };
}

const number = (value) => Math.round(value).toLocaleString('en');

function tooLong(conversation, model) {
  const contextTokens = model.max_model_len;
  const limit = `the model takes ${number(contextTokens)} tokens (about ${number(0.75 * contextTokens)} words), question and answer together`;
  const isFull = true;
  if (canLeaveOut(conversation)) return { error: `This conversation has become too long: ${limit}.`, isTooLong: true, isFull };
  return { error: `This message is too long: ${limit}. Send a shorter one.`, isFull };
}
