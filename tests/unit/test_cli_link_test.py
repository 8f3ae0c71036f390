"""`kvrdma link-test` as people and scripts call it: options, output, exit codes."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import pytest
from click.testing import CliRunner

from kvrdma import __version__, errors, wire
from kvrdma.cli import main
from kvrdma.cli.exits import EXIT_CODES, INTERRUPTED, NOBODY_READS, OUTPUT_LOST, exit_code
from kvrdma.errors import KVRDMAError
from kvrdma.sidechannel import Endpoint, SideChannelServer
from kvrdma.transport import installed_transports
from tests.helpers.link_cli import SMALL, command, failure, run

SECRET = "correct horse battery staple"


@contextmanager
def served(*arguments: str, environ: Mapping[str, str] | None = None) -> Iterator[str]:
    """A `serve` process; gives the endpoint it printed."""
    env = os.environ | dict(environ or {})
    with subprocess.Popen(command("serve", *arguments), stdout=subprocess.PIPE, text=True, env=env) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            yield line.removeprefix("listening at ").partition(" ")[0]
        finally:
            process.send_signal(signal.SIGINT)
            assert process.wait(30) == 0


def test_json_is_one_object_of_exactly_the_documented_shape() -> None:
    done = run("--transport", "memory", "--json", *SMALL)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert list(report) == [
        *("kvrdma", "transport", "one_sided", "device", "ucx", "verified", "connect_ms", "first_read_ms", "cases"),
    ]
    assert (report["transport"], report["one_sided"], report["device"]) == ("memory", True, "cpu")
    assert (report["ucx"], report["verified"]) == (None, True)
    assert report["connect_ms"] > 0
    assert report["first_read_ms"] > 0
    assert len(report["cases"]) == 6
    for case in report["cases"]:
        assert list(case) == [
            *("pattern", "block_bytes", "rows", "rows_posted", "nbytes", "verified", "blocking_us", "total_ms"),
            *("gb_per_s", "memcpy_gb_per_s", "memcpy_ratio"),
        ]
        for stat in ("blocking_us", "total_ms", "gb_per_s"):
            assert list(case[stat]) == ["best", "median"]
        assert case["rows"] * case["block_bytes"] == case["nbytes"] == 65536
        assert case["verified"] is True
    assert [(case["pattern"], case["block_bytes"]) for case in report["cases"]] == [
        (pattern, block) for pattern in ("contig", "fragmented", "remote_contig") for block in (4096, 8192)
    ]
    assert report["cases"][0]["rows_posted"] == 1


def test_progress_goes_to_stderr_with_json_and_to_stdout_without() -> None:
    quiet = run("--transport", "memory", "--json", "--pattern", "contig", *SMALL)
    assert quiet.stderr.splitlines() == ["1/2 contig 16 x 4 KiB", "2/2 contig 8 x 8 KiB"]
    plain = run("--transport", "memory", "--pattern", "contig", *SMALL)
    assert plain.stderr == ""
    assert plain.stdout.splitlines()[0] == "1/2 contig 16 x 4 KiB"


def test_the_table_says_what_was_measured() -> None:
    done = run("--transport", "memory", *SMALL)
    assert done.returncode == 0, done.stderr
    assert "memory via memmove: one-sided, memory cpu" in done.stdout
    assert re.search(r"connect \d+\.\d ms, first read \d+\.\d ms", done.stdout)
    for word in ("connect:", "first read:", "posted:", "held:", "memcpy:"):
        assert word in done.stdout  # a footnote says what it means
    rows = [line for line in done.stdout.splitlines() if "verified" in line]
    assert len(rows) == 6
    assert re.match(r"contig +4 KiB +16 +1 +0\.1 ", rows[0])
    assert max(len(line) for line in rows) <= 80


@pytest.mark.needs("cma")
def test_without_options_but_small_the_peer_is_another_process_read_one_sided() -> None:
    done = run("--json", *SMALL)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert (report["verified"], report["one_sided"]) == (True, True)
    assert report["transport"] != "memory"


def test_a_model_answers_how_long_a_request_takes() -> None:
    done = run("--transport", "memory", "--model", "llama-3.1-8b", "--tp", "8", "--tokens", "64", "--iters", "3")
    assert done.returncode == 0, done.stderr
    # 32 layers x 4 blocks of 16 tokens; 2 x 1 head x 128 x 2 B a token: 8 KiB a page, 1,048,576 B.
    expected = r"llama-3.1-8b, tp 8: 64 tokens = 1.0 MB in 128 rows = \d+\.\d ms"
    assert re.search(expected, done.stdout)


def test_a_short_secret_is_refused_without_showing_it() -> None:
    done = run("serve", environ={"KVRDMA_SECRET": "hunter2"})
    assert done.returncode == 2
    assert "KVRDMA_SECRET: has 7 characters" in done.stderr
    assert "hunter2" not in done.stderr


def test_the_choices_are_the_installed_transports() -> None:
    done = CliRunner().invoke(main, ["link-test", "--help"])
    assert f"[auto|{'|'.join(sorted(installed_transports()))}]" in done.output


def test_help_documents_every_exit_code() -> None:
    done = CliRunner().invoke(main, ["link-test", "--help"])
    documented = {int(number) for number in re.findall(r"^ +(\d+) {2,}\w", done.output, re.MULTILINE)}
    assert documented == {0, OUTPUT_LOST, INTERRUPTED, NOBODY_READS} | {code for _, code in EXIT_CODES}


def test_help_of_serve_lists_what_serve_can_return_and_either_name_of_the_strict_mode_works() -> None:
    served = CliRunner().invoke(main, ["link-test", "serve", "--help"]).output
    documented = {int(number) for number in re.findall(r"^ +(\d+) {2,}\w", served, re.MULTILINE)}
    assert documented == {0, 1, 2, 3}
    helped = CliRunner().invoke(main, ["link-test", "--help"]).output
    assert "--require-rdma, --require-one-sided" in helped
    assert not re.search(r"\[default: \(", helped)


def test_every_error_has_its_exit_code() -> None:
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, KVRDMAError)]
    codes = {kind.__name__: exit_code(kind("x")) for kind in kinds}
    assert {name: code for name, code in codes.items() if code not in {1, 9}} == {
        "ConfigError": 2,
        "TopologyError": 2,
        "UnreachableError": 3,
        "AuthenticationError": 4,
        "ProtocolVersionError": 5,
        "DataError": 6,
        "TransportUnavailableError": 7,
        "NotOneSidedError": 8,
    }
    assert codes["PeerLostError"] == codes["ReadTimeoutError"] == codes["PeerIdentityError"] == 9
    assert codes["KVRDMAError"] == codes["MessageError"] == 1


def test_nobody_there_is_3() -> None:
    done = run("connect", "127.0.0.1:1", environ={"KVRDMA_CONTROL_TIMEOUT_S": "0.3"})
    assert (done.returncode, done.stdout) == (3, "")
    assert "nobody listens at 127.0.0.1:1" in done.stderr
    assert "is `kvrdma link-test serve` running there?" in done.stderr
    told = run("connect", "127.0.0.1:1", "--json", environ={"KVRDMA_CONTROL_TIMEOUT_S": "0.3"})
    assert told.returncode == 3
    object_ = failure(told.stdout)
    assert (object_["kvrdma"], object_["error"], object_["code"]) == (__version__, "UnreachableError", 3)
    assert told.stderr == f"link-test: {object_['message']}\n"


@pytest.mark.needs("cma")
def test_two_sides_with_one_secret_and_with_another() -> None:
    ours, theirs = {"KVRDMA_SECRET": SECRET}, {"KVRDMA_SECRET": SECRET[::-1]}
    with served("--bind", "127.0.0.1:0", environ=ours) as endpoint:
        good = run("connect", endpoint, "--json", *SMALL, environ=ours)
        assert good.returncode == 0, good.stderr
        assert json.loads(good.stdout)["verified"] is True
        for environ in (theirs, {}):
            bad = run("connect", endpoint, environ=environ)
            assert (bad.returncode, bad.stdout) == (4, "")
            assert "KVRDMA_SECRET" in bad.stderr
        near = run("connect", endpoint, "--transport", "memory", environ=ours)
        assert near.returncode == 7
        assert "memory reaches no further than its own process: use auto or one that reaches other" in near.stderr
        assert "(cma" in near.stderr
        again = run("connect", endpoint, "--json", *SMALL, environ=ours)
        assert json.loads(again.stdout)["verified"] is True


def test_another_version_is_5() -> None:
    def answer(message: wire.Message) -> wire.Message:
        raise errors.ProtocolVersionError(f"{message}: this side speaks 99")

    server = SideChannelServer(Endpoint("127.0.0.1", 0), answer)
    done = run("connect", str(server.endpoint))
    server.close()
    assert (done.returncode, done.stdout) == (5, "")
    assert "this side speaks 99" in done.stderr


WRONG_BYTES = """
    import sys
    from kvrdma.bench import link
    from kvrdma.bench.patterns import Mismatch
    from kvrdma.cli import main
    link.find_mismatch = lambda *_: Mismatch(3, 24, 48, 1, 2)
    main(["link-test", *sys.argv[1:]])
