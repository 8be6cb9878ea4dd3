"""The gateway: OpenAI's API in front of instances, without torch.

| where | what |
| --- | --- |
| `http/` | the application: routes, rights, bodies in and responses out |
| `api/` | OpenAI's request and response bodies |
| `text/` | tokenizer, chat templates, text from tokens, stop strings |
| `generation/` | a request as one or many sequences of text; the Python API uses it too |
| `cluster/` | what is decided about instances and requests; pure |
| `instances/` | its shell: sockets to instances, timers, orders to all of them |
| `helpers/` | processes that read long bodies, render templates, tokenize long texts |
| `errors`, `served_model`, `sharing`, `directories` | what all of them use |
"""
