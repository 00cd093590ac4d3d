"use strict";
// Only the cells in view are in the document: a trace has millions. The grid keeps its place while the scroll position
// says which part of the table it shows.
const HEIGHT = 22, HEAD = 24;
const NAN = 1, INF = 2, THERE = 4, NUMBERS = 8;
const STOPS = [[68, 1, 84], [59, 82, 139], [33, 145, 140], [94, 201, 98], [253, 231, 37]];
const PHASES = { forward: "forward", backward: "backward", optimizer: "optimizer step" };

const byId = (id) => document.getElementById(id);
const index = JSON.parse(byId("index").textContent);
const { rows, batches, ranks } = index;
const WIDTH = Math.max(26, 6 + 8 * String(batches[batches.length - 1]).length); // no batch number may be clipped
const grid = byId("grid"), view = byId("window"), space = byId("space"), panel = byId("frame"), status = byId("status");
const state = { shown: [], row: 0, column: 0, picked: null, first: [0, 0], size: [0, 0], pool: [], inside: false };
let values, flags, low = 0, high = 0;

async function unpack(id) {
  const packed = Uint8Array.from(atob(byId(id).textContent.trim()), (letter) => letter.charCodeAt(0));
  return new Response(new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip")));
}

// ---------------------------------------------------------------- values

const at = (row, column) => column * rows.length + row;

function findRange() {
  low = Infinity; high = -Infinity;
  for (let place = 0; place < values.length; place++) {
    const value = values[place];
    if ((flags[place] & NUMBERS) && Number.isFinite(value)) { low = Math.min(low, value); high = Math.max(high, value); }
  }
  if (low > high) { low = 0; high = 1; }
  if (high - low < 1e-6) { low -= 0.5; high += 0.5; }
}

function colour(value) {
  const place = Math.max(0, Math.min(1, (value - low) / (high - low))) * (STOPS.length - 1);
  const stop = Math.min(STOPS.length - 2, Math.floor(place)), share = place - stop;
  return STOPS[stop].map((part, i) => Math.round(part + (STOPS[stop + 1][i] - part) * share));
}

const exponent = (value) => value.toExponential(2).replace(/e([+-])(\d)$/, "e$10$2");
const power = (value) => (value === -Infinity ? "0" : exponent(10 ** value));

function describe(row, column) {
  const place = at(row, column), flag = flags[place];
  const what = `${rows[row].name || "(root)"}, ${rows[row].kind}, ${PHASES[rows[row].phase] || rows[row].phase}, batch ${batches[column]}`;
  if (!(flag & THERE)) return `${what}: not called`;
  const bad = [flag & NAN ? "has nan" : "", flag & INF ? "has inf" : ""].filter(Boolean);
  const size = flag & NUMBERS ? `abs max ${power(values[place])}` : "no numbers";
  return `${what}: ${[...bad, size].join(", ")}`;
}

// ---------------------------------------------------------------- the grid

function element(kind, className, role) {
  const made = document.createElement(kind);
  if (className) made.className = className;
  if (role) made.setAttribute("role", role);
  return made;
}

function named(node, className) {
  node.className = className;
  node.append(document.createElement("bdi"));
  return node;
}

function layOut() {
  const nameWidth = view.parentElement.clientWidth > 700 ? 352 : 176;
  document.documentElement.style.setProperty("--row-name", `${nameWidth}px`);
  const tall = Math.max(1, Math.min(state.shown.length, Math.floor((grid.clientHeight - HEAD) / HEIGHT)));
  const wide = Math.max(1, Math.min(batches.length, Math.floor((grid.clientWidth - nameWidth) / WIDTH)));
  space.style.width = `${nameWidth + batches.length * WIDTH + grid.clientWidth - nameWidth - wide * WIDTH}px`;
  space.style.height = `${HEAD + state.shown.length * HEIGHT + grid.clientHeight - HEAD - tall * HEIGHT}px`;
  if (state.size[0] === tall && state.size[1] === wide && state.pool.length) return;
  state.size = [tall, wide];
  view.textContent = "";
  const head = element("div", "row", "row");
  head.style.height = `${HEAD}px`;
  head.setAttribute("aria-rowindex", "1");
  const corner = named(element("div", "", "columnheader"), "corner");
  corner.firstChild.textContent = "module";
  corner.setAttribute("aria-colindex", "1");
  head.append(corner);
  const heads = Array.from({ length: wide }, () => {
    const made = element("div", "batch", "columnheader");
    made.style.width = `${WIDTH}px`;
    head.append(made);
    return made;
  });
  view.append(head);
  const lines = Array.from({ length: tall }, (_, i) => {
    const line = element("div", "row", "row");
    line.style.top = `${HEAD + i * HEIGHT}px`;
    line.style.height = `${HEIGHT}px`;
    const name = named(element("div", "", "rowheader"), "name");
    name.setAttribute("aria-colindex", "1");
    line.append(name);
    const cells = Array.from({ length: wide }, (_, j) => {
      const cell = element("div", "cell", "gridcell");
      cell.style.width = `${WIDTH}px`;
      cell.style.height = `${HEIGHT}px`;
      cell.style.lineHeight = `${HEIGHT - 2}px`;
      cell.dataset.line = i;
      cell.dataset.column = j;
      line.append(cell);
      return cell;
    });
    view.append(line);
    return { line, name, cells };
  });
  state.pool = { heads, lines, length: tall };
}

function draw() {
  layOut();
  const [tall, wide] = state.size;
  const top = Math.min(Math.round(grid.scrollTop / HEIGHT), Math.max(0, state.shown.length - tall));
  const left = Math.min(Math.round(grid.scrollLeft / WIDTH), Math.max(0, batches.length - wide));
  state.first = [top, left];
  const hadFocus = state.inside;
  state.pool.heads.forEach((head, j) => {
    const number = batches[left + j];
    head.textContent = number === undefined ? "" : String(number);
    head.setAttribute("aria-colindex", String(left + j + 2));
  });
  state.pool.lines.forEach(({ line, name, cells }, i) => {
    const row = state.shown[top + i];
    line.hidden = row === undefined;
    line.style.display = row === undefined ? "none" : "";
    if (row === undefined) return;
    line.setAttribute("aria-rowindex", String(top + i + 2));
    const text = `${rows[row].name || "(root)"} · ${rows[row].kind}${rows[row].phase === "forward" ? "" : ` · ${PHASES[rows[row].phase] || rows[row].phase}`}`;
    name.firstChild.textContent = text;
    name.title = text;
    cells.forEach((cell, j) => paint(cell, row, top + i, left + j));
  });
  grid.tabIndex = activeCell() ? -1 : 0;
  if (hadFocus) (activeCell() || grid).focus({ preventScroll: true });
}

function paint(cell, row, line, column) {
  const place = at(row, column), flag = flags[place], value = values[place];
  const bad = flag & (NAN | INF);
  cell.className = `cell${bad ? " bad" : ""}${flag & THERE ? "" : " empty"}`;
  cell.textContent = flag & NAN ? "N" : flag & INF ? "∞" : flag & THERE ? (flag & NUMBERS ? (value === -Infinity ? "0" : "") : "–") : "";
  if ((flag & NUMBERS) && !bad) {
    const [red, green, blue] = colour(value);
    cell.style.background = `rgb(${red} ${green} ${blue})`;
    cell.style.color = red * 0.3 + green * 0.6 + blue * 0.1 > 120 ? "#000" : "#fff";
  } else { cell.style.background = ""; cell.style.color = ""; }
  const label = describe(row, column);
  cell.setAttribute("aria-label", label);
  cell.title = label;
  cell.setAttribute("aria-colindex", String(column + 2));
  cell.setAttribute("aria-selected", String(state.picked !== null && state.picked[0] === row && state.picked[1] === column));
  cell.tabIndex = line === state.row && column === state.column ? 0 : -1;
}

function activeCell() {
  const line = state.pool.lines && state.pool.lines[state.row - state.first[0]];
  return (line && line.cells[state.column - state.first[1]]) || null;
}

function moveTo(row, column, focus) {
  state.row = Math.max(0, Math.min(state.shown.length - 1, row));
  state.column = Math.max(0, Math.min(batches.length - 1, column));
  const [tall, wide] = state.size;
  const scroll = (first, count, place) => (place < first ? place : place >= first + count ? place - count + 1 : first);
  const top = scroll(state.first[0], tall, state.row), left = scroll(state.first[1], wide, state.column);
  if (top !== state.first[0]) grid.scrollTop = top * HEIGHT;
  if (left !== state.first[1]) grid.scrollLeft = left * WIDTH;
  if (focus) state.inside = true;
  draw();
}

function onKey(event) {
  const page = state.size[0], end = batches.length - 1, last = state.shown.length - 1;
  const jump = event.ctrlKey || event.metaKey;
  const moves = {
    ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1], PageUp: [-page, 0], PageDown: [page, 0],
  };
  if (event.key in moves) moveTo(state.row + moves[event.key][0], state.column + moves[event.key][1], true);
  else if (event.key === "Home") moveTo(jump ? 0 : state.row, 0, true);
  else if (event.key === "End") moveTo(jump ? last : state.row, end, true);
  else if (event.key === "Enter" || event.key === " ") pick(state.shown[state.row], state.column, true);
  else return;
  event.preventDefault();
}

