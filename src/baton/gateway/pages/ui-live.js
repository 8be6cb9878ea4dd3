// What asks the server: the stream of overviews, the ledger, orders, and the chat box.
const base = location.pathname.replace(/\/+$/, "").replace(/\/ui$/, "");
const live = { key: "", last: null, closed: null };

function headers(more) { return live.key ? { authorization: "Bearer " + live.key, ...more } : { ...more }; }

function say(text, className) {
  write($("link"), text);
  $("link").className = className || "";
}

// Why an order was not carried out; until the next one.
function complain(text) {
  $("said").textContent = text;
  $("said").hidden = !text;
}

async function failure(response) {
  try { return (await response.json()).error.message; } catch { return `${response.status} ${response.statusText}`; }
}

// Calls `take` with the data of each event; returns when the stream ends.
async function read(response, take) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (text + value).split("\n\n");
    text = parts.pop();
    for (const part of parts) if (part.startsWith("data: ")) take(part.slice(6));
  }
}

function show(now) {
  const last = live.last, seconds = last ? now.now - last.now : 0;
  const rates = seconds > 0 ? {
    generated: (now.totals.generated_tokens - last.totals.generated_tokens) / seconds,
    prompt: (now.totals.prompt_tokens - last.totals.prompt_tokens) / seconds,
  } : null;
  live.last = now;
  if (!last) setTimeout(askLedger);
  $("model").textContent = `${now.model} · ${now.version}`;
  $("pause").textContent = now.paused ? "Resume all" : "Pause all";
  drawFigures(now, rates);
  drawInstances(now.instances, order);
  const which = $("which"), names = now.instances.map((one) => one.name);
  if (names.join() !== [...which.options].map((one) => one.value).join()) {
    const chosen = which.value;
    which.replaceChildren(...names.map((name) => new Option(name, name)));
    if (names.includes(chosen)) which.value = chosen;
  }
  $("count").textContent = `(${number(now.open)})`;
  rows.all = now.requests;
  rows.now = now.now;
  drawRows();
  say(now.paused ? "paused" : now.state, now.state === "ready" && !now.paused ? "good" : "bad");
}

async function listen() {
  const closed = live.closed = new AbortController();
  let wait = 1000;
  try {
    const response = await fetch(base + "/ui/events", { headers: headers(), signal: closed.signal });
    if (response.ok) {
      live.last = null;
      $("keyed").hidden = true;
      document.querySelector("main").hidden = false;
      await read(response, (data) => { const now = JSON.parse(data); if (now.totals) show(now); });
      say("the server ended the connection; asking again…", "bad");
    } else {
      const refused = response.status === 401 || response.status === 403;
      $("keyed").hidden = !refused;
      say(refused && !live.key ? "not connected" : await failure(response), "bad");
      if (refused) {  // until a key is typed
        document.querySelector("main").hidden = true;
        $("key").focus();
        return;
      }
      if (response.status !== 503) wait = 10000;
    }
  } catch (error) {
    if (closed.signal.aborted) return;
    say("the server does not answer; asking again…", "bad");
  }
  if (!closed.signal.aborted) live.again = setTimeout(listen, wait);
}

function anew() {
  clearTimeout(live.again);
  if (live.closed) live.closed.abort();
  listen();
}

let asking = false;
async function askLedger() {
  const name = $("which").value;
  const one = live.last && live.last.instances.find((instance) => instance.name === name);
  if (asking || !one || document.hidden) return;
  if (one.state !== "ready") { tell(-1, `${name} is ${one.state}: as it was before`); return; }
  asking = true;
  try {
    const response = await fetch(`${base}/debug/ledger?instance=${encodeURIComponent(name)}`,
      { headers: headers(), signal: AbortSignal.timeout(5000) });
    if (response.ok) {
      drawMap(await response.json());
      if (map.at < 0) tell(-1);
    } else tell(-1, await failure(response));
  } catch { /* the line at the top says whether the server answers */ } finally { asking = false; }
}

