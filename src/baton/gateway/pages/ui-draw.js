"use strict";
// What is drawn: figures, instances, the map of KV blocks, rows of requests, a waterfall.  Nothing here asks the server.
const $ = (id) => document.getElementById(id);
const SVG = "http://www.w3.org/2000/svg";
const number = (value) => Number(value).toLocaleString("en");

function element(name, text, className) {
  const made = document.createElement(name);
  if (text !== undefined) made.textContent = text;
  if (className) made.className = className;
  return made;
}

function shape(name, attributes, text) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

function write(place, text) { if (place.textContent !== text) place.textContent = text; }

function colour(name) { return getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim(); }

function used(one) { return one.num_blocks ? 1 - (one.free_blocks ?? one.num_blocks) / one.num_blocks : 0; }

function drawFigures(now, rates) {
  const sum = (key) => now.instances.reduce((total, one) => total + (one[key] || 0), 0);
  const blocks = sum("num_blocks");
  const figures = {
    "Requests open": number(now.open), "Running": number(sum("running")), "Waiting": number(sum("waiting")),
    "Tokens/s": rates ? number(Math.round(rates.generated)) : "–",
    "Prompt tokens/s": rates ? number(Math.round(rates.prompt)) : "–",
    "KV in use": blocks ? (100 * (1 - sum("free_blocks") / blocks)).toFixed(1) + " %" : "–",
    "Handed over": number(now.totals.handed_over), "Went on after a loss": number(now.totals.continued),
    "Sequences ended": number(now.totals.ended),
  };
  const list = $("figures");
  if (list.childElementCount !== Object.keys(figures).length) {
    list.replaceChildren(...Object.keys(figures).map((name) => {
      const pair = element("div");
      pair.append(element("dt", name), element("dd"));
      return pair;
    }));
  }
  Object.values(figures).forEach((value, index) => write(list.children[index].lastElementChild, value));
}

function state(one) {
  if (one.paused) return "paused";
  if (one.draining) return one.drained ? "drained" : "draining";
  return one.state;
}

// Rows stay the same elements, so that the keyboard's focus stays where it is.
const CELLS = ["name", "label", "state", "running", "waiting", "kv", "orders"];

function instanceRow(name, order) {
  const row = element("tr");
  row.dataset.name = name;
  for (const cell of CELLS) row.append(element("td", undefined, cell));
  const label = element("select"), drain = element("button"), meter = element("span", undefined, "meter");
  label.setAttribute("aria-label", "Label of " + name);
  label.append(...["mixed", "prefill", "decode"].map((one) => new Option(one, one)));
  label.addEventListener("change", () => order(name, { label: label.value }));
  drain.addEventListener("click", () => order(name, { state: drain.dataset.draining ? "active" : "draining" }));
  for (const [key, value] of [["role", "meter"], ["aria-label", "KV in use"], ["aria-valuemin", 0], ["aria-valuemax", 100]]) {
    meter.setAttribute(key, value);
  }
  meter.append(element("i"));
  row.cells[0].textContent = name;
  row.cells[1].append(label);
  row.cells[3].dataset.of = "Running";
  row.cells[4].dataset.of = "Waiting";
  row.cells[5].append(meter, element("span"));
  row.cells[6].append(drain);
  return row;
}

