#include "regions.hpp"

#include <cerrno>
#include <cstring>
#include <cstdio>
#include <mutex>
#include <sys/mman.h>
#include <utility>

#include "cuda.hpp"
#include "errors.hpp"

namespace kvrdma::ucx {

namespace {

// UCX registers any address for a transport that pins nothing, so that the first read would crash this process.
void refuse_unmapped(uint64_t addr, uint64_t nbytes) {
    FILE *maps = std::fopen("/proc/self/maps", "re");
    if (!maps)
        throw StatusError("RegistrationError", "cannot read /proc/self/maps to check the memory to register", errno);
    uint64_t covered = addr, begin, end;
    const uint64_t stop = addr + nbytes;
    char line[512], mode[5];
    while (covered < stop && std::fgets(line, sizeof line, maps)) {
        if (std::sscanf(line, "%lx-%lx %4s", &begin, &end, mode) == 3 && mode[0] == 'r' && begin <= covered &&
            covered < end)
            covered = end;
    }
    std::fclose(maps);
    if (covered >= stop)
        return;
    char text[200];
    std::snprintf(text, sizeof text, "[0x%lx, 0x%lx) is not readable memory of this process: nothing is mapped at 0x%lx",
                  addr, stop, covered);
    throw StatusError("RegistrationError", text);
}

} // namespace

OwnMemory::OwnMemory(const Context &context, size_t nbytes) : context_(context), nbytes_(nbytes) {
    void *memory = mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED)
        throw StatusError("TransportError", "mmap of " + std::to_string(nbytes) + " bytes failed: " + std::strerror(errno), errno);
    data_ = static_cast<uint8_t *>(memory);
    try {
        memh_ = context.map(memory, nbytes, UCS_MEMORY_TYPE_HOST);
    } catch (...) {
        munmap(memory, nbytes);
        throw;
    }
}

OwnMemory::~OwnMemory() {
    context_.unmap(memh_);
    munmap(data_, nbytes_);
}

Regions::Regions(const Context &context)
    : context_(context), table_(context, kSlots * sizeof(Cookie)), instance_(random_cookie()),
      about_(std::make_unique<About[]>(kSlots)) {
    publish(0, instance_);
}

Regions::~Regions() {
    publish(0, Cookie{});
    for (const auto &[id, slot] : slots_.all())
        context_.unmap(about_[slot].memh);
}

Registered Regions::add(uint64_t addr, uint64_t nbytes, int cuda) {
    if (nbytes == 0 || addr == 0 || addr + nbytes < addr)
        throw StatusError("RegistrationError", "cannot register " + std::to_string(nbytes) + " bytes at address " +
                                                   std::to_string(addr));
    if (cuda >= 0)
        (void)cuda_context_of(addr, nbytes, cuda);
    else
        refuse_unmapped(addr, nbytes);
    const ucs_memory_type_t type = cuda >= 0 ? UCS_MEMORY_TYPE_CUDA : UCS_MEMORY_TYPE_HOST;
    const ucp_mem_h memh = context_.map(reinterpret_cast<void *>(addr), nbytes, type); // may take seconds: no lock
    try {
        Registered made{0, 0, random_cookie(), context_.pack_rkey(memh)};
        std::unique_lock lock(slots_.mutex());
        const Slots::Added added = slots_.add(addr, nbytes);
        made.id = added.id, made.slot = added.slot;
        about_[made.slot] = {memh, made.cookie, type, cuda >= 0 && needs_write_flush(cuda)};
        publish(made.slot, made.cookie);
        return made;
    } catch (...) {
        context_.unmap(memh);
        throw;
    }
}

void Regions::remove(uint64_t id) {
    ucp_mem_h memh = nullptr;
    {
        std::unique_lock lock(slots_.mutex());
        const uint32_t slot = slots_.remove(id);
        publish(slot, Cookie{}); // before the memory can be reused: whoever reads it from now on is told
        memh = std::exchange(about_[slot].memh, nullptr);
    }
    context_.unmap(memh);
}

Served Regions::Reading::copy(const WireRegion &region, const WirePiece &piece, uint8_t *to) const noexcept {
    if (region.slot >= kSlots)
        return Served::kStale;
    const About &about = regions_.about_[region.slot];
    const Slots::Region &memory = regions_.slots_[region.slot];
    if (!about.memh || about.cookie != region.cookie)
        return Served::kStale;
    if (piece.nbytes > memory.nbytes || piece.offset > memory.nbytes - piece.nbytes)
        return Served::kOutOfBounds;
    const int failed = copy_out(to, memory.addr + piece.offset, piece.nbytes, about.type == UCS_MEMORY_TYPE_CUDA);
    return failed ? Served::kCopyFailed : Served::kBytes;
}

} // namespace kvrdma::ucx
