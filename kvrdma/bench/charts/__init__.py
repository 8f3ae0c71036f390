"""Reports of link tests and benchmarks as one page for a browser, and as a picture."""