// ---------------------------------------------------------------- the frame

const unpacked = new Map();

async function framesOf(column) {
  if (!unpacked.has(column)) {
    if (unpacked.size >= 8) unpacked.delete(unpacked.keys().next().value);
    unpacked.set(column, unpack(`batch-${column}`).then((found) => found.json()));
  }
  return unpacked.get(column);
}

async function pick(row, column, byKey) {
  if (row === undefined) return;
  state.picked = [row, column];
  draw();
  const found = (await framesOf(column)).filter((frame) => frame[0] === row);
  if (state.picked[0] !== row || state.picked[1] !== column) return; // another was picked in the meantime
  panel.textContent = "";
  const title = document.createElement("h2");
  title.textContent = describe(row, column);
  panel.append(title);
  for (const [, rank, call, stats] of found) panel.append(...frameTable(rank, call, stats, found.length > 1));
  if (!found.length) panel.append(Object.assign(document.createElement("p"), { textContent: "This module was not called in this batch." }));
  panel.hidden = false;
  draw(); // the grid has less room now
  moveTo(state.row, state.column, false);
  status.textContent = `Frame shown: ${title.textContent}`;
  if (byKey) { state.inside = false; panel.focus(); }
}

function frameTable(rank, call, stats, several) {
  const parts = [];
  if (several || ranks.length > 1) {
    parts.push(Object.assign(document.createElement("h3"), { textContent: `rank ${rank}, call ${call}` }));
  }
  const table = document.createElement("table");
  const head = table.createTHead().insertRow();
  for (const text of ["tensor", "abs min", "abs max", "underflow", "dtype", "shape"]) {
    const className = text.startsWith("abs") || text === "underflow" ? "number" : "";
    head.append(Object.assign(document.createElement("th"), { textContent: text, scope: "col", className }));
  }
  const body = table.createTBody();
  for (const [name, dtype, shape, least, most, nans, infs, tiny, note] of stats) {
    const line = body.insertRow();
    if (nans || infs) line.className = "bad";
    line.append(Object.assign(document.createElement("th"), { textContent: name, scope: "row" }));
    const number = (value) => (typeof value === "number" ? exponent(value) : value);
    const bad = [nans ? "nan" : "", infs ? "inf" : ""].filter(Boolean).join(", ");
    const texts = note ? [note, "", ""] : [number(least), number(most) + (bad ? ` (has ${bad})` : ""), tiny === null ? "" : `${(Number(tiny) * 100).toFixed(1)} %`];
    for (const text of texts) Object.assign(line.insertCell(), { textContent: text, className: "number" });
    for (const text of [dtype, `[${shape.join(", ")}]`]) line.insertCell().textContent = note ? "" : text;
  }
  parts.push(table);
  return parts;
}

