"""The CPU's kernels in numba, for machines where there was no C++ compiler."""
