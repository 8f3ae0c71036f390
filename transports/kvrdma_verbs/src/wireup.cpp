#include "wireup.hpp"

#include <arpa/inet.h>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <netdb.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>
#include <utility>

#include "errors.hpp"

namespace kvrdma::verbs {

namespace {

constexpr int kBacklog = 256;

[[noreturn]] void refuse(const std::string &why, int code = 0) {
    throw StatusError("ConnectError", why + (code ? std::string(": ") + std::strerror(code) : ""), code);
}

void wait_for(int fd, short events, int64_t deadline_ns, int stop) {
    while (true) {
        const int64_t left_ms = (deadline_ns - now_ns()) / 1'000'000;
        if (left_ms <= 0)
            refuse("the peer did not answer in time: it is stopped, unreachable, or another program has its port", ETIMEDOUT);
        pollfd fds[2] = {{fd, events, 0}, {stop, POLLIN, 0}};
        const int ready = ::poll(fds, stop < 0 ? 1 : 2, static_cast<int>(left_ms));
        if (ready > 0 && stop >= 0 && fds[1].revents)
            throw StatusError("TransportClosedError", "the transport was closed while connecting");
        if (ready > 0 && fds[0].revents)
            return;
        if (ready < 0 && errno != EINTR)
            refuse("poll", errno);
    }
}

Fd connect_one(const addrinfo &where, int64_t deadline_ns, int stop) {
    Fd fd(::socket(where.ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    if (fd.get() < 0)
        refuse("socket", errno);
    if (::connect(fd.get(), where.ai_addr, where.ai_addrlen) != 0) {
        if (errno != EINPROGRESS)
            refuse("connect", errno);
        wait_for(fd.get(), POLLOUT, deadline_ns, stop);
        int error = 0;
        socklen_t nbytes = sizeof error;
        if (::getsockopt(fd.get(), SOL_SOCKET, SO_ERROR, &error, &nbytes) != 0 || error)
            refuse("connect", error);
    }
    const int one = 1;
    (void)::setsockopt(fd.get(), IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    keep_alive(fd.get());
    return fd;
}

} // namespace

int64_t now_ns() {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
        .count();
}

Fd::~Fd() {
    if (fd_ >= 0)
        ::close(fd_);
}

Fd &Fd::operator=(Fd &&other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
}

int Fd::release() noexcept { return std::exchange(fd_, -1); }

void keep_alive(int fd) noexcept {
    constexpr int kOn = 1, kIdleS = 4, kBetweenS = 2, kProbes = 4, kUnansweredMs = 12'000;
    (void)::setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &kOn, sizeof kOn);
    (void)::setsockopt(fd, IPPROTO_TCP, TCP_KEEPIDLE, &kIdleS, sizeof kIdleS);
    (void)::setsockopt(fd, IPPROTO_TCP, TCP_KEEPINTVL, &kBetweenS, sizeof kBetweenS);
    (void)::setsockopt(fd, IPPROTO_TCP, TCP_KEEPCNT, &kProbes, sizeof kProbes);
    (void)::setsockopt(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, &kUnansweredMs, sizeof kUnansweredMs);
}

Fd listen_everywhere(uint16_t &port) {
    Fd fd(::socket(AF_INET6, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    const bool six = fd.get() >= 0;
    if (!six)
        fd = Fd(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    const int zero = 0;
    if (six)
        (void)::setsockopt(fd.get(), IPPROTO_IPV6, IPV6_V6ONLY, &zero, sizeof zero);
    sockaddr_storage any{};
    any.ss_family = static_cast<sa_family_t>(six ? AF_INET6 : AF_INET);
    socklen_t nbytes = six ? sizeof(sockaddr_in6) : sizeof(sockaddr_in);
    if (fd.get() < 0 || ::bind(fd.get(), reinterpret_cast<sockaddr *>(&any), nbytes) != 0 ||
        ::listen(fd.get(), kBacklog) != 0 || ::getsockname(fd.get(), reinterpret_cast<sockaddr *>(&any), &nbytes) != 0)
        throw StatusError("TransportUnavailableError",
                          std::string("verbs cannot listen for peers: ") + std::strerror(errno), errno);
    port = ntohs(six ? reinterpret_cast<sockaddr_in6 &>(any).sin6_port : reinterpret_cast<sockaddr_in &>(any).sin_port);
    return fd;
}

Fd connect_to(const std::vector<std::string> &hosts, uint16_t port, int64_t deadline_ns, int stop) {
    std::string tried;
    for (size_t i = 0; i < hosts.size(); ++i) {
        addrinfo hints{}, *found = nullptr;
        hints.ai_flags = AI_NUMERICHOST | AI_NUMERICSERV;
        hints.ai_socktype = SOCK_STREAM;
        if (::getaddrinfo(hosts[i].c_str(), std::to_string(port).c_str(), &hints, &found) != 0)
            continue;
        const int64_t left_ns = deadline_ns - now_ns();
        try { // no address may take the time of those after it
            Fd fd = connect_one(*found, now_ns() + left_ns / static_cast<int64_t>(hosts.size() - i), stop);
            ::freeaddrinfo(found);
            return fd;
        } catch (const StatusError &error) {
            ::freeaddrinfo(found);
            if (error.kind() != std::string("ConnectError"))
                throw;
            tried += (tried.empty() ? "" : "; ") + hosts[i] + " (" + error.what() + ")";
        }
    }
    refuse("nobody answers at port " + std::to_string(port) + " of " + (tried.empty() ? "no address" : tried),
           ECONNREFUSED);
}

void send_all(int fd, const void *bytes, size_t nbytes, int64_t deadline_ns, int stop) {
    const auto *at = static_cast<const char *>(bytes);
    while (nbytes) {
        const ssize_t sent = ::send(fd, at, nbytes, MSG_NOSIGNAL);
        if (sent > 0) {
            at += sent, nbytes -= static_cast<size_t>(sent);
        } else if (sent < 0 && (errno == EAGAIN || errno == EINTR)) {
            wait_for(fd, POLLOUT, deadline_ns, stop);
        } else {
            refuse("the peer hung up", errno);
        }
    }
}

void receive_all(int fd, void *bytes, size_t nbytes, int64_t deadline_ns, int stop) {
    auto *at = static_cast<char *>(bytes);
    while (nbytes) {
        const ssize_t got = ::recv(fd, at, nbytes, 0);
        if (got > 0) {
            at += got, nbytes -= static_cast<size_t>(got);
        } else if (got < 0 && (errno == EAGAIN || errno == EINTR)) {
            wait_for(fd, POLLIN, deadline_ns, stop);
        } else {
            refuse("the peer hung up while connecting: it does not speak this protocol, or has closed", got ? errno : 0);
        }
    }
}

} // namespace kvrdma::verbs
