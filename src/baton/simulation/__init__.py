"""The simulator: a whole cluster in one thread, from one seed, with faults, under a virtual clock.

| file | what |
| --- | --- |
| `events` | the virtual clock, timers and who owns them |
| `network` | ordered connections that delay, stall and break |
| `plan` | what a seed stands for: configuration, requests, faults |
| `scenarios` | named kinds of plans |
| `worker` | the ranks: the production token loop behind virtual rings and tickets |
| `instance` | one incarnation: the production engine core and its ranks |
| `gateway` | the production in-flight table, and the clients behind it |
| `world` | all of them, the supervisor, the end of a run |
| `faults` | what each kind of fault does, and to whom |
| `monitor`, `books`, `watch_*` | the invariants, and where each is checked |
| `explain` | who waits for whom |
| `describe` | messages in a few words |
| `oracle` | what every request must be answered |
| `timeline` | what happened, for people and for Perfetto |
| `shrink` | a failing plan made smaller |
| `report` | what a person is shown of a failing seed |
| `runner` | many seeds, several processes, the summary |
| `explorer`, `explored*`, `machines`, `copying` | every interleaving of small scenarios |

See docs/simulation.md.
"""
