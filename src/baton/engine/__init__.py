"""The engine of an instance: it admits requests, owns the KV blocks, and sends tokens to the gateways.

| where | what |
| --- | --- |
| `core` | the state machine: messages in, messages out, the clock an argument |
| `parts` | what the core is made of once the workers are ready |
| `intake` | requests as gateways send them: taken, refused, displaced, cancelled |
| `dispatch` | what was decided, as commands for the workers |
| `request`, `outbox` | one request and the table of its states; what its gateway is told |
| `endings` | the last message of a request |
| `validation` | what a `Submit` must satisfy to be taken |
| `counters`, `loads` | what the engine counts, and what it tells gateways of its load |
| `scheduling/` | who is admitted, which blocks they get, who has to give way |
| `workers/` | the ranks: their handshake, reports of steps, orders to all of them |
| `handover/` | requests that go to another engine, or come from one |
| `shell/` | sockets, rings and processes: the only I/O on a request's way |
| `recording/` | records on disk what the core reads and decides, and replays it |

All but `shell` and `recording` are pure: no I/O, no clock.  A contract in pyproject.toml checks their
imports.
"""
