"""What `kvrdma doctor` finds out about UCX, with pretended libraries and with the real one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvrdma.host import HostView
from kvrdma_ucx import diagnose
from tests.helpers.host_tree import build

TRANSPORTS = "self/memory rc_mlx5/mlx5_0:1 tcp/eth0 tcp/lo sysv/memory cma/memory cuda_copy/cuda"


class Pretended:
    """A UCX that warns, hides what settings hide, and reads one-sided over rc only."""

    def __init__(self, said: str = "") -> None:
        self.said = said
        self.asked: list[tuple[str, bool]] = []

    def __call__(self, environ: Mapping[str, str], *, read: bool) -> dict[str, Any]:
        tls, device = environ.get("UCX_TLS", ""), environ.get("UCX_NET_DEVICES", "")
        self.asked.append((f"{tls}/{device}", read))
        if tls == "nothing":
            return {"error": "no transports", "said": ""}
        if read and device == "lo":
            return {"error": "timed out", "said": ""}
        left = [each for each in TRANSPORTS.split() if not tls or each.startswith(tls)]
        return {
            "transports": " ".join(left),
            "said": self.said,
            "via": f"{tls}/{device}",
            "one_sided": tls.startswith("rc"),
        }


def test_each_device_is_read_over_by_itself() -> None:
    probe = Pretended()
    found = diagnose._one_sided({"UCX_TLS": "sm", "HOME": "/"}, probe)
    assert [(f.check, f.level, f.found) for f in found] == [
        ("read over rc_mlx5/mlx5_0:1", "green", "one-sided, by rc_mlx5/mlx5_0:1"),
        ("read over tcp/eth0", "green", "emulated, by tcp/eth0"),
        ("read over tcp/lo", "yellow", "failed: timed out"),
    ]
    assert probe.asked[0] == ("/", False), "the settings are taken away first"


def test_settings_tell_what_they_take_away() -> None:
    (found,) = diagnose._effect({"UCX_TLS": "tcp"}, Pretended())
    assert found.level == "green"
    assert "takes away cma/memory cuda_copy/cuda rc_mlx5/mlx5_0:1 self/memory sysv/memory" in found.found
    (found,) = diagnose._effect({"UCX_TLS": "sysv"}, Pretended())
    assert (found.level, found.why, found.fix) == ("red", "no network device is left", "unset UCX_TLS")
    (found,) = diagnose._effect({"UCX_TLS": "nothing"}, Pretended())
    assert found.level == "red"
    assert "no transports" in found.found


def test_what_ucx_mutters_is_passed_on() -> None:
    said = (
        "[1.2] [h:1:0] parser.c:2359 UCX  WARN  unused environment variable: UCX_TSL (maybe: UCX_TLS?)\n"
        "[1.3] [h:1:0] ucp_context.c:1 UCX  WARN  network device 'x' is not available, please use one or more of: lo\n"
    )
    unused, warned, plain = diagnose._effect({}, Pretended(said))
    assert "UCX_TSL (maybe: UCX_TLS?)" in unused.found
    assert warned.found.startswith("network device 'x' is not available")
    assert (unused.level, warned.level, plain.level) == ("yellow", "yellow", "green")


def test_a_ucx_bundled_in_another_package_is_found(tmp_path: Path) -> None:
    for name in ("libucx/lib/libucp.so.0", "nixl_cu12.libs/libucp-0a1b2c3d.so.0.0.0"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).touch()
    (found,) = diagnose._copies([tmp_path])
    assert found.level == "yellow"
    assert "nixl_cu12.libs" in found.found
    assert "libucx/lib" not in found.found


@pytest.mark.needs("ucx")
def test_the_real_one_is_probed_over_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    environ = {**HostView().environ, "UCX_TLS": "tcp", "UCX_NET_DEVICES": "lo"}
    result = diagnose.run_probe(environ, read=True)
    assert (result["one_sided"], result["right"]) == (False, True), result
    assert "tcp/lo" in result["via"]
    monkeypatch.setattr(diagnose, "_PROBE_S", 0.01)
    assert "no end within" in diagnose.run_probe(environ, read=True)["error"]


@pytest.mark.needs("ucx")
def test_soft_roce_needs_settings_and_a_nic_does_not(tmp_path: Path) -> None:
    host = build("soft-roce", tmp_path / "soft")
    (found,) = diagnose._soft_roce(host)
    assert found.level == "yellow"
    assert "rxe0" in found.found
    for name in ("UCX_UD_VERBS_ETH_DGID_CHECK", "UCX_IB_ASYNC_EVENTS"):
        assert f"{name}=n" in found.fix
    (half,) = diagnose._soft_roce(replace(host, environ={"UCX_IB_ASYNC_EVENTS": "n"}))
    assert "UCX_IB_ASYNC_EVENTS" not in half.fix
    settings = {"UCX_IB_ASYNC_EVENTS": "n", "UCX_UD_VERBS_ETH_DGID_CHECK": "n"}
    (well,) = diagnose._soft_roce(replace(host, environ=settings))
    assert well.level == "green"
    for tree in ("roce-two-nics", "dgx-h100", "vm"):
        assert diagnose._soft_roce(build(tree, tmp_path / tree)) == []


def test_a_name_that_ucx_does_not_know_is_its_own_warning() -> None:
    found = diagnose._effect({**HostView().environ, "UCX_NET_DEVICES": "kvnone0"}, diagnose.run_probe)
    assert any("kvnone0" in finding.found and finding.level != "green" for finding in found), found
