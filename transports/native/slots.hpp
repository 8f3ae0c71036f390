// Registered regions by slot, and which of them reads in flight write into: a busy region is not deregistered.
//
// A slot is a region's place in the table of cookies that peers read; it is used again after its region is gone.
#pragma once

#include <algorithm>
#include <atomic>
#include <bitset>
#include <cstdint>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "errors.hpp"
#include "rows.hpp"

namespace kvrdma {

class Slots {
  public:
    static constexpr uint32_t kSlots = 16384; // the first stands for the transport itself

    struct Region {
        uint64_t addr = 0, nbytes = 0;
        std::atomic<uint32_t> reads = 0;
    };
    struct Added {
        uint64_t id;
        uint32_t slot;
    };

    // Shared: checking and merging rows, serving regions; exclusive: add and remove.
    std::shared_mutex &mutex() const noexcept { return mutex_; }
    const Region &operator[](uint32_t slot) const noexcept { return slots_[slot]; }
    // Id and slot of every region.
    const std::unordered_map<uint64_t, uint32_t> &all() const noexcept { return slot_of_; }

    // With mutex() held for writing.
    Added add(uint64_t addr, uint64_t nbytes) {
        const Added made{next_id_, free_slot()};
        ++next_id_;
        slot_of_.emplace(made.id, made.slot);
        slots_[made.slot].addr = addr, slots_[made.slot].nbytes = nbytes;
        table_.add(made.slot, addr, nbytes);
        return made;
    }

    // With mutex() held for writing. Throws RegistrationError, RegionBusyError; else the slot is free again.
    uint32_t remove(uint64_t id) {
        const auto found = slot_of_.find(id);
        if (found == slot_of_.end())
            throw StatusError("RegistrationError", "region " + std::to_string(id) +
                                                       " is not registered here, or was deregistered before");
        const uint32_t slot = found->second;
        if (const size_t reads = reads_into(slots_[slot]))
            throw StatusError("RegionBusyError", "region " + std::to_string(id) + " of " +
                                                     std::to_string(slots_[slot].nbytes) + " bytes is written by " +
                                                     std::to_string(reads) + " reads that have not ended; poll first");
        table_.remove(slot);
        slot_of_.erase(found);
        free_.push_back(slot);
        return slot;
    }

    // Copies a batch, checked, tells `note` of its runs and returns the bytes of its head. Until release(), which takes the rows, the
    // regions in `slots`, through which it is written, and every other one that holds a byte of it are busy; `rows` must
    // not move.
    template <typename Note>
    uint64_t acquire(const Given &given, const std::vector<uint64_t> &remote, std::vector<Row> &rows,
                     std::vector<uint32_t> &slots, Note note) {
        rows = buffers_.take();
        std::shared_lock lock(mutex_);
        std::bitset<kSlots> seen;
        const Taken taken = take_batch(given, rows, table_, remote, [&](const Run &run) {
            if (run.begin < run.end && !seen.test(run.local_region)) {
                seen.set(run.local_region);
                slots.push_back(run.local_region);
            }
            note(run);
        });
        {
            std::lock_guard adding(in_flight_mutex_);
            in_flight_.insert(&rows);
        }
        for (uint32_t slot : slots)
            slots_[slot].reads.fetch_add(1, std::memory_order_relaxed);
        return taken.nbytes;
    }

    // As merge_batch.
    size_t merge(std::vector<Row> &rows, size_t tail) const {
        std::shared_lock lock(mutex_); // reads_into() may not look at them meanwhile
        return merge_batch(rows, tail);
    }

    void release(std::vector<Row> &rows, const std::vector<uint32_t> &slots) {
        {
            std::lock_guard lock(in_flight_mutex_);
            in_flight_.erase(&rows);
        }
        for (uint32_t slot : slots)
            slots_[slot].reads.fetch_sub(1, std::memory_order_release);
        buffers_.give_back(std::move(rows));
    }

  private:
    uint32_t free_slot() {
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

    // Regions may overlap, and a read knows one region for each of its rows: then only the rows can tell.
    size_t reads_into(const Region &region) {
        if (const uint32_t reads = region.reads.load(std::memory_order_acquire))
            return reads;
        const uint64_t begin = region.addr, end = begin + region.nbytes;
        const bool shared = std::any_of(slot_of_.begin(), slot_of_.end(), [&](const auto &known) {
            const Region &other = slots_[known.second];
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

    mutable std::shared_mutex mutex_;
    RegionTable table_;
    const std::unique_ptr<Region[]> slots_ = std::make_unique<Region[]>(kSlots);
    std::vector<uint32_t> free_;
    uint32_t used_ = 1;
    std::unordered_map<uint64_t, uint32_t> slot_of_;
    uint64_t next_id_ = 1;
    std::mutex in_flight_mutex_; // after mutex_, if both
    std::unordered_set<const std::vector<Row> *> in_flight_;
    RowBuffers buffers_;
};

} // namespace kvrdma
