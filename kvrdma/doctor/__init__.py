"""Finds out why transfers do not work or are slow: `kvrdma doctor`."""
