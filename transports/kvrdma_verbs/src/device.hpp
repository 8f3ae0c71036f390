// One port of one NIC, opened: what it can do, its protection domain, and the channel its completions come by.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <string>

#include "library.hpp"

namespace kvrdma::verbs {

using Gid = std::array<uint8_t, 16>;

// Chosen by kvrdma_verbs/devices.py.
struct PortChoice {
    std::string device;
    uint8_t port;
    int gid_index;
};

// How to reach a port, as the other side must know it.
struct PortAddress {
    Gid gid;
    uint16_t lid;
    uint8_t mtu; // ibv_mtu
    uint8_t ethernet;
};

class Device {
  public:
    explicit Device(const PortChoice &choice);
    ~Device();
    Device(const Device &) = delete;
    Device &operator=(const Device &) = delete;

    // "mlx5_0:1"
    const std::string &name() const noexcept { return name_; }
    ibv_pd *pd() const noexcept { return pd_; }
    ibv_context *context() const noexcept { return context_; }
    ibv_comp_channel *channel() const noexcept { return channel_; }
    uint8_t port() const noexcept { return choice_.port; }
    int gid_index() const noexcept { return choice_.gid_index; }
    const PortAddress &address() const noexcept { return address_; }
    bool active() const noexcept; // asks the port
    uint32_t max_sge() const noexcept { return max_sge_; }
    uint32_t max_requests() const noexcept { return max_requests_; }
    uint8_t max_reads_out() const noexcept { return max_reads_out_; }
    uint8_t max_reads_in() const noexcept { return max_reads_in_; }
    uint64_t max_message() const noexcept { return max_message_; }

    ibv_mr *register_host(void *addr, size_t nbytes) const;         // throws RegistrationError
    ibv_mr *register_cuda(uint64_t addr, size_t nbytes, int dmabuf, uint64_t offset) const;

  private:
    void open();
    void release() noexcept;
    ibv_port_attr query_port() const;

    const PortChoice choice_;
    const std::string name_;
    ibv_context *context_ = nullptr;
    ibv_pd *pd_ = nullptr;
    ibv_comp_channel *channel_ = nullptr;
    PortAddress address_{};
    uint32_t max_sge_ = 1, max_requests_ = 64;
    uint8_t max_reads_out_ = 1, max_reads_in_ = 1;
    uint64_t max_message_ = 0;
};

} // namespace kvrdma::verbs
