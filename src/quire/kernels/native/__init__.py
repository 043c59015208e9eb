"""Compiled kernels for the CPU: C++ sources, and what compiles, caches and loads them. Nothing here needs them."""
