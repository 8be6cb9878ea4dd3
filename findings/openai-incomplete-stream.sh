#!/usr/bin/env bash
# openai (Python) 3.52.0: `responses.stream()` yields the event `response.incomplete` of an answer that
# max_output_tokens has cut, but its `get_final_response()` then raises RuntimeError ("Didn't receive a
# `response.completed` event."), though the event has the whole answer.  Whoever tests a server's streams by the
# final response has to let the model end by itself, and an agent has to keep what the event brings.
# Baton heeds it in tests/gateway/http/test_signs_of_life.py (the answer ends with an end token) and
# src/baton/gateway/rendering/responses.py (the status is `incomplete` nevertheless, as in OpenAI's API).
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check "openai==3.52.0" "httpx==0.28.1"
"$folder/venv/bin/python" - <<'PY'
import json
import httpx
import openai

print("openai", openai.__version__)
text = {"type": "output_text", "text": "Once upon", "annotations": [], "logprobs": []}
message = {"id": "msg_1", "type": "message", "role": "assistant", "status": "incomplete", "content": [text]}
base = {
    "id": "resp_1", "object": "response", "created_at": 0, "model": "m", "tools": [], "tool_choice": "auto",
    "parallel_tool_calls": True, "output": [], "error": None, "incomplete_details": None,
}
cut = {**base, "status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}, "output": [message]}
events = [
    {"type": "response.created", "sequence_number": 0, "response": {**base, "status": "in_progress"}},
    {"type": "response.incomplete", "sequence_number": 1, "response": cut},
]
body = "".join(f"event: {one['type']}\ndata: {json.dumps(one)}\n\n" for one in events)


def answer(request: httpx.Request) -> httpx.Response:
    return httpx.Response(200, headers={"content-type": "text/event-stream"}, text=body)


http = httpx.Client(transport=httpx.MockTransport(answer))
client = openai.OpenAI(base_url="http://server/v1", api_key="none", http_client=http)
with client.responses.stream(model="m", input="Tell a story.", max_output_tokens=2) as stream:
    kinds = [event.type for event in stream]
    print("events:", kinds)
    try:
        stream.get_final_response()
    except RuntimeError as error:
        print("get_final_response:", repr(error))
    else:
        raise SystemExit("it gives the incomplete answer now")
assert kinds == ["response.created", "response.incomplete"], kinds
PY
