"""The device's side of an engine: steps of a model, sampling, graphs and copies. It knows neither loop nor parts."""
