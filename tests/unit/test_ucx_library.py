"""Which UCX is loaded: the order, the second copy, and old versions."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from kvrdma.errors import TransportUnavailableError
from kvrdma_ucx import library

ROOT = Path(__file__).parents[2]
DEBIAN = next(iter((ROOT / ".deps/ucx-debian/usr/lib").glob("*-linux-gnu")), ROOT)


def _run(script: str, *argv: str, **environ: str) -> str:
    """Run a script in an interpreter that has loaded no UCX yet and return what it prints."""
    ended = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), *argv],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, **environ},
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.strip()


def _fake_ucx(folder: Path, *modules: str) -> Path:
    (folder / "ucx").mkdir(parents=True)
    for name in modules:
        (folder / "ucx" / f"libuct_{name}.so.0").touch()
    path = folder / "libucp.so.0"
    path.touch()
    return path


def test_import_has_no_effect() -> None:
    out = _run("""
        import os, threading
        before = dict(os.environ)
        import kvrdma_ucx
        maps = open("/proc/self/maps").read()
        print("libuc" in maps, "libcuda" in maps, threading.active_count(), dict(os.environ) == before)
        """)
    assert out == "False False 1 True"


def test_environment_decides_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = _fake_ucx(tmp_path / "chosen")
    monkeypatch.setenv("LD_LIBRARY_PATH", str(_fake_ucx(tmp_path / "system", "ib").parent))
    for value in (chosen, chosen.parent):
        monkeypatch.setenv("KVRDMA_UCX_LIB", str(value))
        assert library._found() == library.UcxLibrary(chosen, "KVRDMA_UCX_LIB")


def test_environment_that_names_nothing_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVRDMA_UCX_LIB", str(tmp_path))
    with pytest.raises(TransportUnavailableError, match=r"holds no libucp\.so\.0"):
        library._found()


def test_system_library_comes_before_the_wheel_only_with_verbs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVRDMA_UCX_LIB", raising=False)
    monkeypatch.setattr(library, "_SYSTEM_FOLDERS", ())
    wheel = _fake_ucx(tmp_path / "wheel", "cuda")
    monkeypatch.setattr(library, "_wheel_library", lambda: wheel)
    with_verbs = _fake_ucx(tmp_path / "with", "ib", "cuda")
    without = _fake_ucx(tmp_path / "without", "cuda")
    monkeypatch.setenv("LD_LIBRARY_PATH", f"{without.parent}:{with_verbs.parent}")
    found = library._found()
    assert found == library.UcxLibrary(with_verbs, "system")
    assert (found.has_verbs, found.has_cuda) == (True, True)
    monkeypatch.setenv("LD_LIBRARY_PATH", str(without.parent))
    found = library._found()
    assert found == library.UcxLibrary(wheel, "wheel")
    assert (found.has_verbs, found.has_cuda) == (False, True)


def test_no_ucx_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVRDMA_UCX_LIB", raising=False)
    monkeypatch.setattr(library, "_system_libraries", lambda: iter(()))
    monkeypatch.setattr(library, "_wheel_library", lambda: None)
    with pytest.raises(TransportUnavailableError, match=r"pip install 'kvrdma\[ucx\]'"):
        library._found()


@pytest.mark.needs("ucx")
def test_the_wheel_warns_once() -> None:
    out = _run(
        """
        import logging, sys
        logging.basicConfig(stream=sys.stdout, format="%(levelname)s %(message)s")
        from kvrdma_ucx import UcxTransport
        from kvrdma_ucx import library
        transports = [UcxTransport(), UcxTransport()]
        first, details = (each.capabilities().details for each in transports)
        assert first["chosen by"] == details["chosen by"], (first, details)
        print(details["chosen by"], details["verbs"], details["library"].endswith("libucp.so.0"))
        """,
        KVRDMA_UCX_LIB=str(library._wheel_library()),
    )
    assert out.count("built without verbs: it can never do RDMA") == 1
    assert out.splitlines()[-1].startswith("KVRDMA_UCX_LIB no")


@pytest.mark.needs("ucx")
def test_a_bundled_second_copy_is_refused(tmp_path: Path) -> None:
    wheel = library._wheel_library()
    assert wheel
    bundled = tmp_path / "libucs-1a2b3c4d.so.0.0.0"
    bundled.write_bytes((wheel.parent / "libucs.so.0").read_bytes())
    ucm = wheel.parent / "libucm.so.0"
    (tmp_path / ucm.name).symlink_to(ucm)
    out = _run(
        """
        import ctypes, sys
        ctypes.CDLL(sys.argv[1])
        from kvrdma.errors import TransportUnavailableError
        from kvrdma_ucx import UcxTransport
        try:
            UcxTransport()
        except TransportUnavailableError as error:
            print(error)
        """,
        str(bundled),
        LD_LIBRARY_PATH=str(tmp_path),
    )
    assert str(bundled) in out
    assert "two UCX in one process" in out


@pytest.mark.needs("ucx")
@pytest.mark.needs("ucx-debian")
def test_a_choice_that_comes_too_late_is_refused() -> None:
    out = _run(
        """
        import os, sys
        from kvrdma.errors import TransportUnavailableError
        from kvrdma_ucx import UcxTransport
        first = UcxTransport()
        os.environ["KVRDMA_UCX_LIB"] = sys.argv[1]
        try:
            UcxTransport()
        except TransportUnavailableError as error:
            print(error)
        """,
        str(DEBIAN),
    )
    assert "has loaded" in out
    assert "set it before anything loads UCX" in out


@pytest.mark.needs("ucx-debian")
def test_debian_reports_its_version_and_verbs() -> None:
    out = _run(
        """
        from kvrdma_ucx import UcxTransport
        details = UcxTransport().capabilities().details
        print(details["version"], details["verbs"], details["chosen by"])
        """,
        KVRDMA_UCX_LIB=str(DEBIAN),
    )
    assert out == "1.13.1 yes KVRDMA_UCX_LIB"


@pytest.mark.slow
@pytest.mark.needs("ucx-debian")
@pytest.mark.timeout(900)
def test_debian_keeps_the_contract() -> None:
    """Code built against new headers runs on 1.13: the whole suite again, in a process that loads that one."""
    tests = ["tests/contract/test_ucx.py", "tests/unit/test_ucx_transport.py"]
    ended = subprocess.run(
        # UCX writes why it aborts to descriptor 2, which must not be a file that ends with the process
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--capture=sys", "-m", "not slow", *tests],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=800,
        check=False,
        env={**os.environ, "KVRDMA_UCX_LIB": str(DEBIAN)},
    )
    assert ended.returncode == 0, f"{ended.stdout[-4000:]}\n{ended.stderr[:6000]}"
