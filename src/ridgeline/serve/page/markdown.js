// Markdown, as models write it, into DOM nodes. The text may be hostile: every node is made here by
// name, everything else is text, links go to http(s) only, and each pattern has a bounded length.

import { colour } from './colours.js';
import { copyButton, element } from './dom.js';
import { formula } from './math.js';

const MAX_DEPTH = 6; // of lists and quotes inside each other
const MAX_FORMULA_LINES = 60;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])\s+(.*)$/;
const FENCE = /^ {0,3}(`{3,}|~{3,})([^`]*)$/;
const FORMULA = /^ {0,3}(\\\[|\$\$)/;
const TASK = /^\[([ xX])\]\s+/;
const HEADING = /^(#{1,6})\s+(.*)$/;
const RULE = /^ {0,3}([-*_])(?:\s*\1){2,}\s*$/;
const DIVIDER = /^(?=.{2,500}$)[ \t]*\|?[ \t]*:?-+:?[ \t]*(?:\|[ \t]*:?-+:?[ \t]*)*\|?[ \t]*$/;
const INLINE = new RegExp([
  '(`{1,2})(?!`)(?<code>.{1,2000}?[^`]|[^`])\\1(?!`)',
  '\\*\\*(?=\\S)(?<strong>[^\\n]{1,2000}?)\\*\\*',
  '\\*(?=[^\\s*])(?<em>[^*\\n]{1,1000})\\*',
  '(?<!\\w)_(?=[^\\s_])(?<em2>[^_\\n]{1,1000})_(?!\\w)',
  '~~(?<del>[^~\\n]{1,1000})~~',
  '\\[(?<label>[^\\]\\n]{1,500})\\]\\((?<target>[^)\\s]{1,2000})\\)',
  '(?<url>https?://[^\\s<>"\'`]{1,2000}[^\\s<>"\'`.,;:!?)\\]])',
  '(?<math>\\\\\\([^\\n]{1,1000}?\\\\\\)|\\\\\\[[^]{1,2000}?\\\\\\]|\\$\\$[^$]{1,2000}\\$\\$'
    // One dollar on each side: not of prices and variables, whose dollars are followed or preceded by other signs.
    + '|(?<![\\w$])\\$(?=[^\\s$])(?:[^$\\\\\\n]|\\\\.){1,500}(?<=\\S)\\$(?![\\w$]))',
  '\\\\(?<plain>[\\\\`*_{}\\[\\]()#+.!~|>$-])',
].join('|'), 'g');

/** Show `text` in `container`; blocks that did not change stay as they are. */
export function render(container, text) {
  const before = container.blocks ?? [];
  const blocks = split(text.replace(/\r\n?/g, '\n').split('\n'), 0);
  blocks.forEach((block, i) => {
    if (before[i]?.source === block.source && before[i].kind === block.kind) {
      block.node = before[i].node;
      return;
    }
    block.node = block.make();
    if (before[i]) before[i].node.replaceWith(block.node);
    else container.append(block.node);
  });
  before.slice(blocks.length).forEach((block) => block.node.remove());
  container.blocks = blocks;
}

/** Cut lines into blocks, each with its kind, source and how to make its node. */
function split(lines, depth) {
  const blocks = [];
  let at = 0;
  const take = (kind, end, make) => {
    const part = lines.slice(at, end);
    blocks.push({ kind, source: part.join('\n'), make: () => make(part) });
    at = end;
  };
  const until = (test) => {
    let end = at + 1;
    while (end < lines.length && !test(lines[end], end)) end += 1;
    return end;
  };
  while (at < lines.length) {
    const line = lines[at];
    const fence = FENCE.exec(line);
    const formulaEnd = FORMULA.test(line) ? endOfFormula(lines, at) : 0;
    if (!line.trim()) at += 1;
    else if (fence) {
      const closes = (other) => other.trim().startsWith(fence[1]) && !other.trim().slice(fence[1].length).trim();
      const end = until(closes);
      const isClosed = end < lines.length;
      take('code', Math.min(end + 1, lines.length), (part) => (
        code(part.slice(1, isClosed ? -1 : undefined).join('\n'), fence[2].trim().slice(0, 30), isClosed)));
    } else if (formulaEnd) take('formula', formulaEnd, (part) => {
      const source = part.join('\n').trim();
      return element('p', {}, formula(source, source.slice(2, -2), true));
    });
    else if (HEADING.test(line)) take('heading', at + 1, heading);
    else if (RULE.test(line)) take('rule', at + 1, () => element('hr'));
    else if (depth < MAX_DEPTH && line.startsWith('>')) {
      take('quote', until((other) => !other.startsWith('>')), (part) => quote(part, depth));
    } else if (depth < MAX_DEPTH && ITEM.test(line)) {
      take('list', until((other, i) => endsList(line, other.trim() ? other : lines[i + 1] ?? '')), (part) => list(part, depth));
    } else if (line.includes('|') && DIVIDER.test(lines[at + 1] ?? '')) {
      take('table', until((other) => !other.includes('|')), table);
    } else take('text', until((other) => starts(other, depth)), (part) => element('p', {}, ...inline(part.join('\n'))));
  }
  return blocks;
}

/** Return where the formula ends that begins with a line: behind its last line; 0 if other text follows, or no end. */
function endOfFormula(lines, at) {
  const [opening] = lines[at].trim().match(/^../);
  const closing = opening === '$$' ? opening : '\\]';
  for (let end = at; end < Math.min(lines.length, at + MAX_FORMULA_LINES); end += 1) {
    const text = end === at ? lines[at].trim().slice(2) : lines[end];
    if (text.includes(closing)) return text.trim().indexOf(closing) === text.trim().length - 2 ? end + 1 : 0;
  }
  return 0;
}

const starts = (line, depth) => !line.trim() || FENCE.test(line) || FORMULA.test(line) || HEADING.test(line) || RULE.test(line)
  || (depth < MAX_DEPTH && (line.startsWith('>') || ITEM.test(line)));

const indentOf = (line) => line.length - line.trimStart().length;
const isNumbered = (item) => /\d/.test(item[2]);

/** Whether `line` no longer belongs to the list that begins with the line `first`. */
function endsList(first, line) {
  const item = ITEM.exec(line);
  if (!item) return !/^\s{2,}\S/.test(line);
  const isNested = item[1].length > indentOf(first) + 1;
  return !isNested && isNumbered(item) !== isNumbered(ITEM.exec(first));
}

const nodes = (lines, depth) => split(lines, depth).map((block) => block.make());

/** Return code, coloured once it is complete. */
function code(text, language, isClosed) {
  const shown = element('code', {}, text);
  if (isClosed) colour(shown, text, language.split(/[\s{]/)[0].toLowerCase());
  const bar = element('div', { className: 'bar' }, element('span', {}, language), copyButton(() => text, 'Copy code'));
  return element('div', { className: 'code' }, bar, element('pre', { tabIndex: 0 }, shown));
}

function heading([line]) {
  const [, marks, text] = HEADING.exec(line);
  return element(`h${Math.min(6, marks.length + 2)}`, {}, ...inline(text));
}

const quote = (lines, depth) => element('blockquote', {}, ...nodes(lines.map((line) => line.replace(/^> ?/, '')), depth + 1));

function list(lines, depth) {
  const top = indentOf(lines[0]);
  const items = []; // the lines of each
  for (const line of lines) {
    const match = ITEM.exec(line);
    if (match && match[1].length <= top + 1) items.push([match[3]]);
    else items.at(-1).push(line);
  }
  const first = ITEM.exec(lines[0]);
  const made = isNumbered(first) ? element('ol', { start: parseInt(first[2], 10) }) : element('ul');
  made.append(...items.map((item) => listItem(item, depth)));
  return made;
}

function listItem([first, ...rest], depth) {
  const task = TASK.exec(first);
  const made = element('li', { className: task ? 'task' : '' });
  if (task) made.append(box(task[1] !== ' '));
  // What is below an item keeps its indents, less the smallest: deeper levels stay deeper.
  const indent = Math.min(...rest.filter((line) => line.trim()).map(indentOf));
  made.append(...inline(task ? first.slice(task[0].length) : first));
  made.append(...nodes(rest.map((line) => line.slice(indent)), depth + 1));
  return made;
}

const box = (isDone) => element('span', {
  className: isDone ? 'box done' : 'box', role: 'img', 'aria-label': isDone ? 'Done' : 'To do',
});

function table([head, divider, ...rows]) {
  const cells = (line) => line.trim().replace(/^\||\|$/g, '').split('|').map((cell) => cell.trim());
  const sides = cells(divider).map((cell) => (cell.endsWith(':') ? (cell.startsWith(':') ? 'center' : 'right') : ''));
  const row = (line, kind) => element('tr', {}, ...cells(line).map((cell, i) => (
    element(kind, { className: sides[i] ?? '' }, ...inline(cell)))));
  return element('div', { className: 'wide' }, element('table', {},
    element('thead', {}, row(head, 'th')), element('tbody', {}, ...rows.map((line) => row(line, 'td')))));
}

/** Return nodes for a piece of running text. */
function inline(text, depth = 0) {
  const made = [];
  let end = 0;
  for (const match of depth < MAX_DEPTH ? text.matchAll(INLINE) : []) {
    const groups = match.groups;
    made.push(text.slice(end, match.index), styled(groups, depth + 1) ?? match[0]);
    end = match.index + match[0].length;
  }
  return [...made, text.slice(end)].filter((node) => node !== '');
}

function styled(groups, depth) {
  if (groups.code !== undefined) return element('code', {}, groups.code);
  if (groups.strong !== undefined) return element('strong', {}, ...inline(groups.strong, depth));
  const em = groups.em ?? groups.em2;
  if (em !== undefined) return element('em', {}, ...inline(em, depth));
  if (groups.del !== undefined) return element('del', {}, ...inline(groups.del, depth));
  if (groups.label !== undefined) return link(groups.target, groups.label);
  if (groups.math !== undefined) return ofDelimiters(groups.math);
  return groups.url ? link(groups.url, groups.url) : groups.plain;
}

/** Return a formula, by the signs around it; those inside are not Markdown's. */
function ofDelimiters(source) {
  const isDisplayed = /^(\$\$|\\\[)/.test(source);
  const width = isDisplayed || source.startsWith('\\') ? 2 : 1;
  return formula(source, source.slice(width, -width), isDisplayed);
}

/** Return a link, or null unless it goes to http(s). */
function link(target, label) {
  if (!/^https?:\/\//i.test(target) || !URL.canParse(target)) return null;
  return element('a', { href: target, target: '_blank', rel: 'noopener noreferrer' }, label);
}
