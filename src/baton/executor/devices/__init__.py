"""What depends on the device: its kernels, how many blocks and threads it has room for, CUDA graphs.

Its queue and its events are `executor.streams`'.
"""
