"""The simulator: a whole cluster in one thread, from one seed, with faults, under a virtual clock.

| where | what |
| --- | --- |
| `world`, `events` | all parties and the end of a run; the virtual clock, timers and who owns them |
| `plans/` | what a seed stands for: configuration, requests, faults; a failing one made smaller |
| `parties/` | the processes: production state machines behind virtual sockets and rings |
| `wires/` | connections, rings and transfers that delay, stall and break |
| `faults/` | what each kind of fault does, and to whom |
| `checks/` | the invariants, where each is checked, and what every request must be answered |
| `explorer/` | every interleaving of small scenarios |
| `runner`, `report`, `timeline`, `describe` | many seeds, and what people are shown of one |

See docs/simulation.md.
"""
