// What asks the server: the stream of overviews, the ledger, orders, and the chat box.
const base = location.pathname.replace(/\/+$/, "").replace(/\/ui$/, "");
const live = { key: "", last: null, closed: null, tries: 0 };

function headers(more) { return live.key ? { authorization: "Bearer " + live.key, ...more } : { ...more }; }

function say(text, className) {
  const place = $("link");
  if (place.textContent !== text) place.textContent = text;
  place.className = className || "";
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
      await read(response, (data) => { const now = JSON.parse(data); if (now.totals) show(now); });
      say("the server ended the connection; asking again…", "bad");
    } else {
      $("keyed").hidden = response.status !== 401 && response.status !== 403;
      say(await failure(response), "bad");
      wait = 10000;
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
  if (asking || !name || document.hidden || !live.last) return;
  asking = true;
  try {
    const response = await fetch(`${base}/debug/ledger?instance=${encodeURIComponent(name)}`,
      { headers: headers(), signal: AbortSignal.timeout(5000) });
    if (response.ok) drawMap(await response.json());
  } catch { /* the line above says whether the server answers */ } finally { asking = false; }
}

function sure(question) {
  $("question").textContent = question;
  const dialog = $("sure");
  dialog.returnValue = "no";
  dialog.showModal();
  return new Promise((answer) =>
    dialog.addEventListener("close", () => answer(dialog.returnValue === "yes"), { once: true }));
}

async function send(path, body) {
  try {
    const response = await fetch(base + path, { method: "POST",
      headers: headers(body ? { "content-type": "application/json" } : {}), body: body && JSON.stringify(body) });
    if (!response.ok) say(await failure(response), "bad");
  } catch { say("the server does not answer", "bad"); }
}

async function order(name, change) {
  const what = change.label ? `Give ${name} the label ${change.label}?` : change.state === "draining"
    ? `Drain ${name}? It gets no new requests; those it has end there.` : `Send requests to ${name} again?`;
  if (await sure(what)) await send("/cluster/instances/" + encodeURIComponent(name), change);
  document.activeElement.blur();
  if (live.last) drawInstances(live.last.instances, order);
}

$("pause").addEventListener("click", async () => {
  const paused = live.last && live.last.paused;
  const what = paused ? "Resume all instances?" : "Pause all instances? Running requests stand still until they are resumed.";
  if (await sure(what)) await send(paused ? "/resume" : "/pause?mode=keep");
});
$("keyed").addEventListener("submit", (event) => {
  event.preventDefault();
  live.key = $("key").value.trim();
  $("key").value = "";
  anew();
});
$("which").addEventListener("change", askLedger);

// -- one request, by the notes that the server keeps of it
const SPANS = { read: "cached", wait: "exported", queue: "exported", prefill: "held", handover: "reserved",
  decode: "held", lost: "bad", finish: "cached" };
async function look(id) {
  $("id").value = id;
  try {
    const response = await fetch(`${base}/debug/requests?id=${encodeURIComponent(id)}`, { headers: headers() });
    if (!response.ok) throw new Error(await failure(response));
    const [one] = (await response.json()).requests;
    const spans = one.trails.flatMap((trail) => trail.spans.map((span) =>
      [[one.trails.length > 1 ? trail.index : "", span.name, span.where].filter((word) => word !== "").join(" "),
        span.begin_ms, span.end_ms, SPANS[span.name] || "cached"]));
    const error = one.timings && one.timings.clock_error_ms;
    $("request").textContent = `${one.id}: ${one.state}, ${(1000 * one.seconds).toFixed(1)} ms, `
      + `${number(one.prompt_tokens)} → ${number(one.generated_tokens)} tokens`
      + (error ? `; clocks agree within ${error.toFixed(2)} ms` : "");
    if (spans.length) drawWaterfall(spans.slice(0, 200)); else $("waterfall").replaceChildren();
    return true;
  } catch (error) {
    $("request").textContent = `${id}: ${error.message}`;
    $("waterfall").replaceChildren();
    return false;
  }
}
// Only a server that keeps such notes has the path.
fetch(base + "/openapi.json").then((response) => response.json()).then((document) => {
  $("look").hidden = !document.paths["/debug/requests"];
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
  $("answer").textContent = $("request").textContent = "";
  $("waterfall").replaceChildren();
  const sent = performance.now(), since = () => performance.now() - sent;
  let id = "", headed = 0, first = 0, last = 0, tokens = 0;
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
    headed = since();
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
    last = last || headed;
    draw();
    $("request").textContent = `${id}: ${number(tokens)} tokens in ${last.toFixed(0)} ms, as this page measured`;
    $("id").value = id;
    if (!$("look").hidden) await look(id);
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
