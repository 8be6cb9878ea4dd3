"""The event log as spans of OpenTelemetry, sent to a collector (`--otlp-traces-endpoint`).

| file | what is in it |
| --- | --- |
| `traced` | a story as a root span and its children; pure |
| `tracer` | which requests are traced; the queue of those that have ended, and the thread that sends them |
| `collector` | where they are sent and how, by the flag and the environment; the extra `otel` |
"""