// ---------------------------------------------------------------- choosing rows

function choose() {
  const text = byId("filter").value.toLowerCase(), phase = byId("phase").value, onlyBad = byId("bad").checked;
  const hasBad = (row) => batches.some((_, column) => flags[at(row, column)] & (NAN | INF));
  state.shown = index.order.filter((row) =>
    (!phase || rows[row].phase === phase) &&
    (!text || rows[row].name.toLowerCase().includes(text) || rows[row].kind.toLowerCase().includes(text)) &&
    (!onlyBad || hasBad(row)));
  state.row = 0;
  grid.scrollTop = 0;
  grid.setAttribute("aria-rowcount", String(state.shown.length + 1));
  byId("none").hidden = state.shown.length > 0;
  status.textContent = `${state.shown.length} of ${rows.length} rows shown`;
  draw();
}

function firstBad() {
  for (let column = 0; column < batches.length; column++) {
    for (let line = 0; line < state.shown.length; line++) {
      if (flags[at(state.shown[line], column)] & (NAN | INF)) { moveTo(line, column, true); return pick(state.shown[line], column, false); }
    }
  }
  status.textContent = "No nan and no inf in these rows.";
}

function legend() {
  byId("scale").style.background = `linear-gradient(90deg, ${STOPS.map((stop) => `rgb(${stop.join(" ")})`).join(", ")})`;
  byId("low").textContent = exponent(10 ** low);
  byId("high").textContent = exponent(10 ** high);
}

async function main() {
  const [numbers, marks] = await Promise.all([unpack("values"), unpack("flags")].map(async (found) => (await found).arrayBuffer()));
  values = new Float32Array(numbers);
  flags = new Uint8Array(marks);
  findRange();
  legend();
  grid.setAttribute("aria-colcount", String(batches.length + 1));
  choose();
  status.textContent = "";
  let waiting = false;
  grid.addEventListener("scroll", () => {
    if (!waiting) { waiting = true; requestAnimationFrame(() => { waiting = false; draw(); }); }
  });
  grid.addEventListener("keydown", onKey);
  grid.addEventListener("focusin", () => { state.inside = true; });
  grid.addEventListener("focusout", (event) => { if (event.relatedTarget && !grid.contains(event.relatedTarget)) state.inside = false; });
  grid.addEventListener("click", (event) => {
    const cell = event.target.closest(".cell");
    if (!cell) return;
    const line = state.first[0] + Number(cell.dataset.line), column = state.first[1] + Number(cell.dataset.column);
    moveTo(line, column, true);
    pick(state.shown[line], column, false);
  });
  panel.addEventListener("keydown", (event) => { if (event.key === "Escape") moveTo(state.row, state.column, true); });
  byId("choice").addEventListener("submit", (event) => event.preventDefault());
  for (const id of ["filter", "phase", "bad"]) byId(id).addEventListener("input", choose);
  byId("first-bad").addEventListener("click", firstBad);
  addEventListener("resize", draw);
  document.body.dataset.ready = "yes";
}

main().catch((error) => {
  byId("none").hidden = false;
  byId("none").textContent = `The page cannot be shown: ${error}. It needs a browser of 2023 or newer.`;
});
