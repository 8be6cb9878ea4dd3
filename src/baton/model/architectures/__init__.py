"""The families of models, one file each, told as differences from `llama`."""
