"""`python -m kvrdma` is the `kvrdma` command."""

from __future__ import annotations

from kvrdma.cli import main

if __name__ == "__main__":
    main(prog_name="kvrdma")
