"""`baton run-batch`: a file of requests becomes a file of answers, in OpenAI's batch format.

`lines` is the format of both files, `output` the file of answers, which a run that was killed goes on with,
`client` asks a server, `run` drives it all, `server` serves the model in the same process.
"""
