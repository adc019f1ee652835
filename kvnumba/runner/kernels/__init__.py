"""Kernels of the forward pass; they import NumPy, Numba and `kvnumba.kernels` only."""
