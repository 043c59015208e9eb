"""The device's side of an engine: steps of a model, sampling, graphs and copies. It imports neither loop nor parts."""
