#!/usr/bin/env bash
# Codex offers each MCP server as a tool of type `namespace`.  It runs a call that names the tool and the
# namespace apart (`"name": "now", "namespace": "mcp__clock"`), and answers one under the joined name
# (`mcp__clock__now`) with "unsupported call".
#
# Tried with @openai/codex 0.171.0 against a server of a few lines, which records what is sent.
# Heeded by Baton: src/baton/gateway/responses/tools.py (`Names`), responses/output.py.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
npm install --silent --no-audit --no-fund --ignore-scripts @openai/codex@0.171.0 >/dev/null
mkdir -p home/.codex work
cat > mcp.js <<'JS'
require('readline').createInterface({input: process.stdin}).on('line', line => {
  const asked = JSON.parse(line)
  if (asked.id === undefined) return
  const results = {
    initialize: () => ({protocolVersion: asked.params.protocolVersion, capabilities: {tools: {}},
                        serverInfo: {name: 'clock', version: '1'}}),
    'tools/list': () => ({tools: [{name: 'now', description: 'Says the time.',
                                   inputSchema: {type: 'object', properties: {}}}]}),
    'tools/call': () => ({content: [{type: 'text', text: '12:00'}]}),
  }
  const result = (results[asked.method] || (() => ({})))()
  process.stdout.write(JSON.stringify({jsonrpc: '2.0', id: asked.id, result}) + '\n')
})
JS
cat > server.js <<'JS'
const fs = require('fs')
const call = (id, more) => ({type: 'function_call', id: 'fc_' + id, call_id: 'call_' + id, status: 'completed',
                             arguments: '{}', ...more})
const answers = [call(1, {name: 'now', namespace: 'mcp__clock'}), call(2, {name: 'mcp__clock__now'}),
                 {type: 'message', id: 'msg_1', role: 'assistant', status: 'completed',
                  content: [{type: 'output_text', text: 'done', annotations: []}]}]
let asked = 0
require('http').createServer((request, response) => {
  let body = ''
  request.on('data', piece => { body += piece })
  request.on('end', () => {
    if (request.method !== 'POST') { response.end('{"data":[],"models":[]}'); return }
    fs.writeFileSync(`request_${asked}.json`, body)
    const item = answers[Math.min(asked++, 2)]
    const usage = {input_tokens: 1, output_tokens: 1, total_tokens: 2}
    const whole = {id: 'resp_' + asked, object: 'response', status: 'completed', output: [item], usage}
    response.writeHead(200, {'content-type': 'text/event-stream'})
    const events = {'response.created': {response: whole}, 'response.output_item.done': {output_index: 0, item},
                    'response.completed': {response: whole}}
    for (const [type, data] of Object.entries(events))
      response.write(`event: ${type}\ndata: ${JSON.stringify({type, ...data})}\n\n`)
    response.end()
  })
}).listen(0, '127.0.0.1', function () { fs.writeFileSync('port', String(this.address().port)) })
JS
node server.js &
server=$!
trap 'kill "$server" 2>/dev/null || true; rm -rf "$folder"' EXIT
for _ in $(seq 50); do [ -s port ] && break; sleep 0.2; done
cat > home/.codex/config.toml <<TOML
model = "m"
model_provider = "local"
[model_providers.local]
name = "local"
base_url = "http://127.0.0.1:$(cat port)/v1"
wire_api = "responses"
[mcp_servers.clock]
command = "node"
args = ["$folder/mcp.js"]
TOML
codex="$folder/node_modules/@openai/codex/bin/codex.js"
env -i PATH="$PATH" HOME="$folder/home" node "$codex" --version
cd work
env -i PATH="$PATH" HOME="$folder/home" timeout 90 node "$codex" exec --skip-git-repo-check \
  --dangerously-bypass-approvals-and-sandbox "what time is it" </dev/null >/dev/null 2>../log || { cat ../log; exit 1; }
cd ..
node - <<'JS'
const read = n => JSON.parse(require('fs').readFileSync(`request_${n}.json`))
const spaces = read(0).tools.filter(tool => tool.type === 'namespace').map(tool => tool.name)
const outputs = read(2).input.filter(item => item.type === 'function_call_output').map(item => JSON.stringify(item.output))
console.log('namespaces offered:', spaces.join(', '))
console.log('call with name and namespace:', outputs[0])
console.log('call with the joined name:', outputs[1])
if (!spaces.includes('mcp__clock') || !outputs[0].includes('12:00') || !outputs[1].includes('unsupported call'))
  throw new Error('it behaves otherwise now')
console.log('as described')
JS
