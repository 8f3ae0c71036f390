// Cookies: 16 random bytes that sit in the owner's memory while something is valid, and are zero afterwards.
#pragma once

#include <array>
#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <sys/random.h>

#include "errors.hpp"

namespace kvrdma {

using Cookie = std::array<uint8_t, 16>;

inline Cookie random_cookie() {
    Cookie cookie;
    if (getrandom(cookie.data(), cookie.size(), 0) != static_cast<ssize_t>(cookie.size()))
        throw StatusError("TransportError", std::string("getrandom failed: ") + std::strerror(errno), errno);
    return cookie;
}

// Writes a cookie, 8-byte aligned, where peers read at any time. The first half goes last when one appears and first when
// it vanishes, so that no reader sees a valid one that is not: a torn cookie differs from both.
inline void publish_cookie(uint8_t *at, const Cookie &cookie) noexcept {
    uint64_t halves[2];
    std::memcpy(halves, cookie.data(), sizeof halves);
    auto *words = reinterpret_cast<uint64_t *>(at);
    std::atomic_ref(words[0]).store(0, std::memory_order_seq_cst);
    std::atomic_ref(words[1]).store(halves[1], std::memory_order_seq_cst);
    std::atomic_ref(words[0]).store(halves[0], std::memory_order_seq_cst);
}

} // namespace kvrdma
