"""``torchrun … -m kvrdma.bench``: one rank of `kvrdma bench`."""

from __future__ import annotations

from kvrdma.cli.bench import main

if __name__ == "__main__":
    main()
