// How two transports join their queue pairs: one message each way over TCP, and the connection stays as a sign of life.
//
// No connection manager and no datagrams of the fabric: a kernel closes the connection of a process that dies, at once
// and also when nothing is being read.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "cookies.hpp"
#include "device.hpp"

namespace kvrdma::verbs {

constexpr uint32_t kMagic = 0x5642564b;
constexpr uint16_t kProtocol = 1;
constexpr uint16_t kMaxQueues = 64;

enum class Verdict : uint16_t { kOk = 0, kOtherInstance = 1, kOtherProtocol = 2, kNoQueues = 3 };

// One queue pair of one side. `device` is an index of the side that is asked.
struct QueueEnd {
    uint16_t device = 0, lid = 0;
    uint8_t mtu = 0, ethernet = 0, reads_in = 0, reserved = 0;
    uint32_t number = 0, psn = 0;
    Gid gid{};
};
static_assert(sizeof(QueueEnd) == 32);

struct Hello {
    uint32_t magic = kMagic;
    uint16_t protocol = kProtocol, queues = 0;
    Cookie instance{}; // of the transport that is meant
};
static_assert(sizeof(Hello) == 24);

struct Answer {
    uint32_t magic = kMagic;
    uint16_t protocol = kProtocol, queues = 0;
    Verdict verdict = Verdict::kOk;
    uint16_t reserved = 0;
};
static_assert(sizeof(Answer) == 12);

// Owns a socket or another descriptor.
class Fd {
  public:
    explicit Fd(int fd = -1) noexcept : fd_(fd) {}
    ~Fd();
    Fd(Fd &&other) noexcept : fd_(other.release()) {}
    Fd &operator=(Fd &&other) noexcept;
    int get() const noexcept { return fd_; }
    int release() noexcept;

  private:
    int fd_;
};

// A socket that listens on every address of this host, non-blocking; throws TransportUnavailableError.
Fd listen_everywhere(uint16_t &port);

// Lets the kernel ask whether the other host is still there: 12 s without an answer, and the connection ends. A stopped
// process answers, by its kernel; a host without power or behind a cut does not, and no NIC tells an idle peer.
void keep_alive(int fd) noexcept;

// Connects to the first of `hosts` that answers, until `deadline_ns` or until `stop` is readable.
Fd connect_to(const std::vector<std::string> &hosts, uint16_t port, int64_t deadline_ns, int stop);

// Sends or receives everything; throws ConnectError at the deadline, if the peer hangs up, or if `stop` is readable.
void send_all(int fd, const void *bytes, size_t nbytes, int64_t deadline_ns, int stop);
void receive_all(int fd, void *bytes, size_t nbytes, int64_t deadline_ns, int stop);

int64_t now_ns();

} // namespace kvrdma::verbs
