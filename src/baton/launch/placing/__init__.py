"""`baton serve --ray`: Ray chooses where instances run, starts them there, and again when a node is lost.

Ray carries nothing of a request: it starts processes that join the server
(`launch/instances/joining/joined.py`).

| file | where it runs |
| --- | --- |
| `spec.py` | what is placed, and what is said of it |
| `placement.py` | in the server: the child process with Ray's driver, and what it reports |
| `scaling.py` | in the server: instances that are added and drained as the load changes |
| `driver.py` | in that child: a loop with Ray, and deadlines for it; what earlier servers left behind |
| `gang.py` | there too: the placement group and the actors of one instance |
| `actor.py` | on the node: a process of `baton serve --instance --join`, which dies with its actor |
"""
