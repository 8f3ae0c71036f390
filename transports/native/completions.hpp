// Outcomes on their way to poll(): any thread pushes, the caller drains; an eventfd is readable in between.
#pragma once

#include <cerrno>
#include <cstdint>
#include <cstring>
#include <mutex>
#include <string>
#include <sys/eventfd.h>
#include <unistd.h>
#include <utility>
#include <vector>

#include "errors.hpp"

namespace kvrdma {

struct Completion {
    std::string kind; // "" when done, else the name of an error class
    uint64_t read = 0; // 0: the peer as a whole was lost
    uint64_t peer = 0;
    uint64_t rows = 0;
    uint64_t rows_posted = 0;
    uint64_t nbytes = 0;
    std::string message;
    int code = 0;
};

class CompletionQueue {
  public:
    CompletionQueue() : fd_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
        if (fd_ < 0)
            throw StatusError("TransportError", std::string("eventfd failed: ") + std::strerror(errno) + " (see ulimit -n)", errno);
    }
    ~CompletionQueue() { ::close(fd_); }
    CompletionQueue(const CompletionQueue &) = delete;
    CompletionQueue &operator=(const CompletionQueue &) = delete;

    int fd() const noexcept { return fd_; }

    void push(Completion completion) {
        std::lock_guard lock(mutex_);
        done_.push_back(std::move(completion));
        if (done_.size() == 1) {
            uint64_t one = 1;
            [[maybe_unused]] ssize_t n = ::write(fd_, &one, sizeof one);
        }
    }

    std::vector<Completion> drain() {
        std::lock_guard lock(mutex_);
        if (!done_.empty()) {
            uint64_t count = 0;
            [[maybe_unused]] ssize_t n = ::read(fd_, &count, sizeof count);
        }
        return std::exchange(done_, {});
    }

  private:
    std::mutex mutex_;
    std::vector<Completion> done_;
    int fd_;
};

} // namespace kvrdma
