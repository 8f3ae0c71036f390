#include "cuda.hpp"

#include <cstdio>
#include <cstring>
#include <dlfcn.h>
#include <string>

#include "errors.hpp"

namespace kvrdma::ucx {

namespace {

// Values of cuda.h, which a build without the toolkit does not have.
constexpr int kAttributeContext = 1, kAttributeDeviceOrdinal = 9;
constexpr int kDeviceFlushWritesOptions = 117, kDeviceWritesOrdering = 118;
constexpr int kFlushOptionHost = 1, kOrderingOwner = 100;
constexpr int kFlushTargetCurrentContext = 0, kFlushToOwner = 100;

struct Driver {
    int (*get_pointer_attribute)(void *, int, uint64_t) = nullptr;
    int (*set_current)(void *) = nullptr;
    int (*retain_primary)(void **, int) = nullptr;
    int (*get_device_attribute)(int *, int, int) = nullptr;
    int (*flush_rdma_writes)(int, int) = nullptr;
    int (*copy_to_host)(void *, uint64_t, size_t) = nullptr;
    int (*copy_to_device)(uint64_t, const void *, size_t) = nullptr;
    int (*wait_for_stream)(void *) = nullptr;
    bool loaded = false;

    Driver() {
        void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
        loaded = library && find(library, "cuPointerGetAttribute", get_pointer_attribute) &&
                 find(library, "cuCtxSetCurrent", set_current) &&
                 find(library, "cuDevicePrimaryCtxRetain", retain_primary) &&
                 find(library, "cuDeviceGetAttribute", get_device_attribute) &&
                 find(library, "cuMemcpyDtoH_v2", copy_to_host) && find(library, "cuMemcpyHtoD_v2", copy_to_device);
        if (!loaded)
            return;
        find(library, "cuStreamSynchronize", wait_for_stream);
        find(library, "cuFlushGPUDirectRDMAWrites", flush_rdma_writes); // CUDA 11.3 and newer
    }

    template <typename Function> static bool find(void *library, const char *name, Function &function) {
        function = reinterpret_cast<Function>(dlsym(library, name));
        return function != nullptr;
    }
};

const Driver &driver() {
    static const Driver one;
    return one;
}

[[noreturn]] void refuse(uint64_t addr, const std::string &why, int code = 0) {
    char where[40];
    snprintf(where, sizeof where, "memory at 0x%llx ", static_cast<unsigned long long>(addr));
    throw StatusError("RegistrationError", where + why, code);
}

} // namespace

void *cuda_context_of(uint64_t addr, uint64_t nbytes, int index) {
    const std::string device = "cuda:" + std::to_string(index);
    if (!driver().loaded)
        refuse(addr, "cannot be on " + device + ": this machine has no CUDA driver (libcuda.so.1)");
    for (uint64_t at : {addr, addr + nbytes - 1}) {
        int ordinal = -1;
        if (int status = driver().get_pointer_attribute(&ordinal, kAttributeDeviceOrdinal, at))
            refuse(at, "is not CUDA memory of this process (CUDA error " + std::to_string(status) + ")", status);
        if (ordinal != index)
            refuse(at, "is on cuda:" + std::to_string(ordinal) + ", not on " + device);
    }
    void *context = nullptr; // null for memory mapped by the virtual memory calls: it belongs to no context
    if (driver().get_pointer_attribute(&context, kAttributeContext, addr) || !context)
        if (int status = driver().retain_primary(&context, index))
            refuse(addr, "has no CUDA context (CUDA error " + std::to_string(status) + ")", status);
    return context;
}

void make_cuda_context_current(void *context) noexcept {
    if (driver().loaded)
        driver().set_current(context);
}

int copy_out(void *to, uint64_t from, size_t nbytes, bool cuda) noexcept {
    if (cuda)
        return driver().copy_to_host(to, from, nbytes);
    std::memcpy(to, reinterpret_cast<const void *>(from), nbytes);
    return 0;
}

int copy_in(uint64_t to, const void *from, size_t nbytes, bool cuda) noexcept {
    if (cuda)
        return driver().copy_to_device(to, from, nbytes);
    std::memcpy(reinterpret_cast<void *>(to), from, nbytes);
    return 0;
}

int finish_copies() noexcept { return driver().wait_for_stream ? driver().wait_for_stream(nullptr) : 0; }

bool needs_write_flush(int index) noexcept {
    if (!driver().loaded || !driver().flush_rdma_writes)
        return false;
    int ordering = 0, options = 0;
    if (driver().get_device_attribute(&ordering, kDeviceWritesOrdering, index) ||
        driver().get_device_attribute(&options, kDeviceFlushWritesOptions, index))
        return false;
    return ordering < kOrderingOwner && (options & kFlushOptionHost);
}

void flush_writes() noexcept {
    if (driver().loaded && driver().flush_rdma_writes)
        driver().flush_rdma_writes(kFlushTargetCurrentContext, kFlushToOwner);
}

} // namespace kvrdma::ucx