function drawInstances(instances, order) {
  const table = $("instances"), there = new Map([...table.children].map((row) => [row.dataset.name, row]));
  $("alone").hidden = instances.length > 0;
  for (const one of instances) {
    let row = there.get(one.name);
    if (!row) table.append(row = instanceRow(one.name, order));
    there.delete(one.name);
    const [, labels, standing, running, waiting, kv, orders] = row.cells;
    if (document.activeElement !== labels.firstChild) labels.firstChild.value = one.label;
    write(standing, state(one) + (one.restarts ? `, ${one.restarts} restart${one.restarts > 1 ? "s" : ""}` : ""));
    standing.className = "state " + (state(one) === "ready" ? "good" : "bad");
    standing.title = one.failure || one.detail || "";
    write(running, number(one.running || 0));
    write(waiting, number(one.waiting || 0));
    running.className = "running n";
    waiting.className = "waiting n";
    const percent = (100 * used(one)).toFixed(1);
    kv.firstChild.setAttribute("aria-valuenow", percent);
    kv.firstChild.firstChild.style.width = percent + "%";
    write(kv.lastChild, ` ${percent} %`);
    write(orders.firstChild, one.draining ? "Use again" : "Drain");
    orders.firstChild.setAttribute("aria-label", (one.draining ? "Use again: " : "Drain ") + one.name);
    orders.firstChild.dataset.draining = one.draining ? "1" : "";
  }
  for (const gone of there.values()) gone.remove();
}

// -- the map: one cell a block, or a share of them where there are more than fit; blocks of an owner side by side.
const map = { parts: [], total: 0, cells: 0, columns: 1, side: 8, at: -1 };

function partsOf(ledger) {
  const parts = [];
  const own = (kind, owners) => Object.entries(owners || {}).forEach(([owner, count]) =>
    parts.push({ kind, owner, count }));
  own("held", ledger.held_by);
  own("exported", ledger.exported_by);
  own("reserved", ledger.reserved_by);
  const shared = parts.reduce((sum, part) => sum + (part.kind === "held" ? part.count : 0), 0) - ledger.held;
  parts.push({ kind: "cached", owner: "the prefix cache", count: ledger.cached },
    { kind: "free", owner: "nobody", count: ledger.free });
  return { parts: parts.filter((part) => part.count > 0), shared: Math.max(0, shared) };
}

function drawMap(ledger) {
  if (ledger) Object.assign(map, partsOf(ledger), { counts: ledger });
  if (!map.counts) return;
  const canvas = $("map"), ratio = window.devicePixelRatio || 1;
  const width = canvas.clientWidth, height = canvas.clientHeight;
  canvas.width = width * ratio; canvas.height = height * ratio;
  const pen = canvas.getContext("2d");
  pen.scale(ratio, ratio);
  map.total = map.parts.reduce((sum, part) => sum + part.count, 0);
  map.side = Math.max(4, Math.min(40, Math.floor(Math.sqrt(width * height / Math.max(map.total, 1)))));
  map.columns = Math.max(1, Math.floor(width / map.side));
  map.cells = Math.min(map.total, map.columns * Math.floor(height / map.side));
  const gap = map.side > 5 ? 1 : 0.5;
  let cell = 0, before = 0;
  map.parts.forEach((part, index) => {
    part.first = cell;
    before += part.count;
    const end = Math.round(before / map.total * map.cells);
    pen.fillStyle = colour(part.kind);
    pen.globalAlpha = map.at < 0 || map.at === index ? (index % 2 && part.kind === "held" ? 0.75 : 1) : 0.35;
    for (; cell < end; cell++) {
      pen.fillRect(cell % map.columns * map.side, Math.floor(cell / map.columns) * map.side,
        map.side - gap, map.side - gap);
    }
    part.end = cell;
  });
  const kinds = ["held", "exported", "reserved", "cached", "free"];
  $("legend").replaceChildren(...kinds.map((kind) => {
    const item = element("li"), mark = shape("svg", { width: 12, height: 12 });
    mark.append(shape("rect", { width: 12, height: 12, rx: 2, fill: colour(kind) }));
    item.append(mark, ` ${kind} ${number(map.counts[kind])}`);
    return item;
  }));
}

const HINT = "point at a block to see whose it is";

// `trouble`: instead of the hint.
function tell(index, trouble) {
  map.at = index;
  const part = map.parts[index];
  write($("owner"), part ? `${part.kind}: ${number(part.count)} block${part.count > 1 ? "s" : ""}, ${part.owner}`
    : trouble || HINT);
  drawMap();
}