"""


def test_wrong_bytes_are_6_and_said_in_the_report() -> None:
    script = "\n".join(line.strip() for line in WRONG_BYTES.splitlines())
    arguments = ("--transport", "memory", "--json", "--pattern", "contig", *SMALL)
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 6, done.stderr
    report = json.loads(done.stdout)
    assert report["verified"] is False
    assert [case["verified"] for case in report["cases"]] == [False, False]
    assert "contig, blocks of 4096 bytes: row 3 is wrong at local byte 24 (remote byte 48)" in done.stderr


def test_a_gpu_that_cannot_be_used_is_2() -> None:
    if installed_gpu():
        pytest.skip("this host has CuPy, or a torch with CUDA")
    done = run("--device", "cuda:0")
    assert (done.returncode, done.stdout) == (2, "")
    assert "pip install 'kvrdma[cuda12]'" in done.stderr


def installed_gpu() -> bool:
    probe = "import torch; raise SystemExit(not torch.cuda.is_available())"
    found = [
        subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode
        for code in ("import cupy", probe)
    ]
    return 0 in found


@pytest.mark.needs("ucx")
def test_emulated_reads_are_reported_and_can_be_ruled_out() -> None:
    emulated = run("--transport", "ucx", "--json", *SMALL, environ={"UCX_TLS": "tcp"})
    assert emulated.returncode == 0, emulated.stderr
    report = json.loads(emulated.stdout)
    assert (report["transport"], report["one_sided"], report["verified"]) == ("ucx", False, True)
    assert re.fullmatch(r"\d+\.\d+\.\d+", report["ucx"]["version"])
    assert "libucp" in report["ucx"]["library"]
    strict = run("--transport", "ucx", "--json", "--require-rdma", *SMALL, environ={"UCX_TLS": "tcp"})
    assert (strict.returncode, failure(strict.stdout)["error"]) == (8, "NotOneSidedError")


def children(pid: int) -> list[int]:
    with open(f"/proc/{pid}/task/{pid}/children") as listed:  # noqa: PTH123
        return [int(child) for child in listed.read().split()]


@contextmanager
def long_test() -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A link test in the middle of its reads, and its peer's process id."""
    script = """
        import signal, sys
        from kvrdma.cli import main
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a test run in the background ignores it
        main(["link-test", *sys.argv[1:]])
    """
    lines = "\n".join(line.strip() for line in script.splitlines())
    arguments = ("--transport", "cma", "--nbytes", "1M", "--block", "4K", "--pattern", "contig", "--iters", "100000")
    with subprocess.Popen(
        [sys.executable, "-c", lines, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "1/1 contig 256 x 4 KiB\n"
        (peer,) = children(process.pid)
        yield process, peer
        process.kill()


def gone(pid: int) -> bool:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.02)
    return False


@pytest.mark.needs("cma")
def test_a_peer_killed_in_the_middle_is_9_and_no_hang() -> None:
    with long_test() as (process, peer):
        os.kill(peer, signal.SIGKILL)
        _, said = process.communicate(timeout=30)
        assert process.returncode == 9, said
        assert said.startswith("link-test: ")


@pytest.mark.needs("cma")
def test_ctrl_c_is_130_and_leaves_no_peer() -> None:
    with long_test() as (process, peer):
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=30)
        assert (process.returncode, said) == (130, "link-test: interrupted\n")
        assert gone(peer)
