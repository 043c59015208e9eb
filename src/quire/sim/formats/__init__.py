"""Formats of trace files. A new one is a `TraceFormat` in a file here and an entry of `quire.sim.trace.FORMATS`."""
