"""The HTTP application: `app` with `middleware`, `routes/`, who may do what (`rights`), and responses.

`context` is what all routes share; `bodies` receives what clients send; `responses` and `stepping` write what
they get; `openapi` describes all of it.
"""
