"""What a CPU runs besides PyTorch: kernels in C++ (`native/`, where there was a compiler) and in numba."""
