// Drawings on canvases, in the colours of the style sheet. It knows no server.

function prepare(canvas) {
  const ratio = window.devicePixelRatio || 1;
  const { clientWidth: width, clientHeight: height } = canvas;
  if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
  }
  const pen = canvas.getContext('2d');
  pen.setTransform(ratio, 0, 0, ratio, 0, 0);
  pen.clearRect(0, 0, width, height);
  const style = getComputedStyle(canvas);
  return { pen, width, height, colour: (name) => style.getPropertyValue(`--${name}`) };
}

/** Draw values as a line over a soft area; where there is no value the line stays level. */
export function drawLine(canvas, values) {
  const { pen, width, height, colour } = prepare(canvas);
  const top = Math.max(...values, 1e-9) * 1.1;
  const y = (value) => height - 1 - (value / top) * (height - 3);
  let last = 0;
  pen.beginPath();
  values.forEach((value, i) => {
    last = value ?? last;
    pen.lineTo((i * width) / (values.length - 1), y(last));
  });
  pen.strokeStyle = colour('accent');
  pen.lineWidth = 1.5;
  pen.lineJoin = 'round';
  pen.stroke();
  pen.lineTo(width, height);
  pen.lineTo(0, height);
  pen.fillStyle = colour('wash');
  pen.fill();
}

/** Draw steps as bars: prompt tokens up, generated ones down, each on a scale of its own. */
export function drawSteps(canvas, steps, note) {
  const { pen, width, height, colour } = prepare(canvas);
  const shown = steps.slice(-Math.floor(width / 4));
  const most = [1, 2].map((i) => Math.max(0, ...shown.map((step) => step[i])));
  const middle = Math.round(height * 0.55);
  const left = width - shown.length * 4;
  shown.forEach(([, prompt, generated], i) => {
    const up = prompt && Math.max(2, (prompt / most[0]) * (middle - 2));
    const down = generated && Math.max(2, (generated / most[1]) * (height - middle - 2));
    pen.fillStyle = colour('used');
    pen.fillRect(left + i * 4, middle - up, 3, up);
    pen.fillStyle = colour('accent');
    pen.fillRect(left + i * 4, middle + 1, 3, down);
  });
  pen.fillStyle = colour('line');
  pen.fillRect(0, middle, width, 1);
  note.textContent = `up to ${most[0].toLocaleString('en')} of prompts, ${most[1].toLocaleString('en')} of answers`;
}

const MOST = 3; // times as long, at the upper edge; a third at the lower

/** Draw steps as dots: on the line what took as long as foreseen, above it what took longer. */
export function drawForeseen(canvas, steps) {
  const { pen, width, height, colour } = prepare(canvas);
  const middle = Math.round(height / 2);
  pen.fillStyle = colour('line');
  pen.fillRect(0, middle, width, 1);
  const shown = steps.slice(-Math.floor(width / 4));
  const left = width - shown.length * 4;
  pen.fillStyle = colour('accent');
  shown.forEach(([took, , , foreseen], i) => {
    if (!foreseen) return;
    const off = Math.max(-1, Math.min(1, Math.log(took / foreseen) / Math.log(MOST)));
    pen.beginPath();
    pen.arc(left + i * 4 + 1.5, middle - off * (middle - 2), 1.5, 0, 2 * Math.PI);
    pen.fill();
  });
}

const MAX_CELLS = 1600;
const NAMES = { f: 'free', c: 'cached', u: 'used', s: 'shared' };

/** Turn runs such as `s2u1f9` into a list of [name, count]. */
export const readBlocks = (runs) => [...runs.matchAll(/([fcus])(\d+)/g)].map(([, kind, count]) => [NAMES[kind], Number(count)]);

/** Draw a map of blocks, without the free ones at its end; several share a cell if need be. */
export function drawBlocks(canvas, runs) {
  const counts = { free: 0, cached: 0, used: 0, shared: 0 };
  for (const [name, count] of runs) counts[name] += count;
  const total = runs.reduce((sum, [, count]) => sum + count, 0);
  const touched = total - (runs.at(-1)[0] === 'free' ? runs.at(-1)[1] : 0);
  let shown = 256;
  while (shown < touched) shown *= 2;
  shown = Math.min(shown, total);

  let group = 1; // blocks of a cell
  while (shown / group > MAX_CELLS) group *= 2;
  const columns = shown / group > 512 ? 64 : 32;
  const pitch = canvas.clientWidth / columns;
  canvas.style.height = `${Math.ceil(Math.ceil(shown / group / columns) * pitch)}px`;
  const { pen, colour } = prepare(canvas);
  const cells = Array.from({ length: Math.ceil(shown / group) }, () => ({ free: 0, cached: 0, used: 0, shared: 0 }));
  let block = 0;
  for (const [name, count] of runs) {
    for (let end = Math.min(block + count, shown); block < end; block += 1) cells[Math.floor(block / group)][name] += 1;
  }
  const ratio = window.devicePixelRatio || 1;
  const edge = (i) => Math.round(i * pitch * ratio) / ratio; // on a pixel of the screen
  const inner = Math.floor(pitch) - (pitch > 8 ? 2 : 1);
  cells.forEach((cell, i) => {
    let x = edge(i % columns);
    const y = edge(Math.floor(i / columns));
    for (const name of ['shared', 'used', 'cached', 'free']) {
      const part = (inner * cell[name]) / group;
      pen.fillStyle = colour(name);
      if (part) pen.fillRect(x, y, part, inner);
      x += part;
    }
  });
  return { counts, shown, total };
}
