"""NVRTC compiles the kernel for the GPUs we name, without spilling a register to memory."""

from __future__ import annotations

import re

import pytest

from kvrdma.reshape.cuda import SOURCE

RESOURCES = re.compile(
    r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads.*?Used (\d+) registers",
    re.DOTALL,
)


@pytest.mark.needs("nvrtc")
@pytest.mark.parametrize("architecture", ["sm_80", "sm_90", "sm_100"])
def test_kernel_compiles_without_spills(architecture: str) -> None:
    status, log, cubin_nbytes = compile_kernel(SOURCE.read_text(), architecture)
    assert status == 0, log
    found = RESOURCES.search(log)
    assert found, f"no resource information in the compiler's log: {log!r}"
    stack, stores, loads, registers = map(int, found.groups())
    assert (stack, stores, loads) == (0, 0, 0)
    assert registers <= 64  # 256 threads a block: at least four blocks fit the registers of an SM
    assert cubin_nbytes > 0


@pytest.mark.needs("nvrtc")
def test_a_kernel_that_spills_would_be_noticed() -> None:
    source = (
        'extern "C" __global__ void __launch_bounds__(1024, 2) spill(float* p) { float v[90];'
        "for (int i = 0; i < 90; ++i) v[i] = p[i * 7 + threadIdx.x]; __syncthreads();"
        "for (int j = 0; j < 90; ++j) for (int i = 0; i < 90; ++i) v[i] = v[i] * v[(i + j) % 90] + p[j];"
        "for (int i = 0; i < 90; ++i) p[i + threadIdx.x] = v[i]; }"
    )
    _, log, _ = compile_kernel(source, "sm_80")
    found = RESOURCES.search(log)
    assert found
    assert max(map(int, found.groups()[:3])) > 0


def compile_kernel(source: str, architecture: str) -> tuple[int, str, int]:
    """Gives NVRTC's status, its log with the assembler's resource report, and the size of the binary."""
    from cuda.bindings import nvrtc

    error, program = nvrtc.nvrtcCreateProgram(source.encode(), b"reshape.cu", 0, [], [])
    assert error == nvrtc.nvrtcResult.NVRTC_SUCCESS
    options = [f"--gpu-architecture={architecture}".encode(), b"--std=c++17", b"--ptxas-options=-v"]
    (status,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
    _, log_nbytes = nvrtc.nvrtcGetProgramLogSize(program)
    log = b" " * log_nbytes
    nvrtc.nvrtcGetProgramLog(program, log)
    _, cubin_nbytes = nvrtc.nvrtcGetCUBINSize(program)
    nvrtc.nvrtcDestroyProgram(program)
    return int(status), log.decode(), int(cubin_nbytes)
