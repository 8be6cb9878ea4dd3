"""OpenAI's answers, whole or as events of a stream, written from a `Generation`: `chat` and `completion`,
`chunks` for what both have in common, `formats` for their parts.  No HTTP.
"""
