"""Replay of request traces on a simulated device: traces, workloads, and the hits of an ideal cache."""
