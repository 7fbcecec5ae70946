// Small pieces of page. Text is always text: nothing here, or anywhere, parses HTML.

/** Return an element with properties and children; strings become text. */
export function element(name, properties = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(properties)) {
    if (key.includes('-') || key === 'role') made.setAttribute(key, value);
    else made[key] = value;
  }
  made.append(...children);
  return made;
}

/** Return the size of a model for people, as commands say it. */
export const decimalSize = (bytes) => (bytes < 999.5e6 ? `${(bytes / 1e6).toFixed(0)} MB` : `${(bytes / 1e9).toFixed(2)} GB`);

export function icon(name) {
  const space = 'http://www.w3.org/2000/svg';
  const svg = document.createElementNS(space, 'svg');
  const use = document.createElementNS(space, 'use');
  use.setAttribute('href', `#i-${name}`);
  svg.setAttribute('aria-hidden', 'true');
  svg.append(use);
  return svg;
}

/** Return a button that shows an icon and is called something. */
export function iconButton(name, label, onclick) {
  return element('button', { type: 'button', className: 'icon', title: label, 'aria-label': label, onclick }, icon(name));
}

/** Return a button that copies what `text` returns. */
export function copyButton(text, label = 'Copy') {
  const button = iconButton('copy', label, async () => {
    const done = await copy(text());
    button.replaceChildren(icon(done ? 'done' : 'copy'));
    setTimeout(() => button.replaceChildren(icon('copy')), 1200);
  });
  return button;
}

async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch { // no clipboard without HTTPS: the old way
    const area = element('textarea', { value: text, className: 'away' });
    document.body.append(area);
    area.select();
    const done = document.execCommand('copy');
    area.remove();
    return done;
  }
}
