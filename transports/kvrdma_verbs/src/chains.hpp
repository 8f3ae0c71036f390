// Rows to chains of RDMA READ work requests. Nothing here knows a NIC: it is tested on any machine.
//
// A work request reads one run of the peer's memory into up to `max_sge` pieces of ours. A chain is what one doorbell
// posts; its last request alone asks for a completion, and a queue pair completes in order.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "rows.hpp"

namespace kvrdma::verbs {

// What a pair of NICs allows, and what one chain should be.
struct Limits {
    uint32_t max_sge = 1;             // pieces of a READ
    uint64_t max_request = 1u << 20;  // bytes of a request: longer rows are shared between queues
    uint32_t max_requests = 32;       // of a chain
    uint64_t max_chain = 4u << 20;    // bytes of a chain
};

// How far a batch has been posted.
struct Cursor {
    size_t row = 0;
    uint64_t offset = 0; // in that row
};

struct ChainSize {
    uint32_t requests = 0;
    uint64_t nbytes = 0;
};

// Builds the next chain of the first `count` of a batch's sorted rows without empty ones, of at most `room` requests, and moves `at` past
// it. The sink is told begin(remote region, remote offset), then piece(local addr, local region, nbytes) at least once,
// then end(), for every request. Never allocates.
template <typename Sink>
ChainSize build_chain(const std::vector<Row> &rows, size_t count, Cursor &at, uint32_t room, const Limits &limits, Sink &sink) {
    ChainSize size;
    const uint32_t most = std::min(room, limits.max_requests);
    while (at.row < count && size.requests < most && size.nbytes < limits.max_chain) {
        const Row *row = &rows[at.row];
        const uint32_t region = row->remote_region();
        uint64_t next = row->offset + at.offset, left = limits.max_request;
        sink.begin(region, next);
        for (uint32_t pieces = 0;;) {
            const uint64_t take = std::min(row->length - at.offset, left);
            sink.piece(row->local + at.offset, row->local_region(), static_cast<uint32_t>(take));
            size.nbytes += take;
            next += take;
            left -= take;
            if (at.offset + take < row->length) {
                at.offset += take;
                break;
            }
            at.offset = 0;
            if (++at.row == count || ++pieces == limits.max_sge || left == 0)
                break;
            row = &rows[at.row];
            if (row->offset != next || row->remote_region() != region)
                break;
        }
        sink.end();
        ++size.requests;
    }
    return size;
}

// One queue pair as the spreading of chains sees it.
struct QueueLoad {
    uint32_t free = 0;   // requests it still takes
    uint64_t nbytes = 0; // posted and not completed
};

// The queue for the next chain: the one with the fewest bytes on their way among those with room. Slower NICs, which
// keep theirs longer, get less. Returns the number of queues if none has room.
template <typename Queues> size_t pick_queue(const Queues &queues) noexcept {
    size_t best = queues.size();
    for (size_t i = 0; i < queues.size(); ++i) {
        const QueueLoad &load = queues[i].load;
        if (load.free && (best == queues.size() || load.nbytes < queues[best].load.nbytes))
            best = i;
    }
    return best;
}

} // namespace kvrdma::verbs
