// The memory registered by this process, and the table by which peers see that it still is.
//
// A cookie is 16 random bytes. Slot 0 of the table holds the one of this transport; every region has a slot of its
// own from registration to deregistration. A peer that has read a region by GET reads its cookie afterwards, one-sided,
// and compares it with the one in the region's key: this tells it that the memory was still registered when its bytes
// had arrived. A read that is served by messages names the cookie and is checked while it is copied.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "context.hpp"
#include "messages.hpp"
#include "rows.hpp"

namespace kvrdma::ucx {

Cookie random_cookie();

// Page-aligned host memory of our own, registered for its whole life.
class OwnMemory {
  public:
    OwnMemory(const Context &context, size_t nbytes);
    ~OwnMemory();
    OwnMemory(const OwnMemory &) = delete;
    OwnMemory &operator=(const OwnMemory &) = delete;

    uint8_t *data() const noexcept { return data_; }
    ucp_mem_h memh() const noexcept { return memh_; }

  private:
    const Context &context_;
    size_t nbytes_;
    uint8_t *data_;
    ucp_mem_h memh_ = nullptr;
};

struct Registered {
    uint64_t id;
    uint32_t slot;
    Cookie cookie;
    std::string rkey;
};

class Regions {
  public:
    static constexpr uint32_t kSlots = 16384;

    explicit Regions(const Context &context);
    ~Regions();

    // `cuda` is the index of the GPU, or negative for host memory.
    Registered add(uint64_t addr, uint64_t nbytes, int cuda);
    void remove(uint64_t id);

    // Copies a batch, checked, and returns its bytes. Until release(), which takes the rows, the regions in `slots`,
    // through which it is written, and every other one that holds a byte of it are busy; `rows` must not move.
    uint64_t acquire(const Row *given, size_t count, const std::vector<uint64_t> &remote, std::vector<Row> &rows,
                     std::vector<uint32_t> &slots);
    void merge(std::vector<Row> &rows);
    void release(std::vector<Row> &rows, const std::vector<uint32_t> &slots);

    // Of a busy region only, so from any thread.
    ucp_mem_h memh(uint32_t slot) const noexcept { return slots_[slot].memh; }
    ucs_memory_type_t type(uint32_t slot) const noexcept { return slots_[slot].type; }
    bool needs_flush(uint32_t slot) const noexcept { return slots_[slot].flush; }

    // While one lives nothing is deregistered.
    class Reading {
      public:
        explicit Reading(Regions &regions) : regions_(regions), lock_(regions.mutex_) {}
        Served copy(const WireRegion &region, const WirePiece &piece, uint8_t *to) const noexcept;

      private:
        const Regions &regions_;
        std::shared_lock<std::shared_mutex> lock_;
    };

    const Cookie &instance() const noexcept { return instance_; }
    uint64_t table_addr() const noexcept { return reinterpret_cast<uint64_t>(table_.data()); }
    std::string table_rkey() const { return context_.pack_rkey(table_.memh()); }

  private:
    struct Slot {
        ucp_mem_h memh = nullptr;
        uint64_t addr = 0, nbytes = 0;
        Cookie cookie = {};
        ucs_memory_type_t type = UCS_MEMORY_TYPE_HOST;
        bool flush = false;
        std::atomic<uint32_t> reads = 0;
    };

    uint32_t free_slot();
    size_t reads_into(const Slot &region);
    void publish(uint32_t slot, const Cookie &cookie) noexcept;

    const Context &context_;
    OwnMemory table_;
    const Cookie instance_;
    std::shared_mutex mutex_; // shared: checking and merging rows; exclusive: registering
    RegionTable table_of_rows_;
    std::unique_ptr<Slot[]> slots_;
    std::vector<uint32_t> free_;
    uint32_t used_ = 1;
    std::unordered_map<uint64_t, uint32_t> slot_of_;
    uint64_t next_id_ = 1;
    std::mutex in_flight_mutex_; // after mutex_, if both
    std::unordered_set<const std::vector<Row> *> in_flight_;
    RowBuffers buffers_;
};

} // namespace kvrdma::ucx
