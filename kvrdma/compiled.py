"""Why a transport's compiled module cannot be imported: a source tree, a build without it, another Python."""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.metadata import PackageNotFoundError, files
from importlib.util import find_spec
from pathlib import Path


def why_missing(name: str, error: ImportError, without: str) -> str:
    """Say in one line why ``name`` cannot be imported, and what helps.

    Args:
        name: of the module, ``kvrdma_verbs._verbs``.
        error: what importing it raised.
        without: what it means and what to do where kvrdma was built, but not this part of it.
    """
    package, _, module = name.rpartition(".")
    if find_spec(name) is not None:
        return f"{error}: {name} is there, but cannot be loaded here; if no library is missing, install kvrdma anew"
    folder = Path(str(import_module(package).__file__)).parent
    others = [path.name for path in sorted(folder.glob(f"{module}.*.so"))]
    if others:
        ours = f"Python {sys.version_info.major}.{sys.version_info.minor}"
        return f"{', '.join(others)} is not for this {ours}: install kvrdma with this interpreter"
    if (folder / "CMakeLists.txt").exists() and not _is_left_out(package, module):
        return (
            f"{folder} is a source tree, without {module}: take it off PYTHONPATH if kvrdma is installed, "
            "else `pip install .` in its clone (scripts/setup)"
        )
    return without


def _is_left_out(package: str, module: str) -> bool:
    """Whether kvrdma is installed, without this module: then no source tree hides it."""
    try:
        installed = files("kvrdma") or ()
    except PackageNotFoundError:
        return False
    return not any(file.parent.name == package and file.name.startswith(f"{module}.") for file in installed)
