"""Kernels for CUDA devices, written in Triton."""
