"""The gateway: OpenAI's API in front of instances, without torch.

app, routes_*, schemas, reading, prompts    HTTP in; helpers/: long bodies and chat templates, in processes
render_*, formats, responses       HTTP out
generation, sequence               one request as text; what the Python API uses too
tokenizer, detokenizer, chat_template
cluster, member, requests_table, routing, digest    what is decided about instances and requests, without I/O
cluster_client, instance_client, engine_channel, inbox    the instances over ZeroMQ
"""
