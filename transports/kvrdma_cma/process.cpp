#include "process.hpp"

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <poll.h>
#include <string>
#include <sys/syscall.h>
#include <unistd.h>

#include "errors.hpp"

namespace kvrdma::cma {

uint64_t start_time(pid_t pid) {
    char path[32], text[1024];
    snprintf(path, sizeof path, "/proc/%d/stat", static_cast<int>(pid));
    FILE *file = fopen(path, "re");
    if (!file)
        return 0;
    const size_t n = fread(text, 1, sizeof text - 1, file);
    fclose(file);
    text[n] = '\0';
    const char *field = strrchr(text, ')'); // the name before it may hold anything
    for (int i = 2; field && i < 22; ++i)
        field = strchr(field + 1, ' ');
    return field ? strtoull(field + 1, nullptr, 10) : 0;
}

PidFd::PidFd(pid_t pid) : fd_(static_cast<int>(syscall(SYS_pidfd_open, pid, 0))) {
    if (fd_ < 0)
        throw StatusError("ConnectError",
                          "process " + std::to_string(pid) + " cannot be opened: " + strerror(errno) +
                              (errno == ESRCH ? "; it has exited" : ""),
                          errno);
}

PidFd::~PidFd() { ::close(fd_); }

bool PidFd::exited() const noexcept {
    pollfd entry{fd_, POLLIN, 0};
    return ::poll(&entry, 1, 0) > 0;
}

Pieces::Pieces() {
    local_.reserve(kMax);
    remote_.reserve(kMax);
}

void Pieces::clear() noexcept {
    local_.clear();
    remote_.clear();
    nbytes_ = 0;
}

static void append(std::vector<iovec> &list, uint64_t addr, uint64_t nbytes) {
    if (!list.empty() && reinterpret_cast<uint64_t>(list.back().iov_base) + list.back().iov_len == addr)
        list.back().iov_len += nbytes;
    else
        list.push_back({reinterpret_cast<void *>(addr), nbytes});
}

void Pieces::add(uint64_t local, uint64_t remote, uint64_t nbytes) {
    append(local_, local, nbytes);
    append(remote_, remote, nbytes);
    nbytes_ += nbytes;
}

// Drops the first `nbytes` of a list whose first entry is `*first`.
static void consume(std::vector<iovec> &list, size_t &first, uint64_t nbytes) {
    while (nbytes > 0) {
        iovec &entry = list[first];
        const uint64_t part = std::min<uint64_t>(nbytes, entry.iov_len);
        entry.iov_base = static_cast<char *>(entry.iov_base) + part;
        entry.iov_len -= part;
        nbytes -= part;
        if (entry.iov_len == 0)
            ++first;
    }
}

Pieces::Result Pieces::read_from(pid_t pid) {
    size_t local = 0, remote = 0;
    while (nbytes_ > 0) {
        const ssize_t n = process_vm_readv(pid, &local_[local], local_.size() - local, &remote_[remote],
                                           remote_.size() - remote, 0);
        if (n <= 0)
            return {n < 0 ? errno : EFAULT, reinterpret_cast<uint64_t>(local_[local].iov_base),
                    reinterpret_cast<uint64_t>(remote_[remote].iov_base)};
        consume(local_, local, static_cast<uint64_t>(n));
        consume(remote_, remote, static_cast<uint64_t>(n));
        nbytes_ -= static_cast<uint64_t>(n);
    }
    return {0, 0, 0};
}

int peek(pid_t pid, uint64_t remote, void *local, size_t nbytes) {
    const iovec to{local, nbytes}, from{reinterpret_cast<void *>(remote), nbytes};
    const ssize_t n = process_vm_readv(pid, &to, 1, &from, 1, 0);
    return n == static_cast<ssize_t>(nbytes) ? 0 : n < 0 ? errno : EFAULT;
}

} // namespace kvrdma::cma
