"""Applies a reshape where the pages are: host memory or a CUDA device."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from kvrdma.errors import ReshapeError
from kvrdma.reshape.cpu import apply_cpu
from kvrdma.reshape.cuda import cuda_reshaper
from kvrdma.reshape.pages import page_indices, paged

if TYPE_CHECKING:
    from kvrdma.reshape.pages import PagedMemory, Pages, Tensor
    from kvrdma.reshape.spec import Reshape


def apply(reshape: Reshape, tensor: Tensor, pages: Pages) -> None:
    """Applies ``reshape`` in place to some pages of a cache tensor; all other pages stay untouched.

    On the CPU the work is done on return. On CUDA it is queued on the tensor library's current stream.

    Args:
        reshape: what happens to each page.
        tensor: ``[pages, ...]`` of any dtype: torch (cpu, cuda), NumPy or CuPy. See ``paged``.
        pages: distinct numbers of pages, on the host, or int64 on the tensor's device.

    Raises:
        ReshapeError: pages are not dense, smaller than the reshape, out of range or listed twice.
    """
    memory = paged(tensor)
    apply_at(reshape, memory, pages, 0 if memory.device is None else _current_stream(tensor, memory.device))


def apply_at(reshape: Reshape, memory: PagedMemory, pages: Pages, stream: int = 0) -> None:
    """Applies ``reshape`` in place to pages known by address only; otherwise as ``apply``.

    Args:
        reshape: what happens to each page.
        memory: where the pages lie; the caller keeps them alive, on CUDA until the stream has passed.
        pages: distinct numbers of pages.
        stream: ``cudaStream_t`` as an integer; unused for host memory.

    Raises:
        ReshapeError: as for ``apply``.
    """
    memory.require(reshape)
    if memory.device is not None:
        cuda_reshaper(memory.device).apply(reshape, memory, pages, stream)
        return
    if getattr(pages, "__cuda_array_interface__", None) is not None:
        raise ReshapeError("page numbers are on a CUDA device and the pages in host memory: use .cpu() first")
    indices = page_indices(pages, memory.num_pages)
    if indices.size and not reshape.is_identity:
        apply_cpu(reshape, memory, indices)


def _current_stream(tensor: Tensor, device: int) -> int:
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(tensor, torch.Tensor):
        return int(torch.cuda.current_stream(device).cuda_stream)
    import cupy

    with cupy.cuda.Device(device):
        return int(cupy.cuda.get_current_stream().ptr)