// Escape says no; the focus goes back to where it was.
function sure(question, verb) {
  $("question").textContent = question;
  $("yes").textContent = verb;
  const dialog = $("sure");
  dialog.returnValue = "no";
  dialog.showModal();
  return new Promise((answer) =>
    dialog.addEventListener("close", () => answer(dialog.returnValue === "yes"), { once: true }));
}

// True if the server has done it.
async function send(path, body) {
  complain("");
  try {
    const response = await fetch(base + path, { method: "POST",
      headers: headers(body ? { "content-type": "application/json" } : {}), body: body && JSON.stringify(body) });
    if (!response.ok) complain(await failure(response));
    return response.ok;
  } catch {
    complain("The server does not answer.");
    return false;
  }
}

async function order(name, change) {
  const [question, verb] = change.label ? [`Give ${name} the label ${change.label}?`, "Change the label"]
    : change.state === "draining"
      ? [`Drain ${name}? It gets no new requests; those it has end there.`, `Drain ${name}`]
      : [`Send requests to ${name} again?`, `Use ${name} again`];
  const done = await sure(question, verb) && await send("/cluster/instances/" + encodeURIComponent(name), change);
  const one = live.last && live.last.instances.find((instance) => instance.name === name);
  if (!one) return;
  if (done) Object.assign(one, change.label ? { label: change.label } : { draining: change.state === "draining" });
  for (const row of $("instances").children) if (row.dataset.name === name) row.cells[1].firstChild.value = one.label;
  drawInstances(live.last.instances, order);
}

$("pause").addEventListener("click", async () => {
  const paused = live.last && live.last.paused;
  const [question, verb, path] = paused ? ["Resume all instances?", "Resume all", "/resume"]
    : ["Pause all instances? Running requests stand still until they are resumed.", "Pause all", "/pause?mode=keep"];
  if (await sure(question, verb)) await send(path);
});
$("keyed").addEventListener("submit", (event) => {
  event.preventDefault();
  live.key = $("key").value.trim();
  $("key").value = "";
  anew();
});
$("which").addEventListener("change", () => { map.at = -1; askLedger(); });

// -- one request, by the notes that the server keeps of it
const SPANS = { read: "cached", wait: "exported", queue: "exported", prefill: "held", handover: "reserved",
  decode: "held", lost: "bad", finish: "cached" };

// What happened one after the other; below a hand-over the fetches that ended by then (after the last one: the rest).
function spansOf(trail, named) {
  const found = [], last = trail.spans.findLastIndex((span) => span.name === "handover");
  let fetched = trail.events.filter((note) => note.what === "fetched" && note.detail.microseconds);
  trail.spans.forEach((span, index) => {
    const handover = span.name === "handover", next = trail.spans[index + 1];
    const where = handover && next && next.where !== span.where ? `${span.where} → ${next.where}` : span.where;
    found.push([`${named ? trail.index + " " : ""}${span.name} ${where}`, span.begin_ms, span.end_ms,
      SPANS[span.name] || "cached"]);
    if (!handover) return;
    const till = index === last ? Infinity : span.end_ms, ways = new Map();
    for (const { at_ms: end, detail } of fetched.filter((note) => note.at_ms <= till)) {
      const way = ways.get(detail.transport) || { pieces: [], bytes: 0 };
      way.pieces.push([Math.max(0, end - detail.microseconds / 1000), end]);
      way.bytes += detail.bytes;
      ways.set(detail.transport, way);
    }
    for (const [transport, way] of ways) {
      found.push([`↳ ${bytes(way.bytes)} by ${(transport || "?").replace("_", " ")}`,
        Math.min(...way.pieces.map((piece) => piece[0])), Math.max(...way.pieces.map((piece) => piece[1])), "wire", way.pieces]);
    }
    fetched = fetched.filter((note) => note.at_ms > till);
  });
  return found;
}

function bytes(count) {
  const power = Math.min(3, Math.max(0, Math.floor(Math.log10(Math.max(count, 1)) / 3)));
  return (count / 1000 ** power).toFixed(power ? 1 : 0) + " " + ["B", "kB", "MB", "GB"][power];
}

function forget(text) {
  $("request").textContent = text;
  $("waterfall").replaceChildren();
  drawNotes([]);
}

