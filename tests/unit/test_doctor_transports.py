"""`kvrdma doctor` and the transports of a host that has few of them: nothing is said twice."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from kvrdma.doctor import transports
from kvrdma.doctor.network import check_network
from kvrdma.doctor.transports import check_transports
from kvrdma.errors import TransportUnavailableError
from kvrdma.finding import Finding
from kvrdma.host import HostView
from kvrdma.transport import Transport, open_transport
from kvrdma_ucx import diagnose, library
from tests.helpers.host_tree import build


def opening(*works: str) -> Callable[..., Transport]:
    def open_it(name: str, **options: object) -> Transport:
        if name in works:
            return open_transport(name, **options)
        if name == "ucx":
            library.load()
        raise TransportUnavailableError(f"{name}: not here")

    return open_it


@pytest.fixture
def no_ucx(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVRDMA_UCX_LIB", raising=False)
    monkeypatch.setattr(library, "mapped_copies", list)
    monkeypatch.setattr(library, "_system_libraries", lambda: iter(()))
    monkeypatch.setattr(library, "_wheel_library", lambda: None)


def test_variables_that_are_no_settings_are_told() -> None:
    found = check_network(live(KVRDMA_BINDD="x", KVRDMA_UCX_TLS="tcp", HOME="/"))
    (odd,) = (finding for finding in found if finding.check == "settings")
    assert (odd.level, odd.found) == ("yellow", "KVRDMA_BINDD is no setting of kvrdma")


def live(**environ: str) -> HostView:
    return HostView(environ=environ)


@pytest.mark.needs("cma")
@pytest.mark.usefixtures("no_ucx")
def test_a_host_without_ucx_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transports, "open_transport", opening("cma", "memory"))
    findings = check_transports(live())
    (ucx,) = [each for each in findings if "no UCX here" in each.found]
    assert (ucx.check, ucx.level) == ("transport ucx", "yellow")
    assert ucx.found.startswith("no UCX here")
    assert "pip install 'kvrdma[ucx]'" in ucx.fix
    assert not [each for each in findings if each.check in ("ucx library", "ucx settings")]
    (far,) = [each for each in findings if each.check == "other hosts"]
    assert far.level == "yellow"
    assert not [each for each in findings if each.level == "red"], "reads on this host work"


@pytest.mark.usefixtures("no_ucx")
def test_without_any_transport_it_is_red(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transports, "open_transport", opening())
    assert [each.check for each in check_transports(live()) if each.level == "red"] == ["transports"]


@pytest.mark.usefixtures("no_ucx")
def test_a_setting_that_names_no_ucx_is_red(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KVRDMA_UCX_LIB", str(tmp_path))
    about, loads = diagnose._library({"KVRDMA_UCX_LIB": str(tmp_path)})
    assert (about.level, loads) == ("red", False)
    assert str(tmp_path) in about.found


def test_what_ucx_was_built_with_is_not_what_is_usable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "ucx").mkdir()
    (tmp_path / "ucx/libuct_cuda.so").touch()
    monkeypatch.setattr(library, "load", lambda: None)
    monkeypatch.setattr(library, "candidates", lambda: [("wheel", tmp_path / "libucp.so.0")])
    assert "built with support for CUDA;" in diagnose._library({})[0].found
    (tmp_path / "ucx/libuct_ib.so").touch()
    assert "built with support for verbs and CUDA;" in diagnose._library({})[0].found
    assert diagnose._library({})[0].level == "green"


def test_without_settings_of_ucx_none_is_to_be_unset() -> None:
    def fails(*_: object, **__: object) -> dict[str, str]:
        return {"error": "no device", "said": ""}

    (found,) = diagnose._effect({"HOME": "/"}, fails)
    assert "unset" not in found.fix
    (found,) = diagnose._effect({"UCX_TLS": "tcp"}, fails)
    assert found.fix == "unset UCX_TLS and try again"


@pytest.mark.parametrize(
    ("text", "level", "says"),
    [("cma,tcp", "red", "tcp of 'cma,tcp' is no transport that is installed"), ("cma, ucx", "green", "cma, ucx")],
)
def test_transports_that_are_set_have_to_exist(text: str, level: str, says: str, tmp_path: Path) -> None:
    saved = build("vm", tmp_path)
    host = HostView(saved.sys, saved.proc, saved.dev, {"KVRDMA_TRANSPORTS": text})
    found: list[Finding] = [each for each in check_transports(host) if each.check == "KVRDMA_TRANSPORTS"]
    assert [(each.level, each.found) for each in found] == [(level, says)]


@pytest.mark.parametrize(("devices", "level"), [((), "green"), (("mlx5_0",), "yellow")])
def test_verbs_without_any_rdma_device_is_no_fault(
    devices: tuple[str, ...], level: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for device in devices:
        (tmp_path / "class/infiniband" / device).mkdir(parents=True)
    monkeypatch.setattr(HostView, "live", True)
    monkeypatch.setattr(transports, "open_transport", opening("memory"))
    findings = check_transports(HostView(sys=tmp_path, environ={}))
    (verbs,) = [each for each in findings if each.check == "transport verbs"]
    assert verbs.level == level
    assert ("nothing to do" in verbs.found) == (not devices)
    assert "nothing" not in verbs.fix
