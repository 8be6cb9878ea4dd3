"""Kernels for CUDA devices in Triton: what is imported from here imports Triton, and nothing else does."""
