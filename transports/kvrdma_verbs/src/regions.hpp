// The memory registered by this process with every NIC, and the table by which peers see that it still is.
//
// A region's cookie stands in the table from registration to deregistration. A reader that has its bytes reads the
// cookie, too, and compares it with the one in the region's key.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "cookies.hpp"
#include "device.hpp"
#include "slots.hpp"

namespace kvrdma::verbs {

using Devices = std::vector<std::unique_ptr<Device>>;

// One registration with every NIC.
class Registrations {
  public:
    Registrations() = default;
    // `cuda` is the index of the GPU, or negative for host memory.
    Registrations(const Devices &devices, uint64_t addr, uint64_t nbytes, int cuda);
    ~Registrations();
    Registrations(Registrations &&other) noexcept : mrs_(std::move(other.mrs_)) { other.mrs_.clear(); }
    Registrations &operator=(Registrations &&other) noexcept {
        mrs_.swap(other.mrs_);
        return *this;
    }

    uint32_t lkey(size_t device) const noexcept { return mrs_[device]->lkey; }
    std::vector<uint32_t> rkeys() const;

  private:
    void release() noexcept;

    std::vector<ibv_mr *> mrs_;
};

// Page-aligned memory of our own, registered with every NIC.
class OwnMemory {
  public:
    OwnMemory(const Devices &devices, size_t nbytes);
    ~OwnMemory();
    OwnMemory(const OwnMemory &) = delete;
    OwnMemory &operator=(const OwnMemory &) = delete;

    uint8_t *data() const noexcept { return data_; }
    const Registrations &registrations() const noexcept { return registrations_; }

  private:
    size_t nbytes_;
    uint8_t *data_;
    Registrations registrations_;
};

struct Registered {
    uint64_t id;
    uint32_t slot;
    Cookie cookie;
    std::vector<uint32_t> rkeys; // by device
};

class Regions {
  public:
    static constexpr uint32_t kSlots = Slots::kSlots;

    explicit Regions(const Devices &devices);
    ~Regions();

    Registered add(uint64_t addr, uint64_t nbytes, int cuda);
    void remove(uint64_t id);

    Slots &slots() noexcept { return slots_; }
    uint32_t lkey(uint32_t slot, size_t device) const noexcept { return memory_[slot].lkey(device); } // of a busy one
    const Cookie &instance() const noexcept { return instance_; }
    const OwnMemory &table() const noexcept { return table_; }

  private:
    const Devices &devices_;
    OwnMemory table_;
    const Cookie instance_;
    Slots slots_;
    const std::unique_ptr<Registrations[]> memory_; // by slot
};

} // namespace kvrdma::verbs
