"""OpenAI's bodies, before anything is done with them: requests checked field by field (`schemas`, `fields`,
`messages`), and the keys of answers for the document (`answers`).  No HTTP here.
"""
