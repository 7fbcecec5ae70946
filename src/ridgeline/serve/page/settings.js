// The settings of a conversation. The fields that choose tokens, their defaults and bounds are the server's.

import { fetchProps } from './api.js';
import { element } from './dom.js';
import { problemOf } from './parts.js';
import { saveSettings, settings } from './store.js';

const NUM_ALWAYS_SHOWN = 4; // the others are folded away until one of them is set
const at = (id) => document.getElementById(id);
let asked = 0; // which opening of the dialog was the last

/** Open the dialog over the settings `chosen`. */
export async function openSettings(chosen) {
  const opening = asked += 1;
  for (const field of at('tune-dialog').querySelectorAll('[name]')) if (!field.closest('#samplers')) fill(field, chosen);
  at('tune-default').checked = false;
  at('tune-problem').textContent = '';
  at('samplers').replaceChildren();
  at('tune-dialog').showModal();
  try {
    const props = await fetchProps(settings.model);
    if (opening === asked) showFields(props, chosen);
  } catch (error) {
    if (opening === asked) at('tune-problem').textContent = `The model's own settings are not known: ${error.message}.`;
  }
}

function showFields(props, chosen) {
  at('thinking').hidden = !props.reasoning;
  const fields = props.sampling_fields;
  const [shown, folded] = [fields.slice(0, NUM_ALWAYS_SHOWN), fields.slice(NUM_ALWAYS_SHOWN)];
  const isSet = folded.some(({ name }) => chosen[name] !== undefined && chosen[name] !== null);
  const limit = props.default_generation_settings.n_ctx.toLocaleString('en');
  at('samplers').replaceChildren(
    element('div', { className: 'pairs' }, ...shown.map(fieldOf)),
    element('p', { className: 'note' }, `Empty fields have the default, shown in grey. Prompt and answer together have at most ${limit} tokens.`),
    element('details', { open: isSet }, element('summary', {}, 'All samplers'),
      element('div', { className: 'pairs' }, ...folded.map(fieldOf))),
  );
  for (const field of at('samplers').querySelectorAll('[name]')) fill(field, chosen);
}

/** Return a field with its label: as the server describes it. */
function fieldOf({ name, type, minimum, exclusiveMinimum, maximum, default: usual, description }) {
  const words = name.replaceAll('_', ' ');
  const isList = type === 'array';
  const given = isList ? JSON.stringify(usual) : usual;
  const field = element('input', {
    name, type: isList ? 'text' : 'number', spellcheck: false, placeholder: given ?? 'none', title: description, 'data-type': type,
  });
  if (!isList) {
    field.step = type === 'integer' ? 1 : 'any';
    field.min = minimum ?? exclusiveMinimum ?? '';
    field.max = maximum ?? '';
  }
  return element('label', { title: description }, `${words[0].toUpperCase()}${words.slice(1)}`, field,
    element('span', { className: 'problem', role: 'alert' }));
}

const isListField = (field) => field.dataset.type === 'array';

function fill(field, chosen) {
  const value = chosen[field.name];
  field.value = isListField(field) && Array.isArray(value) ? JSON.stringify(value) : value ?? '';
  check(field);
  field.oninput = () => check(field);
}

/** Say what is wrong with a field; Done waits until nothing is. */
function check(field) {
  const problem = problemOf(isListField(field) ? 'list' : field.name, field.value);
  field.setCustomValidity(problem);
  const note = field.parentElement.querySelector('.problem');
  if (note) note.textContent = problem;
}

/** Return `chosen` with what was entered; Done has checked it. */
export function entered(chosen) {
  const changed = { ...chosen };
  for (const field of at('tune-dialog').querySelectorAll('[name]')) changed[field.name] = valueOf(field);
  if (at('tune-default').checked) {
    Object.assign(settings, changed);
    saveSettings();
  }
  return changed;
}

function valueOf(field) {
  const text = field.value.trim();
  if (field.type === 'number') return Number.isNaN(field.valueAsNumber) ? null : field.valueAsNumber;
  return isListField(field) ? (text ? JSON.parse(text) : null) : text;
}
