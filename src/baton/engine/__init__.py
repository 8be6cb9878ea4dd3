"""The engine of an instance: who may run, which blocks they hold, and what the clients are told.

| file | what |
| --- | --- |
| `blocks` | the ledger: the owner of every KV block |
| `prefix` | the prefix index: which computed block holds which tokens |
| `request` | one request and the table of its states |
| `scheduler` | admission, growth, preemption |
| `validation` | what a `Submit` must satisfy to be taken |
| `counters` | what the engine counts |
| `core` | the state machine: messages in, messages out, the clock an argument |
| `loop` | the shell: sockets, rings, processes; the only file with I/O but for `tape` |
| `recording`, `tape`, `replay` | what the core read and decided, on disk, and once more |
"""
