"""Benchmarks over any number of processes and hosts, launched by torchrun: ``python -m kvrdma.bench``."""
