"""A compiled module that is missing: a source tree is told from a build without it."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, PackagePath
from pathlib import Path

import pytest

from kvrdma import compiled
from kvrdma.compiled import why_missing

WITHOUT = "built without its headers"
Why = Callable[..., str]


@pytest.fixture
def why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Why:
    """Makes a package of the given files and asks why its module `_core` is missing."""
    monkeypatch.syspath_prepend(tmp_path)

    def ask(*files: str, installed: Sequence[str] | None = ("pretended/other.so",)) -> str:
        def listed(_: str) -> list[PackagePath]:
            if installed is None:
                raise PackageNotFoundError
            return [PackagePath(each) for each in installed]

        monkeypatch.setattr(compiled, "files", listed)
        folder = tmp_path / "pretended"
        folder.mkdir()
        for name in ("__init__.py", *files):
            (folder / name).touch()
        importlib.invalidate_caches()
        monkeypatch.delitem(sys.modules, "pretended", raising=False)
        with pytest.raises(ImportError) as caught:
            importlib.import_module("pretended._core")
        return why_missing("pretended._core", caught.value, WITHOUT)

    return ask


def test_an_installation_without_it_was_built_without_it(why: Why) -> None:
    assert why() == WITHOUT


def test_a_source_tree_that_was_built_too(why: Why) -> None:
    """An editable install without this module."""
    assert why("CMakeLists.txt") == WITHOUT


@pytest.mark.parametrize("installed", [None, ["pretended/_core.cpython-311-x86_64-linux-gnu.so"]], ids=["not", "yes"])
def test_a_source_tree_that_was_not_built(why: Why, tmp_path: Path, installed: list[str] | None) -> None:
    said = why("CMakeLists.txt", installed=installed)
    assert said.startswith(f"{tmp_path / 'pretended'} is a source tree, without _core: take it off PYTHONPATH")
    assert "pip install ." in said


def test_one_for_another_python(why: Why) -> None:
    said = why("_core.cpython-305-x86_64-linux-gnu.so")
    assert said.startswith("_core.cpython-305-x86_64-linux-gnu.so is not for this Python 3.")


def test_one_that_cannot_be_loaded_says_what_the_loader_says(why: Why) -> None:
    said = why("_core.so")
    assert "_core.so" in said
    assert "pretended._core is there, but cannot be loaded here" in said
