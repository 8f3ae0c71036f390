#include "regions.hpp"

#include <algorithm>
#include <bitset>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <mutex>
#include <sys/mman.h>
#include <sys/random.h>
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

std::string unknown_region(uint64_t id) {
    return "region " + std::to_string(id) + " is not registered here, or was deregistered before";
}

} // namespace

Cookie random_cookie() {
    Cookie cookie;
    if (getrandom(cookie.data(), cookie.size(), 0) != static_cast<ssize_t>(cookie.size()))
        throw StatusError("TransportError", "getrandom failed", errno);
    return cookie;
}

OwnMemory::OwnMemory(const Context &context, size_t nbytes) : context_(context), nbytes_(nbytes) {
    void *memory = mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED)
        throw StatusError("TransportError", "mmap of " + std::to_string(nbytes) + " bytes failed", errno);
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
      slots_(std::make_unique<Slot[]>(kSlots)) {
    publish(0, instance_);
}

Regions::~Regions() {
    publish(0, Cookie{});
    for (const auto &[id, slot] : slot_of_)
        context_.unmap(slots_[slot].memh);
}

// The first half goes last when a cookie appears and first when it vanishes, so that no reader sees a valid one that
// is not: a torn cookie differs from both.
void Regions::publish(uint32_t slot, const Cookie &cookie) noexcept {
    uint64_t halves[2];
    std::memcpy(halves, cookie.data(), sizeof halves);
    auto *words = reinterpret_cast<uint64_t *>(table_.data() + slot * sizeof(Cookie));
    std::atomic_ref(words[0]).store(0, std::memory_order_seq_cst);
    std::atomic_ref(words[1]).store(halves[1], std::memory_order_seq_cst);
    std::atomic_ref(words[0]).store(halves[0], std::memory_order_seq_cst);
}

uint32_t Regions::free_slot() {
    if (!free_.empty()) {
        const uint32_t slot = free_.back();
        free_.pop_back();
        return slot;
    }
    if (used_ == kSlots)
        throw StatusError("RegistrationError", "this transport has " + std::to_string(kSlots - 1) +
                                                   " regions, its most: register whole allocations, not blocks");
    return used_++;
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
        std::unique_lock lock(mutex_);
        made.slot = free_slot();
        made.id = next_id_++;
        slot_of_.emplace(made.id, made.slot);
        Slot &slot = slots_[made.slot];
        slot.memh = memh, slot.addr = addr, slot.nbytes = nbytes, slot.type = type, slot.cookie = made.cookie;
        slot.flush = cuda >= 0 && needs_write_flush(cuda);
        table_of_rows_.add(made.slot, addr, nbytes);
        publish(made.slot, made.cookie);
        return made;
    } catch (...) {
        context_.unmap(memh);
        throw;
    }
}

// Regions may overlap, and a read knows one region for each of its rows: then only the rows can tell.
size_t Regions::reads_into(const Slot &region) {
    if (const uint32_t reads = region.reads.load(std::memory_order_acquire))
        return reads;
    const uint64_t begin = region.addr, end = begin + region.nbytes;
    const bool shared = std::any_of(slot_of_.begin(), slot_of_.end(), [&](const auto &known) {
        const Slot &other = slots_[known.second];
        return other.addr < end && begin < other.addr + other.nbytes && other.reads.load(std::memory_order_acquire);
    });
    if (!shared)
        return 0;
    std::lock_guard lock(in_flight_mutex_);
    return std::count_if(in_flight_.begin(), in_flight_.end(), [&](const std::vector<Row> *rows) {
        return std::any_of(rows->begin(), rows->end(), [&](const Row &row) {
            return row.length > 0 && row.local < end && begin < row.local + row.length;
        });
    });
}

void Regions::remove(uint64_t id) {
    ucp_mem_h memh = nullptr;
    {
        std::unique_lock lock(mutex_);
        const auto found = slot_of_.find(id);
        if (found == slot_of_.end())
            throw StatusError("RegistrationError", unknown_region(id));
        const uint32_t slot = found->second;
        if (const size_t reads = reads_into(slots_[slot]))
            throw StatusError("RegionBusyError", "region " + std::to_string(id) + " of " +
                                                     std::to_string(slots_[slot].nbytes) + " bytes is written by " +
                                                     std::to_string(reads) + " reads that have not ended; poll first");
        publish(slot, Cookie{}); // before the memory can be reused: whoever reads it from now on is told
        memh = std::exchange(slots_[slot].memh, nullptr);
        table_of_rows_.remove(slot);
        slot_of_.erase(found);
        free_.push_back(slot);
    }
    context_.unmap(memh);
}

Served Regions::Reading::copy(const WireRegion &region, const WirePiece &piece, uint8_t *to) const noexcept {
    if (region.slot >= kSlots)
        return Served::kStale;
    const Slot &slot = regions_.slots_[region.slot];
    if (!slot.memh || slot.cookie != region.cookie)
        return Served::kStale;
    if (piece.nbytes > slot.nbytes || piece.offset > slot.nbytes - piece.nbytes)
        return Served::kOutOfBounds;
    const int failed = copy_out(to, slot.addr + piece.offset, piece.nbytes, slot.type == UCS_MEMORY_TYPE_CUDA);
    return failed ? Served::kCopyFailed : Served::kBytes;
}

uint64_t Regions::acquire(const Row *given, size_t count, const std::vector<uint64_t> &remote, std::vector<Row> &rows,
                          std::vector<uint32_t> &slots) {
    rows = buffers_.take();
    std::shared_lock lock(mutex_);
    std::bitset<kSlots> seen;
    const uint64_t nbytes = take_rows(given, count, rows, table_of_rows_, remote, [&](const Run &run) {
        if (run.begin < run.end && !seen.test(run.local_region)) {
            seen.set(run.local_region);
            slots.push_back(run.local_region);
        }
    });
    {
        std::lock_guard adding(in_flight_mutex_);
        in_flight_.insert(&rows);
    }
    for (uint32_t slot : slots)
        slots_[slot].reads.fetch_add(1, std::memory_order_relaxed);
    return nbytes;
}

void Regions::merge(std::vector<Row> &rows) {
    std::shared_lock lock(mutex_); // reads_into() may not look at them meanwhile
    merge_rows(rows);
}

void Regions::release(std::vector<Row> &rows, const std::vector<uint32_t> &slots) {
    {
        std::lock_guard lock(in_flight_mutex_);
        in_flight_.erase(&rows);
    }
    for (uint32_t slot : slots)
        slots_[slot].reads.fetch_sub(1, std::memory_order_release);
    buffers_.give_back(std::move(rows));
}

} // namespace kvrdma::ucx
