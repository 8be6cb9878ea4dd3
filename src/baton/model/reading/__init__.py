"""What a loader reads from: each tensor of a model, as it is in its files, in floating point or in groups.

`layouts` and `ggml` know how formats lay small integers out, `safetensors` and `gguf` read the files.
Imports `checkpoint` and `weights`; layers and the loader are above.
"""
