"""Frames and who owns them: the frame table, the allocators, the pools' tensors."""
