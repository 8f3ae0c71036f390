// Another process of this host: who it is, whether it lives, and its memory.
#pragma once

#include <cstdint>
#include <sys/types.h>
#include <sys/uio.h>
#include <vector>

#include "cookies.hpp"

namespace kvrdma::cma {

// Start time of a process in clock ticks since boot (field 22 of /proc/PID/stat), 0 if there is no such process.
// With the PID it names one process for as long as the host is up.
uint64_t start_time(pid_t pid);

// Owns a pidfd: readable once the process has exited, and never about another process that reuses the PID.
class PidFd {
  public:
    explicit PidFd(pid_t pid); // throws ConnectError
    ~PidFd();
    PidFd(const PidFd &) = delete;
    PidFd &operator=(const PidFd &) = delete;

    int fd() const noexcept { return fd_; }
    bool exited() const noexcept;

  private:
    int fd_;
};

// The pieces of one process_vm_readv call. Pieces adjacent on one side only are joined on that side: the kernel
// takes two independent lists.
class Pieces {
  public:
    static constexpr size_t kMax = 512; // of IOV_MAX 1024; more gains nothing and delays cancellation

    Pieces();
    void clear() noexcept;
    bool full() const noexcept { return local_.size() == kMax || remote_.size() == kMax; }
    bool empty() const noexcept { return local_.empty(); }
    void add(uint64_t local, uint64_t remote, uint64_t nbytes);

    struct Result {
        int error; // errno, 0 when everything was read
        uint64_t local, remote; // where it stopped
    };
    // Reads everything, however often the kernel stops early. Leaves the pieces consumed.
    Result read_from(pid_t pid);

  private:
    std::vector<iovec> local_, remote_;
    uint64_t nbytes_ = 0;
};

// Reads a few bytes of another process; returns errno or 0.
int peek(pid_t pid, uint64_t remote, void *local, size_t nbytes);

} // namespace kvrdma::cma