// `measured`: milliseconds by the page's own clock.
async function look(id, measured) {
  $("id").value = id;
  try {
    const response = await fetch(`${base}/debug/requests?id=${encodeURIComponent(id)}`, { headers: headers() });
    if (!response.ok) throw new Error(await failure(response));
    const [one] = (await response.json()).requests;
    const spans = one.trails.flatMap((trail) => spansOf(trail, one.trails.length > 1));
    const error = one.timings && one.timings.clock_error_ms;
    forget(`${one.id}: ${one.state}, ${(1000 * one.seconds).toFixed(1)} ms`
      + (measured ? ` (this page measured ${measured.toFixed(1)} ms)` : "")
      + `, ${number(one.prompt_tokens)} → ${number(one.generated_tokens)} tokens`
      + (error ? `; clocks agree within ${error.toFixed(2)} ms` : ""));
    if (spans.length) drawWaterfall(spans.slice(0, 200));
    drawNotes(one.trails.flatMap((trail) => trail.events));
  } catch (error) {
    forget(`${id}: ${error.message}`);
  }
}
// Only a server that keeps such notes has the path.
fetch(base + "/openapi.json").then((response) => response.json()).then((document) => {
  $("look").hidden = !document.paths["/debug/requests"];
  if (!$("request").textContent) {
    forget($("look").hidden ? "This server keeps no notes of requests (--events-keep 0)."
      : "Choose an open request, type an id, or send a message.");
  }
}).catch(() => {});
$("look").addEventListener("submit", (event) => { event.preventDefault(); look($("id").value.trim()); });
$("shown").addEventListener("click", (event) => {
  if (event.target.tagName === "BUTTON" && !$("look").hidden) look(event.target.textContent);
});

// -- the chat box
let chatting = null;
$("stop").addEventListener("click", () => chatting && chatting.abort());
$("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey) { event.preventDefault(); $("chat").requestSubmit(); }
});
$("chat").addEventListener("submit", async (event) => {
  event.preventDefault();
  if (chatting) return;
  chatting = new AbortController();
  $("send").disabled = true;
  $("stop").disabled = false;
  $("answer").textContent = "";
  forget("");
  const sent = performance.now(), since = () => performance.now() - sent;
  let id = "", first = 0, last = 0, tokens = 0;
  const draw = () => drawWaterfall([
    ["whole", 0, last, "cached"], ["queue and prefill", 0, first || last, "exported"],
    ...(first ? [["decode", first, last, "held"]] : []),
  ]);
  try {
    const response = await fetch(base + "/v1/chat/completions", {
      method: "POST", signal: chatting.signal, headers: headers({ "content-type": "application/json" }),
      body: JSON.stringify({ messages: [{ role: "user", content: $("prompt").value }], max_tokens: 256, stream: true,
        stream_options: { include_usage: true } }) });
    id = response.headers.get("x-request-id");
    $("request").textContent = id;
    if (!response.ok) throw new Error(await failure(response));
    await read(response, (data) => {
      if (data === "[DONE]") return;
      const piece = JSON.parse(data);
      if (piece.error) throw new Error(piece.error.message);
      if (piece.usage) tokens = piece.usage.completion_tokens;
      const delta = piece.choices && piece.choices[0] && piece.choices[0].delta;
      if (!delta) return;
      last = since();
      const text = (delta.reasoning_content || "") + (delta.content || "");
      if (text) { first = first || last; $("answer").append(text); }
    });
    last = since();
    draw();
    $("request").textContent = `${id}: ${number(tokens)} tokens in ${last.toFixed(0)} ms, as this page measured`;
    $("id").value = id;
    if (!$("look").hidden) await look(id, last);
  } catch (error) {
    if (last) draw();
    $("request").textContent = chatting.signal.aborted ? `${id}: stopped` : `${id}: ${error.message}`;
  } finally {
    chatting = null;
    $("send").disabled = false;
    $("stop").disabled = true;
  }
});
addEventListener("pagehide", () => { clearTimeout(live.again); if (live.closed) live.closed.abort(); });
addEventListener("pageshow", (event) => { if (event.persisted) anew(); });
setInterval(askLedger, 2000);
listen();
