"""Which UCX this process uses: found, checked and loaded once, when the first transport is opened.

``_ucx`` is linked to ``libucp.so.0`` by name only: whoever loads that name first decides, so this module does.
In order: what the process has loaded already, ``KVRDMA_UCX_LIB`` (a file or folder), a system library that
comes with verbs, and the wheel ``libucx-cu12`` or ``libucx-cu13``, built without verbs: it can never do RDMA.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import logging
import os
import re
import subprocess
import threading
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from kvrdma.errors import TransportUnavailableError

if TYPE_CHECKING:
    from collections.abc import Iterator

_log = logging.getLogger(__name__)
_log.addHandler(logging.NullHandler())  # said to whoever set up logging; link-test and capabilities() say it, too

_LIBRARIES = ("libucs.so.0", "libuct.so.0", "libucp.so.0")
# What those need and a private folder may bring along, where the loader itself would not look.
_COMPANIONS = (
    *("libnuma.so.1", "libnl-3.so.200", "libnl-route-3.so.200", "libibverbs.so.1", "librdmacm.so.1"),
    "libucm.so.0",
)
_SYSTEM_FOLDERS = ("/usr/local/lib", "/usr/lib64", "/usr/lib", "/opt/ucx/lib", "/opt/hpcx/ucx/lib")
_UCX_FILE = re.compile(r"libuc[ps](-[0-9a-f]+)?\.so(\.[0-9.]+)?$")
_TWO = "two UCX in one process hang or crash"

_lock = threading.Lock()
_warned: set[Path] = set()
_sources: dict[Path, str] = {}
_loaded_by: list[int] = []  # the process that loaded UCX, this one or one it was forked from


@dataclass(frozen=True, slots=True)
class UcxLibrary:
    """The UCX of this process."""

    path: Path
    """Its ``libucp.so.0``, links resolved."""
    source: str
    """Who chose it: ``process``, ``KVRDMA_UCX_LIB``, ``system`` or ``wheel``."""

    @property
    def has_verbs(self) -> bool:
        """Whether it has the module for InfiniBand and RoCE; a device is another question."""
        return _has_module(self.path, "ib")

    @property
    def has_cuda(self) -> bool:
        """Whether it has the module for CUDA memory; it also needs a driver."""
        return _has_module(self.path, "cuda")


def load() -> UcxLibrary:
    """Load UCX into this process, or find the one that is there.

    Raises:
        TransportUnavailableError: there is none, it cannot be loaded, the process holds another copy, or it is a
            forked child of one that had loaded UCX.
    """
    _refuse_forked_child()  # first: there the lock may be held for ever
    with _lock:
        library = _loaded() or _found()
        _refuse_second_copy(library)
        if library.source == "process":  # by ourselves, perhaps
            library = replace(library, source=_sources.get(library.path, "process"))
        else:
            _open(library)
            _sources[library.path] = library.source
        _loaded_by[:] = [os.getpid()]
        if not library.has_verbs and library.path not in _warned:
            _warned.add(library.path)
            _log.warning(
                "ucx library %s was built without verbs: it can never do RDMA, and reads over tcp are served "
                "by the peer's CPU; install a UCX with verbs or set KVRDMA_UCX_LIB to one",
                library.path,
            )
        return library


def candidates() -> list[tuple[str, Path]]:
    """List every UCX that could be chosen on this host, in the order of preference, with who would choose it."""
    found: list[tuple[str, Path]] = []
    choice = os.environ.get("KVRDMA_UCX_LIB")
    if choice:
        found.append(("KVRDMA_UCX_LIB", _chosen(Path(choice))))
    systems = _system_libraries()
    found += [("system" if _has_module(path, "ib") else "system, without verbs", path) for path in systems]
    wheel = _wheel_library()
    if wheel is not None:
        found.append(("wheel", wheel))
    return list({path: (source, path) for source, path in reversed(found)}.values())[::-1]


def mapped_copies() -> list[Path]:
    """List every libucp and libucs that is mapped into this process."""
    paths = set()
    for line in Path("/proc/self/maps").read_text().splitlines():
        *_, path = line.split(None, 5)
        if _UCX_FILE.fullmatch(Path(path).name):
            paths.add(Path(path))
    return sorted(paths)


def _loaded() -> UcxLibrary | None:
    for path in mapped_copies():
        # Only a plain name is shared with _ucx; a hashed one belongs to a wheel that bundles its own.
        if path.name.startswith("libucp.so"):
            return UcxLibrary(path, "process")
    return None


def _found() -> UcxLibrary:
    choice = os.environ.get("KVRDMA_UCX_LIB")
    if choice:
        return UcxLibrary(_chosen(Path(choice)), "KVRDMA_UCX_LIB")
    for path in _system_libraries():
        if _has_module(path, "ib"):
            return UcxLibrary(path, "system")
    wheel = _wheel_library()
    if wheel is None:
        raise TransportUnavailableError(
            "ucx: no UCX here (KVRDMA_UCX_LIB, a system's libucp.so.0 with verbs, libucx-cu12 or libucx-cu13): "
            "pip install 'kvrdma[ucx]', or your system's UCX"
        )
    return UcxLibrary(wheel, "wheel")


def _chosen(choice: Path) -> Path:
    path = choice / "libucp.so.0" if choice.is_dir() else choice
    if not path.is_file():
        raise TransportUnavailableError(
            f"ucx: KVRDMA_UCX_LIB={choice} holds no libucp.so.0: name that file, or the folder it is in"
        )
    return path.resolve()


def _system_libraries() -> Iterator[Path]:
    """Every libucp.so.0 the loader would find, in its order."""
    folders = [Path(entry) for entry in os.environ.get("LD_LIBRARY_PATH", "").split(":") if entry]
    cached: list[Path] = []
    for ldconfig in ("/sbin/ldconfig", "/usr/sbin/ldconfig"):
        if Path(ldconfig).exists():
            listing = subprocess.run([ldconfig, "-p"], capture_output=True, text=True, check=False).stdout
            cached = [Path(path) for path in re.findall(r"libucp\.so\.0 .*=> (\S+)", listing)]
            break
    usual = [Path(folder) for folder in _SYSTEM_FOLDERS]
    for path in [*(f / "libucp.so.0" for f in folders), *cached, *(f / "libucp.so.0" for f in usual)]:
        if path.is_file():
            yield path.resolve()


def _wheel_library() -> Path | None:
    spec = importlib.util.find_spec("libucx")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        path = Path(folder, "lib", "libucp.so.0")
        if path.is_file():
            return path.resolve()
    return None


def _has_module(library: Path, name: str) -> bool:
    return any((library.parent / "ucx").glob(f"libuct_{name}.so*"))


def _refuse_forked_child() -> None:
    # UCX opens there, but its own thread has not come along: every connect would take its whole deadline and fail.
    if _loaded_by and _loaded_by != [os.getpid()]:
        raise TransportUnavailableError(
            f"ucx: process {os.getpid()} was forked from process {_loaded_by[0]}, which uses UCX, and UCX does not "
            "survive fork: spawn the process (multiprocessing.get_context('spawn')), or fork before UCX is first used"
        )


def _refuse_second_copy(library: UcxLibrary) -> None:
    folder = library.path.parent
    others = [path for path in mapped_copies() if path.parent != folder]
    if others:
        raise TransportUnavailableError(
            f"ucx: this process holds {', '.join(map(str, others))} already, and kvrdma would use "
            f"{library.path}: {_TWO}; keep what brought it (nixl bundles its own) out of this process"
        )
    choice = os.environ.get("KVRDMA_UCX_LIB")
    if choice and _chosen(Path(choice)) != library.path:
        raise TransportUnavailableError(
            f"ucx: KVRDMA_UCX_LIB={choice}, but this process has loaded {library.path} before: {_TWO}; unset "
            "it, or set it before anything loads UCX"
        )


def _open(library: UcxLibrary) -> None:
    folder = library.path.parent
    for name in _COMPANIONS:
        with contextlib.suppress(OSError):  # whoever needs it says so below
            _open_global(folder / name)
    for name in _LIBRARIES:
        try:
            _open_global(folder / name)
        except OSError as error:
            raise TransportUnavailableError(
                f"ucx: {folder / name}, chosen by {library.source}, cannot be loaded: {error}"
            ) from error


def _open_global(path: Path) -> None:
    # Not ctypes.CDLL, which binds every symbol at once: libucm and libucs need each other.
    dl = ctypes.CDLL(None)
    dl.dlopen.restype = ctypes.c_void_p
    dl.dlopen.argtypes = [ctypes.c_char_p, ctypes.c_int]
    dl.dlerror.restype = ctypes.c_char_p
    if not dl.dlopen(os.fsencode(path), os.RTLD_GLOBAL | os.RTLD_LAZY):
        raise OSError(os.fsdecode(dl.dlerror() or b"dlopen failed"))
