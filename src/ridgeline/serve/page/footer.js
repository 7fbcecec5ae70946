// What stands below a message: what can be done with it, which model answered, and how it ended.
// It knows one message; what is done is said by who shows it.

import { canGoOn, canLeaveOut, keyOf, shownMessages, versionsOf } from './conversation.js';
import { copyButton, element, iconButton } from './dom.js';
import { explain } from './explain.js';
import { canRead } from './tokens.js';

const action = (label, onclick) => element('button', { type: 'button', className: 'action', onclick }, label);

/**
 * Return what stands below a message of a conversation. `acts` has edit, answer, goOn, leaveOut,
 * choose and tokens; without them, while an answer grows, nothing can be done. `failure` is what went wrong.
 */
export function footerOf(message, conversation, acts, failure) {
  const parts = message.content ? [copyButton(() => message.content)] : [];
  if (message.role !== 'assistant') {
    if (acts) parts.push(iconButton('rename', 'Edit', () => acts.edit(message)));
    return [...parts, ...versionSteps(message, conversation, acts)];
  }
  const last = shownMessages(conversation).at(-1);
  const isLast = last && keyOf(last) === keyOf(message);
  if (acts) parts.push(iconButton('again', 'Answer again', () => acts.answer(message)));
  parts.push(...versionSteps(message, conversation, acts));
  const told = element('span', { className: 'told' }, element('span', { className: 'facts' }, factsOf(message).join('  ·  ')));
  const request = (message.requests ?? []).findLast(({ id }) => id);
  if (request) {
    const why = () => explain(request.id, request.model);
    told.append(' ', element('button', { type: 'button', className: 'why', onclick: why }, 'Why so slow?'));
  }
  if (acts && canRead(message)) {
    told.append(' ', element('button', { type: 'button', className: 'why', onclick: () => acts.tokens(message) }, 'How sure?'));
  }
  parts.push(told);
  const { error, isTooLong } = failure ?? message;
  if (error) parts.push(element('span', { className: 'problem', role: 'alert' }, error));
  if (acts && isLast && canGoOn(message)) parts.push(action('Continue', () => acts.goOn(message)));
  if (acts && isLast && isTooLong && canLeaveOut(conversation)) parts.push(action('Leave out the oldest messages', acts.leaveOut));
  return parts;
}

/** Return buttons that step through the versions of a message, if there are several. */
function versionSteps(message, conversation, acts) {
  const versions = versionsOf(conversation, message);
  const i = versions.indexOf(message);
  if (versions.length < 2 || !acts) return [];
  const name = message.role === 'user' ? 'question' : 'answer';
  const step = (picture, label, other) => {
    const button = iconButton(picture, label, () => acts.choose(other, label));
    button.disabled = !other;
    return button;
  };
  return [
    step('earlier', `Earlier ${name}`, versions[i - 1]),
    element('span', { className: 'version' }, `${i + 1} / ${versions.length}`),
    step('later', `Later ${name}`, versions[i + 1]),
  ];
}

function factsOf({ usage, timings, reason, error, requests, isFull, capped, ignored }) {
  const facts = [...new Set((requests ?? []).map(({ model }) => model).filter(Boolean))];
  if (usage) facts.push(`${usage.prompt_tokens} + ${usage.completion_tokens} tokens`);
  if (usage?.prompt_tokens_details?.cached_tokens) facts.push(`${usage.prompt_tokens_details.cached_tokens} cached`);
  if (timings?.mean_itl_ms) facts.push(`${(1000 / timings.mean_itl_ms).toFixed(1)} tokens/s`);
  if (timings?.time_to_first_token_ms) facts.push(`first after ${seconds(timings.time_to_first_token_ms)}`);
  if (reason === 'length') facts.push(isFull ? 'cut: the context is full' : 'cut at max tokens');
  if (reason === 'stopped') facts.push('stopped');
  if (!reason && !error) facts.push('not complete'); // the page was left, or another tab still writes it
  if (capped) facts.push(`limit lowered to what fits: ${capped.replace('->', '→')}`);
  if (ignored) facts.push(`ignored: ${ignored}`);
  return facts;
}

const seconds = (ms) => (ms < 1000 ? `${ms.toFixed(0)} ms` : `${(ms / 1000).toFixed(1)} s`);
