#include "regions.hpp"

#include <cerrno>
#include <cstring>
#include <sys/mman.h>
#include <unistd.h>
#include <utility>

#include "cuda.hpp"
#include "errors.hpp"

namespace kvrdma::verbs {

Registrations::Registrations(const Devices &devices, uint64_t addr, uint64_t nbytes, int cuda) {
    try {
        if (cuda < 0) {
            for (const auto &device : devices)
                mrs_.push_back(device->register_host(reinterpret_cast<void *>(addr), nbytes));
            return;
        }
        const Dmabuf exported(addr, nbytes, cuda);
        for (const auto &device : devices)
            mrs_.push_back(device->register_cuda(addr, nbytes, exported.fd(), exported.offset()));
    } catch (...) {
        release();
        throw;
    }
}

Registrations::~Registrations() { release(); }

void Registrations::release() noexcept {
    for (ibv_mr *mr : mrs_)
        library().dereg_mr(mr);
    mrs_.clear();
}

std::vector<uint32_t> Registrations::rkeys() const {
    std::vector<uint32_t> keys;
    for (const ibv_mr *mr : mrs_)
        keys.push_back(mr->rkey);
    return keys;
}

namespace {

uint8_t *own_pages(size_t nbytes) {
    void *memory = mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED)
        throw StatusError("TransportError", "mmap of " + std::to_string(nbytes) + " bytes failed: " + std::strerror(errno), errno);
    return static_cast<uint8_t *>(memory);
}

} // namespace

OwnMemory::OwnMemory(const Devices &devices, size_t nbytes) : nbytes_(nbytes), data_(own_pages(nbytes)) {
    try {
        registrations_ = Registrations(devices, reinterpret_cast<uint64_t>(data_), nbytes, -1);
    } catch (...) {
        munmap(data_, nbytes_);
        throw;
    }
}

OwnMemory::~OwnMemory() {
    registrations_ = Registrations(); // swapped out and released before the pages go
    munmap(data_, nbytes_);
}

Regions::Regions(const Devices &devices)
    : devices_(devices), table_(devices, kSlots * sizeof(Cookie)), instance_(random_cookie()),
      memory_(std::make_unique<Registrations[]>(kSlots)) {
    publish_cookie(table_.data(), instance_);
}

Regions::~Regions() { publish_cookie(table_.data(), Cookie{}); }

Registered Regions::add(uint64_t addr, uint64_t nbytes, int cuda) {
    Registrations made(devices_, addr, nbytes, cuda); // may take seconds: no lock
    Registered registered{0, 0, random_cookie(), made.rkeys()};
    std::unique_lock lock(slots_.mutex());
    const Slots::Added added = slots_.add(addr, nbytes);
    registered.id = added.id, registered.slot = added.slot;
    memory_[added.slot] = std::move(made);
    publish_cookie(table_.data() + added.slot * sizeof(Cookie), registered.cookie);
    return registered;
}

void Regions::remove(uint64_t id) {
    Registrations gone; // released without the lock
    std::unique_lock lock(slots_.mutex());
    const uint32_t slot = slots_.remove(id);
    publish_cookie(table_.data() + slot * sizeof(Cookie), Cookie{}); // before the memory can be reused
    gone = std::move(memory_[slot]);
    lock.unlock();
}

} // namespace kvrdma::verbs
