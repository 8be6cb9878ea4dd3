"""One event log: where the time of a request went, over the gateway and the engines that had it.

| file | what is in it |
| --- | --- |
| `clocks` | what another process's clock shows, from messages that go anyway, and how wrong that can be |
| `trail` | one sequence: what its gateway noted, and what engines told (`protocol/notes.py`) |
| `story` | one request: its trails, when it came, how it ended |
| `log` | the last stories; slow and failed ones for longer |
| `context` | whose trace a request belongs to: W3C's headers |
| `placing` | clocks moved within their errors, so that nothing is seen before what it follows from |
| `spans` | a trail as spans without gaps, from arrival to end; sums of them |
| `steps` | the last steps that the ranks of an instance ran (`protocol/step_notes.py`) |
| `views`, `perfetto` | the same as JSON, and as a trace that Perfetto shows |

No I/O, and no clock but the one that callers pass.
"""
