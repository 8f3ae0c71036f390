// The active messages between two transports, all of them small but for kData.
//
// Peers are greeted before anything is read, and where UCX has no one-sided GET the reads are served by messages, too.
// UCX's own emulation of GET is never used: its target copies from whatever raw address it is sent, and aborts the
// whole process when a reader goes away in mid-read ("unexpected error" in ucp_request.inl, seen with 1.22). Here the
// serving side checks region, cookie and bounds of every piece, and copies while the region cannot be deregistered.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cookies.hpp"

namespace kvrdma::ucx {

// Tells a garbled worker address from a sound one before UCX takes it apart.
inline uint32_t checksum_of(const char *bytes, size_t nbytes) noexcept {
    uint32_t sum = 2166136261u;
    for (size_t i = 0; i < nbytes; ++i)
        sum = (sum ^ static_cast<uint8_t>(bytes[i])) * 16777619u;
    return sum;
}

enum MessageId : unsigned { kAskHello = 1, kAnswerHello = 2, kAskRead = 3, kData = 4, kGoodbye = 5 };

constexpr uint32_t kMagic = 0x4352564b, kProtocol = 1;

// Followed by the reader's worker address when it asks, by nothing in the answer.
struct Hello {
    uint32_t magic = kMagic, protocol = kProtocol;
    uint64_t peer = 0;    // the reader's id of this connection
    uint64_t oldest = 0;  // and of its oldest: sessions of earlier ones are over, even if no goodbye came through
    uint64_t session = 0; // the serving side's, in the answer
    Cookie instance = {}; // of the serving transport: which one is meant, and which one answers
    uint32_t checksum = 0, address_nbytes = 0;
    char ucx_version[16] = {};
};

// Followed by `regions` WireRegions and `pieces` WirePieces.
struct AskRead {
    uint32_t magic = kMagic, regions = 0, pieces = 0;
    uint32_t place = 0; // of the thread that reads, see crowding.hpp; 0 of a peer that does not say
    uint64_t session = 0, ask = 0;
};
struct WireRegion {
    uint32_t slot, reserved;
    Cookie cookie;
};
struct WirePiece {
    uint32_t region, nbytes; // index of a WireRegion of the same message
    uint64_t offset;
};

// A reader that disconnects says so: UCX keeps the socket of a closed endpoint open while the other end has one.
struct Goodbye {
    uint32_t magic = kMagic, reserved = 0;
    uint64_t session = 0;
};

enum class Served : uint32_t { kBytes = 0, kStale = 1, kOutOfBounds = 2, kCopyFailed = 3 };

// Followed by the bytes of `count` pieces, one after the other.
struct Data {
    uint32_t magic = kMagic, first = 0, count = 0;
    Served outcome = Served::kBytes; // else it is piece `first` that cannot be served, and `count` is 0
    uint64_t peer = 0, ask = 0;
};

constexpr uint32_t kDataBytes = 64512;                    // fits one segment of 64 KiB with every header
constexpr uint32_t kAskBytes = 4 * kDataBytes, kAskPieces = 512; // most that one AskRead wants
constexpr uint32_t kMostAsks = 16; // a reader has waiting at one peer

constexpr uint32_t kChunks = 8, kChunkBytes = 4096; // one-sided cookie reads in flight per peer, and their size

} // namespace kvrdma::ucx
