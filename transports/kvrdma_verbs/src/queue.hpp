// A reliable-connected queue pair, and the chains posted to it that have not completed.
#pragma once

#include <cstdint>
#include <deque>

#include "chains.hpp"
#include "device.hpp"
#include "wireup.hpp"

namespace kvrdma::verbs {

struct Read;

struct Chain {
    uint32_t number;
    Read *read;
    Cursor from;
    ChainSize size;
};

class QueuePair {
  public:
    // Both throw ConnectError.
    QueuePair(const Device &device, ibv_cq *cq, uint32_t max_requests);
    void join(const QueueEnd &theirs, bool reads);
    ~QueuePair();
    QueuePair(const QueuePair &) = delete;
    QueuePair &operator=(const QueuePair &) = delete;

    QueueEnd end(uint16_t their_device) const;
    ibv_qp *get() const noexcept { return qp_; }
    const Device &device() const noexcept { return device_; }

  private:
    void modify(ibv_qp_attr &attr, int mask, const char *state);

    const Device &device_;
    ibv_qp *qp_;
    const uint32_t psn_;
};

// A queue pair that reads, of the lane between one NIC of ours and one of theirs.
struct Queue {
    uint16_t ours, theirs; // devices
    uint32_t serial;       // never used again: completions may be older than the queue pair of their number
    Limits limits;
    std::unique_ptr<QueuePair> pair;
    QueueLoad load;
    std::deque<Chain> posted;
    uint32_t next_chain = 0;
};

} // namespace kvrdma::verbs
