"""OpenAI's bodies: requests checked field by field (`schemas`, `fields`, `messages`, `reading`), answers in
its shapes (`formats`, `render_*`, and `answers` for the document).  No HTTP here.
"""
