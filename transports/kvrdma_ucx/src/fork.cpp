#include "fork.hpp"

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <dirent.h>
#include <fcntl.h>
#include <mutex>
#include <pthread.h>
#include <sys/stat.h>
#include <unistd.h>
#include <vector>

namespace kvrdma::ucx {

namespace {

bool is_epoll(int fd) noexcept {
    char path[48], what[32] = {};
    std::snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    const ssize_t nbytes = ::readlink(path, what, sizeof what - 1);
    return nbytes > 0 && std::strcmp(what, "anon_inode:[eventpoll]") == 0;
}

// Calls `visit(fd)` for what an epoll set holds. A descriptor may have been closed and its number be used by somebody
// else: then its inode is another one, and it is left alone. Allocates nothing: it runs in forked children.
template <typename Visit> void each_watched(int epoll_fd, const Visit &visit) noexcept {
    char path[48], text[8192];
    std::snprintf(path, sizeof path, "/proc/self/fdinfo/%d", epoll_fd);
    const int info = ::open(path, O_RDONLY | O_CLOEXEC);
    if (info < 0)
        return;
    size_t kept = 0; // the start of a line whose end has not been read
    for (ssize_t got; (got = ::read(info, text + kept, sizeof text - 1 - kept)) > 0;) {
        text[kept + got] = 0;
        char *line = text;
        for (char *end; (end = std::strchr(line, '\n')); line = end + 1) {
            *end = 0;
            const char *inode = std::strstr(line, "ino:");
            struct stat found;
            if (std::strncmp(line, "tfd:", 4) != 0 || !inode)
                continue;
            const int fd = static_cast<int>(std::strtol(line + 4, nullptr, 10));
            if (::fstat(fd, &found) == 0 && found.st_ino == std::strtoul(inode + 4, nullptr, 16))
                visit(fd, S_ISSOCK(found.st_mode));
        }
        kept = std::strlen(line);
        std::memmove(text, line, kept);
    }
    ::close(info);
}

// Calls `visit(fd)` for every socket in an epoll set and in the sets within.
template <typename Visit> void each_socket(int root, const Visit &visit) noexcept {
    std::array<int, 512> sets;
    size_t known = 0;
    const auto add = [&](int fd) {
        if (known < sets.size() && std::find(sets.begin(), sets.begin() + known, fd) == sets.begin() + known)
            sets[known++] = fd;
    };
    add(root);
    for (size_t i = 0; i < known; ++i)
        each_watched(sets[i], [&](int fd, bool socket) {
            if (socket)
                visit(fd);
            else if (is_epoll(fd))
                add(fd);
        });
}

// The epoll set of UCX's own thread: the one outside of `poll_fd` that watches a set which UCX keeps inside of it.
int find_async(int poll_fd) {
    std::vector<int> inner, outer{poll_fd};
    for (size_t i = 0; i < outer.size(); ++i)
        each_watched(outer[i], [&](int fd, bool socket) {
            if (!socket && is_epoll(fd))
                outer.push_back(fd), inner.push_back(fd);
        });
    DIR *folder = ::opendir("/proc/self/fd");
    if (!folder)
        return -1;
    int async = -1;
    while (const dirent *entry = ::readdir(folder)) {
        const int candidate = std::atoi(entry->d_name);
        if (async >= 0 || std::find(outer.begin(), outer.end(), candidate) != outer.end() || !is_epoll(candidate))
            continue;
        each_watched(candidate, [&](int fd, bool) {
            if (std::find(inner.begin(), inner.end(), fd) != inner.end())
                async = candidate;
        });
    }
    ::closedir(folder);
    return async;
}

std::mutex guarded_mutex;
std::vector<int> guarded; // epoll sets

// The numbers stay taken, so that whatever of UCX runs in the child closes nobody else's descriptor.
void drop_sockets() noexcept {
    const int nowhere = ::open("/dev/null", O_RDWR | O_CLOEXEC);
    for (const int root : guarded)
        each_socket(root, [nowhere](int fd) {
            if (nowhere < 0 || ::dup3(nowhere, fd, O_CLOEXEC) < 0)
                ::close(fd);
        });
    ::close(nowhere);
}

void guard_forks() {
    static std::once_flag once;
    std::call_once(once, [] {
        ::pthread_atfork([] { guarded_mutex.lock(); }, [] { guarded_mutex.unlock(); },
                         [] {
                             drop_sockets();
                             guarded.clear();
                             guarded_mutex.unlock();
                         });
    });
}

} // namespace

void ForkGuard::guard(int &known, int fd) {
    if (fd < 0)
        return;
    std::lock_guard lock(guarded_mutex);
    guarded.push_back(fd);
    known = fd;
}

void ForkGuard::begin(int poll_fd) {
    guard_forks();
    guard(poll_fd_, poll_fd);
}

void ForkGuard::end() {
    std::lock_guard lock(guarded_mutex);
    for (int *fd : {&poll_fd_, &async_fd_}) {
        if (const auto found = std::find(guarded.begin(), guarded.end(), *fd); found != guarded.end())
            guarded.erase(found);
        *fd = -1;
    }
}

void ForkGuard::mark() {
    if (async_fd_ < 0) // it can be told from others once there is a connection
        guard(async_fd_, find_async(poll_fd_));
    for (const int root : {poll_fd_, async_fd_})
        if (root >= 0)
            each_socket(root, [](int fd) { (void)::fcntl(fd, F_SETFD, FD_CLOEXEC); });
}

} // namespace kvrdma::ucx
