// Threads that share a processor while others are idle. The kernel wakes a thread where it ran before or where its
// waker runs; in a virtual machine it takes idle processors for lost ones, and may leave two busy threads on one of
// them for some 20 ms, longer than most reads take. A thread that knows itself crowded moves on; its affinity is what
// it was before as soon as it has moved.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fcntl.h>
#include <sched.h>
#include <sys/types.h>
#include <unistd.h>

namespace kvrdma {

constexpr size_t kMostProcessors = CPU_SETSIZE;

// Where the calling thread runs: another one is no error, only slower.
inline size_t processor() noexcept {
    const int here = sched_getcpu();
    return here < 0 ? 0 : static_cast<size_t>(here) % kMostProcessors;
}

// The processor that the calling thread runs on, as a number that means the same to every process of this host, and
// nothing to others. Never 0.
inline uint32_t place_now() noexcept {
    static const uint32_t host = [] {
        uint32_t sum = 2166136261u;
        if (FILE *boot = std::fopen("/proc/sys/kernel/random/boot_id", "re")) {
            for (int each = std::fgetc(boot); each != EOF; each = std::fgetc(boot))
                sum = (sum ^ static_cast<uint32_t>(each)) * 16777619u;
            std::fclose(boot);
        }
        return sum;
    }();
    return (host + static_cast<uint32_t>(processor()) * 2654435761u) | 1;
}

// The processors that share their last cache with one: all of them where the system does not say.
inline cpu_set_t cache_neighbours(size_t of) noexcept {
    cpu_set_t near;
    CPU_ZERO(&near);
    char path[80];
    std::snprintf(path, sizeof path, "/sys/devices/system/cpu/cpu%zu/cache/index3/shared_cpu_list", of);
    unsigned first = 0, last = 0;
    if (FILE *list = std::fopen(path, "re")) { // "0-7,64-71"
        while (std::fscanf(list, "%u", &first) == 1) {
            last = first;
            (void)std::fscanf(list, "-%u", &last);
            for (unsigned each = first; each <= last && each < CPU_SETSIZE; ++each)
                CPU_SET(each, &near);
            if (std::fgetc(list) != ',')
                break;
        }
        std::fclose(list);
    }
    const bool unknown = CPU_COUNT(&near) == 0;
    for (size_t each = 0; each < kMostProcessors && unknown; ++each)
        CPU_SET(each, &near);
    return near;
}

// Whether a thread of this process is ready to run and waits for this processor. False where /proc does not say.
inline bool waits_for(pid_t thread, size_t processor) noexcept {
    char path[64], text[512];
    std::snprintf(path, sizeof path, "/proc/self/task/%d/stat", static_cast<int>(thread));
    const int file = ::open(path, O_RDONLY | O_CLOEXEC);
    if (file < 0)
        return false;
    const ssize_t nbytes = ::read(file, text, sizeof text - 1);
    ::close(file);
    text[nbytes > 0 ? nbytes : 0] = 0;
    const char *at = std::strrchr(text, ')'); // ends the name; the state follows, and the processor 36 fields later
    if (!at || at[1] != ' ' || at[2] != 'R')
        return false;
    for (int field = 0; at && field < 37; ++field)
        at = std::strchr(at + 1, ' ');
    return at && std::strtoul(at, nullptr, 10) == processor;
}

inline int processors_allowed() noexcept {
    cpu_set_t allowed;
    return sched_getaffinity(0, sizeof allowed, &allowed) == 0 ? CPU_COUNT(&allowed) : 0;
}

// Moves the calling thread to another processor that it may use, near the one it is on. Returns whether it moved.
inline bool leave_processor() noexcept {
    cpu_set_t allowed, other;
    if (sched_getaffinity(0, sizeof allowed, &allowed) != 0 || CPU_COUNT(&allowed) < 2)
        return false;
    const size_t here = processor();
    const cpu_set_t near = cache_neighbours(here);
    CPU_AND(&other, &allowed, &near);
    CPU_CLR(here, &other);
    if (CPU_COUNT(&other) == 0 || sched_setaffinity(0, sizeof other, &other) != 0)
        return false;
    (void)sched_setaffinity(0, sizeof allowed, &allowed);
    return true;
}

} // namespace kvrdma
