"""Frames and who owns them: the residency table, the allocators, the pools' tensors."""
