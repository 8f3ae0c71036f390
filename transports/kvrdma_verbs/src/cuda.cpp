#include "cuda.hpp"

#include <cstddef>
#include <dlfcn.h>
#include <string>
#include <unistd.h>

#include "errors.hpp"

namespace kvrdma::verbs {

namespace {

constexpr int kDmabufHandle = 1; // CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD
constexpr uint64_t kHostPage = 4096;

using GetHandle = int (*)(void *, uint64_t, size_t, int, unsigned long long);

} // namespace

Dmabuf::Dmabuf(uint64_t addr, uint64_t nbytes, int index) {
    void *driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
    if (!driver)
        throw StatusError("RegistrationError", "memory cannot be on cuda:" + std::to_string(index) +
                                                   ": this machine has no CUDA driver (libcuda.so.1)");
    const auto get = reinterpret_cast<GetHandle>(dlsym(driver, "cuMemGetHandleForAddressRange"));
    const uint64_t begin = addr & ~(kHostPage - 1), end = (addr + nbytes + kHostPage - 1) & ~(kHostPage - 1);
    offset_ = addr - begin;
    if (!get || get(&fd_, begin, end - begin, kDmabufHandle, 0) != 0)
        fd_ = -1;
}

Dmabuf::~Dmabuf() {
    if (fd_ >= 0)
        ::close(fd_);
}

} // namespace kvrdma::verbs
