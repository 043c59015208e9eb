"""Replay of request traces on a simulated device: traces, workloads, and what an ideal cache could hit on them."""
