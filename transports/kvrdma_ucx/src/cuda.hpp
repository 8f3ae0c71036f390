// The five calls of the CUDA driver this transport needs, found at run time: a host without a GPU has no driver.
#pragma once

#include <cstdint>

namespace kvrdma::ucx {

// Throws RegistrationError unless [addr, addr + nbytes) is memory of GPU `index`. Returns its CUDA context.
void *cuda_context_of(uint64_t addr, uint64_t nbytes, int index);

// Makes the context current in the calling thread: UCX copies GPU memory from whatever thread makes progress.
void make_cuda_context_current(void *context) noexcept;

// Whether what a NIC wrote into memory of GPU `index` needs a flush before later kernels see it.
bool needs_write_flush(int index) noexcept;

// Makes what NICs wrote into the current context's GPU visible to later kernels.
void flush_writes() noexcept;

} // namespace kvrdma::ucx
