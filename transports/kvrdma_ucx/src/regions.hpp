// The memory registered by this process, and the table by which peers see that it still is.
//
// A cookie is 16 random bytes. Slot 0 of the table holds the one of this transport; every region has a slot of its
// own from registration to deregistration. A peer that has read a region by GET reads its cookie afterwards, one-sided,
// and compares it with the one in the region's key: this tells it that the memory was still registered when its bytes
// had arrived. A read that is served by messages names the cookie and is checked while it is copied.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <string>
#include <vector>

#include "context.hpp"
#include "messages.hpp"
#include "slots.hpp"

namespace kvrdma::ucx {

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
    static constexpr uint32_t kSlots = Slots::kSlots;

    explicit Regions(const Context &context);
    ~Regions();

    // `cuda` is the index of the GPU, or negative for host memory.
    Registered add(uint64_t addr, uint64_t nbytes, int cuda);
    void remove(uint64_t id);

    uint64_t acquire(const Given &given, const std::vector<uint64_t> &remote, std::vector<Row> &rows,
                     std::vector<uint32_t> &slots) {
        return slots_.acquire(given, remote, rows, slots, [](const Run &) {});
    }
    size_t merge(std::vector<Row> &rows, size_t tail) const { return slots_.merge(rows, tail); }
    void release(std::vector<Row> &rows, const std::vector<uint32_t> &slots) { slots_.release(rows, slots); }

    // Of a busy region only, so from any thread.
    ucp_mem_h memh(uint32_t slot) const noexcept { return about_[slot].memh; }
    ucs_memory_type_t type(uint32_t slot) const noexcept { return about_[slot].type; }
    bool needs_flush(uint32_t slot) const noexcept { return about_[slot].flush; }

    // While one lives nothing is deregistered.
    class Reading {
      public:
        explicit Reading(Regions &regions) : regions_(regions), lock_(regions.slots_.mutex()) {}
        Served copy(const WireRegion &region, const WirePiece &piece, uint8_t *to) const noexcept;

      private:
        const Regions &regions_;
        std::shared_lock<std::shared_mutex> lock_;
    };

    const Cookie &instance() const noexcept { return instance_; }
    uint64_t table_addr() const noexcept { return reinterpret_cast<uint64_t>(table_.data()); }
    std::string table_rkey() const { return context_.pack_rkey(table_.memh()); }

  private:
    struct About {
        ucp_mem_h memh = nullptr;
        Cookie cookie = {};
        ucs_memory_type_t type = UCS_MEMORY_TYPE_HOST;
        bool flush = false;
    };

    void publish(uint32_t slot, const Cookie &cookie) noexcept { publish_cookie(table_.data() + slot * sizeof(Cookie), cookie); }

    const Context &context_;
    OwnMemory table_;
    const Cookie instance_;
    Slots slots_;
    const std::unique_ptr<About[]> about_; // by slot
};

} // namespace kvrdma::ucx
