"""The messages, a file for each pair of parties that talk.

| file | between |
| --- | --- |
| `requests` | gateway and engine |
| `commands`, `reports` | engine and worker, there and back |
| `handover` | engine and engine |
| `nodes` | the hosts of one instance |
| `images` | worker and keeper of weight images |
"""
