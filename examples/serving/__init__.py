"""The parts of `examples/serve.py`: a decoder, a loader, a chat workload, an engine, a report."""
