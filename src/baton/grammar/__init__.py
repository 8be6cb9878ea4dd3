"""What an answer may be: from a description to masks over the vocabulary, by `llguidance`.

`description` says it (and `json_schema` which schemas can be kept), `compiling` makes the grammar of it
that travels to the workers, `checking` tries that before a request is submitted, with `limits`;
`vocabulary` is what the model's tokens are, and `masks` are the running requests' matchers, beside the
sampler.  Imports the protocol alone.
"""
