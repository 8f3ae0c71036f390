// The calls of the CUDA driver this transport needs, found at run time: a host without a GPU has no driver.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvrdma::ucx {

// Throws RegistrationError unless [addr, addr + nbytes) is memory of GPU `index`. Returns its CUDA context.
void *cuda_context_of(uint64_t addr, uint64_t nbytes, int index);

// Makes the context current in the calling thread: UCX copies GPU memory from whatever thread makes progress.
void make_cuda_context_current(void *context) noexcept;

// Copies between host memory and memory of the host or of the current context's GPU; returns 0 or CUDA's error. What is
// copied out is there on return; what is copied in to a GPU may still be on its way until finish_copies().
int copy_out(void *to, uint64_t from, size_t nbytes, bool cuda) noexcept;
int copy_in(uint64_t to, const void *from, size_t nbytes, bool cuda) noexcept;
int finish_copies() noexcept;

// Whether what a NIC wrote into memory of GPU `index` needs a flush before later kernels see it.
bool needs_write_flush(int index) noexcept;

// Makes what NICs wrote into the current context's GPU visible to later kernels.
void flush_writes() noexcept;

} // namespace kvrdma::ucx
