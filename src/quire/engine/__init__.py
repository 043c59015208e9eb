"""The engine: step loop, runner, sampler, and the processes around them. It wires everything below."""