for (const kind of ["pointermove", "pointerdown"]) $("map").addEventListener(kind, (event) => {
  const cell = Math.floor(event.offsetY / map.side) * map.columns + Math.floor(event.offsetX / map.side);
  const found = map.parts.findIndex((part) => part.first <= cell && cell < part.end);
  if (found !== map.at) tell(found);
});
$("map").addEventListener("pointerleave", () => tell(-1));
$("map").addEventListener("keydown", (event) => {
  const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
  if (!step || !map.parts.length) return;
  event.preventDefault();
  tell((Math.max(map.at, step > 0 ? -1 : 0) + step + map.parts.length) % map.parts.length);
});

// -- rows of requests: only those in sight are elements.
const HEIGHT = 24;
const rows = { all: [], found: [], now: 0 };

function drawRows() {
  const wanted = $("find").value.trim().toLowerCase(), none = $("none");
  rows.found = wanted ? rows.all.filter((row) => `${row[0]} ${row[4]} ${row[5]}`.toLowerCase().includes(wanted)) : rows.all;
  $("tall").style.height = rows.found.length * HEIGHT + "px";
  none.hidden = rows.found.length > 0;
  write(none, rows.all.length ? "No open request is like that." : "No request is open.");
  showRows();
}

function showRows() {
  const view = $("rows"), list = $("shown");
  const first = Math.max(0, Math.floor(view.scrollTop / HEIGHT) - 5);
  const seen = rows.found.slice(first, first + Math.ceil(view.clientHeight / HEIGHT) + 10);
  list.style.transform = `translateY(${first * HEIGHT}px)`;
  while (list.childElementCount > seen.length) list.lastElementChild.remove();
  while (list.childElementCount < seen.length) {
    const item = element("li", undefined, "row");
    item.append(element("button"));
    for (let cell = 1; cell < 5; cell++) item.append(element("span"));
    list.append(item);
  }
  seen.forEach(([id, arrived, prompt, generated, standing, at], index) => {
    const texts = [id, standing, at || "–", (rows.now - arrived).toFixed(1) + " s", `${number(prompt)} → ${number(generated)}`];
    texts.forEach((text, cell) => write(list.children[index].children[cell], text));
  });
}

$("rows").addEventListener("scroll", showRows, { passive: true });
$("find").addEventListener("input", drawRows);

// -- one request: `spans` are [name, from, to, colour, pieces], in milliseconds since it was sent; `pieces` are
// [from, to] where there are gaps.
function drawWaterfall(spans) {
  const end = Math.max(...spans.map((span) => span[2]), 0.001);
  $("waterfall").replaceChildren(...spans.map(([name, from, to, kind, pieces]) => {
    const row = element("li", undefined, kind === "wire" ? "wire" : ""), track = element("span", undefined, "track");
    for (const [begin, stop] of pieces || [[from, to]]) {
      const bar = element("i", undefined, "bar " + (kind === "wire" ? "reserved" : kind));
      bar.style.left = `min(${begin / end * 100}%, 100% - 2px)`;
      bar.style.width = (stop - begin) / end * 100 + "%";
      track.append(bar);
    }
    row.title = `${name}: from ${from.toFixed(3)} to ${to.toFixed(3)} ms`;
    row.append(element("span", name), track, element("span", `${(to - from).toFixed(1)} ms`, "ms"));
    return row;
  }));
}

function drawNotes(notes) {
  const place = $("notes");
  place.hidden = !notes.length;
  place.firstElementChild.textContent = `${number(notes.length)} notes of it`;
  place.lastElementChild.replaceChildren(...notes.slice(0, 500).map((note) => element("li",
    `${note.at_ms.toFixed(1)} ms  ${note.where}: ${note.what} `
    + Object.entries(note.detail).map(([key, value]) => `${key} ${typeof value === "number" ? number(value) : value}`).join(", "))));
}
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => drawMap());
addEventListener("resize", () => { drawMap(); showRows(); });
tell(-1);
