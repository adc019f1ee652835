"""Compiled kernels: pure functions over arrays, numpy and Numba only."""
