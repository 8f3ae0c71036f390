"""`kvrdma doctor` on saved trees: what it says of each, and that what is right is green."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from kvrdma.cli import main
from kvrdma.doctor.checks import examine
from kvrdma.doctor.gpus import gpus, nearest
from kvrdma.doctor.limits import check_limits
from kvrdma.doctor.pci import PciDevice, distance
from kvrdma.doctor.rdma import rdma_ports
from kvrdma.doctor.software import check_software
from kvrdma.finding import Finding
from kvrdma.host import HostView
from tests.helpers.host_tree import build

LEVELS = {
    "dgx-h100": {
        "yellow": {"rdma port state", "address peers are told", "secret"},
        "red": set(),
    },
    "roce-two-nics": {
        "yellow": {"rdma addresses", "rdma mtu", "pci link of nics", "gpu to nic", "nvlink", "open files", "ptrace",
                   "address peers are told", "bond", "UCX_CUDA_IPC_ENABLE_GET_ZCOPY"},
        "red": {"gpudirect", "expandable segments", "memlock", "ports", "UCX_NET_DEVICES", "UCX_TLS",
                "UCX_IB_GID_INDEX"},
    },
    "vm": {"yellow": {"rdma nics", "memlock", "ptrace", "ports"}, "red": set()},
    "container": {
        "yellow": {"/dev/shm", "ptrace", "pid namespace", "container", "process_vm_readv", "UCX_TLS"},
        "red": {"rdma device files", "memlock", "address peers are told"},
    },
}  # fmt: skip


def by_check(findings: list[Finding]) -> dict[str, Finding]:
    found = {finding.check: finding for finding in findings}
    assert len(found) == len(findings), "one finding per check"
    return found


@pytest.mark.parametrize("name", LEVELS)
def test_a_tree_gets_its_colours(name: str, tmp_path: Path) -> None:
    findings = examine(build(name, tmp_path))
    for level in ("yellow", "red"):
        assert {f.check for f in findings if f.level == level} == LEVELS[name][level]
    for finding in findings:
        assert finding.found
        if finding.level == "green":
            assert (finding.why, finding.fix) == ("", "")
        else:
            assert finding.why
            assert finding.fix


def test_each_gpu_of_a_dgx_gets_the_nic_behind_its_switch(tmp_path: Path) -> None:
    host = build("dgx-h100", tmp_path)
    ports = [port for port in rdma_ports(host) if port.active]
    chosen = [(nearest(gpu, ports)[0], [port.name for port in nearest(gpu, ports)[1]]) for gpu in gpus(host)]
    assert chosen == [("PIX", [f"mlx5_{n}:1"]) for n in (0, 3, 4, 5, 6, 9, 10, 11)]
    text = by_check(examine(host))["gpu to nic"].found
    assert "GPU 5 PIX mlx5_9:1: CUDA_VISIBLE_DEVICES=5 UCX_NET_DEVICES=mlx5_9:1 numactl --cpunodebind=1" in text


def test_distances_are_named_as_nvidia_smi_does() -> None:
    def at(path: str, numa: int) -> PciDevice:
        return PciDevice(path.rsplit(maxsplit=1)[-1], tuple(path.split()), numa, 0, 0, "")

    gpu = at("pci0 port switch down1 gpu", 0)
    assert distance(gpu, at("pci0 port switch down2 nic", 0)) == "PIX"
    assert distance(gpu, at("pci0 port switch down2 switch2 down3 nic", 0)) == "PXB"
    assert distance(gpu, at("pci0 port2 nic", 0)) == "PHB"
    assert distance(gpu, at("pci1 port nic", 0)) == "NODE"
    assert distance(gpu, at("pci2 port nic", 1)) == "SYS"


def test_findings_name_the_place_and_the_cure(tmp_path: Path) -> None:
    found = by_check(examine(build("roce-two-nics", tmp_path)))
    assert found["rdma mtu"].found == "mlx5_1:1 (enp161s0np0) 1500"
    assert "ip link set enp161s0np0 mtu 9000" in found["rdma mtu"].fix
    assert "mlx5_bond_0:1" in found["UCX_NET_DEVICES"].found
    assert "mlx5_0:1, mlx5_1:1" in found["UCX_NET_DEVICES"].fix
    assert found["UCX_TLS"].found.startswith("ucd of ")
    assert "mlx5_1:1 empty" in found["UCX_IB_GID_INDEX"].found
    assert found["ports"].found == "7473 in use, wanted 7471 to 7478"
    assert "16.0 GT/s x8 of 16.0 GT/s x16" in found["pci link of nics"].found
    assert "127.0.1.1" in found["address peers are told"].found
    assert "eno2 down" in found["bond"].found
    assert "GPU 1 is NODE from mlx5_0:1" in found["gpu to nic"].found
    container = by_check(examine(build("container", tmp_path / "other")))
    assert "IPC_LOCK, SYS_PTRACE" in container["container"].fix
    assert "uverbs2 missing" in container["rdma device files"].found
    assert "dmabuf" in container["gpudirect"].found


def test_a_port_without_subnet_manager_or_state_is_red(tmp_path: Path) -> None:
    host = build("container", tmp_path)
    port = next((tmp_path / "sys/class/infiniband").iterdir()) / "ports/1"
    (port / "lid").write_text("0x0\n")
    assert by_check(examine(host))["rdma addresses"].level == "red"
    (port / "state").write_text("2: INIT\n")
    found = by_check(examine(host))["rdma port state"]
    assert (found.level, found.found) == ("red", "mlx5_2:1 is INIT")


def test_a_card_without_driver_is_not_taken_for_none(tmp_path: Path) -> None:
    host = build("vm", tmp_path)
    (tmp_path / "sys/devices/pci0000:00/0000:00:03.0/vendor").write_text("0x15b3\n")
    found = by_check(examine(host))["rdma nics"]
    assert found.level == "red"
    assert "0000:00:03.0" in found.found


def test_reads_within_a_host_without_nic_are_not_said_to_be_slow(tmp_path: Path) -> None:
    assert "reads to other hosts go over tcp" in by_check(examine(build("vm", tmp_path)))["rdma nics"].why


@pytest.mark.parametrize(
    ("limit", "capabilities", "says"),
    [
        ("8388608", 1 << 14, "8 MiB, and CAP_IPC_LOCK lifts it"),
        ("8388608", 0, "8 MiB"),
        ("65536", 0, "64 KiB"),
        ("0", 0, "0 KiB"),
        ("unlimited", 0, "unlimited"),
    ],
)
def test_the_limit_of_locked_memory_has_a_unit(limit: str, capabilities: int, says: str, tmp_path: Path) -> None:
    (tmp_path / "self").mkdir()
    (tmp_path / "self/limits").write_text(f"Max locked memory         {limit}    {limit}    bytes\n")
    (tmp_path / "self/status").write_text(f"CapEff:\t{capabilities:016x}\n")
    found = by_check(check_limits(HostView(sys=tmp_path, proc=tmp_path)))["memlock"]
    assert found.found == says


def test_settings_that_cannot_be_read_are_red(tmp_path: Path) -> None:
    host = build("vm", tmp_path)
    bad = HostView(host.sys, host.proc, host.dev, {"KVRDMA_LEASE_S": "soon"})
    found = by_check(examine(bad))["settings"]
    assert found.level == "red"
    assert "KVRDMA_LEASE_S: 'soon'" in found.found


@pytest.mark.parametrize(
    ("versions", "says"),
    [
        ({"torch": "2.9.0", "vllm": "0.32.0"}, "torch 2.9.0"),
        ({"torch": "2.13.0", "vllm": "0.9.1"}, "vllm 0.9.1"),
        ({"torch": "2.13.0+cu130", "cupy-cuda12x": "13.6.0"}, "cupy-cuda12x 13.6.0 for CUDA 12"),
        ({"libucx-cu12": "1.22.0", "cupy-cuda13x": "13.6.0"}, "libucx-cu12 1.22.0 for CUDA 12"),
    ],
)
def test_versions_that_do_not_fit_are_red(versions: dict[str, str], says: str) -> None:
    (finding,) = check_software(versions)
    assert finding.level == "red"
    assert says in finding.found


def test_versions_that_fit_are_green() -> None:
    good = {"torch": "2.13.0+cu129", "vllm": "0.32.0", "cupy-cuda12x": "13.6.0", "libucx-cu12": "1.22.0"}
    assert [finding.level for finding in check_software(good)] == ["green"]


def test_the_command_exits_with_1_on_red_only(tmp_path: Path) -> None:
    for name, code, verdict in (
        ("vm", 0, "4 yellow, 0 red: works as it is"),
        ("container", 1, "3 red: what is red must"),
    ):
        build(name, tmp_path / name)
        roots = ["--sysfs", str(tmp_path / name / "sys"), "--proc", str(tmp_path / name / "proc")]
        ended = CliRunner().invoke(main, ["doctor", "--json", *roots])
        assert ended.exit_code == code, ended.output
        report = json.loads(ended.stdout)
        assert report["healthy"] == (code == 0)
        assert {f["level"] for f in report["findings"]} >= {"green", "yellow"}
        assert set(report["findings"][0]) == {"check", "level", "found", "why", "fix"}
        people = CliRunner().invoke(main, ["doctor", "--quiet", *roots])
        assert people.exit_code == code
        assert "●" not in people.stdout
        assert "fix:" in people.stdout
        assert verdict in people.stdout.splitlines()[-1]


def test_one_root_without_the_other_is_refused(tmp_path: Path) -> None:
    ended = CliRunner().invoke(main, ["doctor", "--json", "--sysfs", str(tmp_path)])
    assert ended.exit_code == 2
    assert json.loads(ended.stdout)["error"] == "UsageError"


def test_soft_roce_is_found_without_a_pci_device(tmp_path: Path) -> None:
    found = by_check(examine(build("soft-roce", tmp_path)))["rdma nics"]
    assert "rxe0" in found.found, found
    assert found.level != "red", found
