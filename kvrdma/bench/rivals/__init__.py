"""Adapters that run other transfer libraries, and kvrdma alike, as pairs of processes driven over pipes."""
