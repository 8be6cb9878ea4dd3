"""What comes from files: where a model lies (`hub`, `files`), what it is (`config`, `generation_config`,
`fingerprint`), and its tensors (`loader`).
"""
