"""Frames of pages: the residency table, the allocators, the tensors of the pools."""
