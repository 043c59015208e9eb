"""Triton kernels, run by the interpreter on the CPU and compiled ahead of time."""
