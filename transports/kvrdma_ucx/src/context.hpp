// The UCP context: the settings it is opened with, what it found on this machine, and registration.
#pragma once

#include <cstdint>
#include <cstdio>
#include <functional>
#include <string>
#include <vector>

#include <ucp/api/ucp.h>

namespace kvrdma::ucx {

struct Options {
    bool require_one_sided = false;
    uint32_t max_in_flight = 64; // requests per peer
    bool peer_errors = true;     // false only in tests: lanes that cannot report a lost peer may then be used
};

class Context {
  public:
    Context();
    ~Context();
    Context(const Context &) = delete;
    Context &operator=(const Context &) = delete;

    ucp_context_h handle() const noexcept { return handle_; }
    bool supports(ucs_memory_type_t type) const noexcept { return memory_types_ & UCS_BIT(type); }
    // "rc_mlx5/mlx5_0:1", "tcp/eth0", ...: every transport and device UCX opened.
    const std::vector<std::string> &resources() const noexcept { return resources_; }
    // Whether UCX can be told to cancel a GET it would have to emulate (1.13 cannot); else the lanes must tell.
    bool refuses_emulation() const noexcept { return refuses_emulation_; }

    // Whether UCX aborts the process when a connection is given up that is not wired up ("got REQ message" in
    // ucp_request.c, seen with 1.13 over UD): such an endpoint is left alone for ever, and so are its worker and this.
    bool aborts_half_open() const noexcept { return aborts_half_open_; }
    void leave_open() noexcept { left_open_ = true; }

    ucp_mem_h map(void *addr, size_t nbytes, ucs_memory_type_t type) const;
    void unmap(ucp_mem_h memh) const noexcept;
    std::string pack_rkey(ucp_mem_h memh) const;

  private:
    void query();

    ucp_context_h handle_ = nullptr;
    uint64_t memory_types_ = 0;
    bool refuses_emulation_ = false, aborts_half_open_ = true, left_open_ = false;
    std::vector<std::string> resources_;
};

std::string ucx_version();

// What a UCX function prints to a FILE*: the only way to some facts in 1.13.
std::string printed(const std::function<void(FILE *)> &print);
std::string joined(const std::vector<std::string> &words);

// Whether a GET over this UCX transport ("rc_mlx5") needs nothing from the target's CPU. Unknown names count as no.
bool is_one_sided(const std::string &transport) noexcept;

} // namespace kvrdma::ucx
