// Work requests of one chain, filled by the builder of chains.hpp and posted with one doorbell.
#pragma once

#include <cstdint>

#include "peer.hpp"

namespace kvrdma::verbs {

// Fills work requests of one chain.
class Post {
  public:
    Post(const Queue &queue, const Regions &regions, const PeerSpec &spec) : queue_(queue), regions_(regions), spec_(spec) {}

    void begin(uint32_t region, uint64_t offset) {
        if (region != region_) {
            region_ = region;
            base_ = spec_.regions[region].addr;
            rkey_ = spec_.regions[region].rkeys[queue_.theirs];
        }
        open(base_ + offset, rkey_);
    }
    void piece(uint64_t addr, uint32_t slot, uint32_t nbytes) {
        if (slot != slot_) {
            slot_ = slot;
            lkey_ = regions_.lkey(slot, queue_.ours);
        }
        sges_[sge_++] = {addr, nbytes, lkey_};
    }
    void end() { requests_[count_ - 1].num_sge = static_cast<int>(&sges_[sge_] - requests_[count_ - 1].sg_list); }

    // Returns 0 or an errno; then some may have been posted.
    int post(uint64_t id) {
        for (uint32_t i = 0; i < count_; ++i) {
            requests_[i].wr_id = id;
            requests_[i].next = i + 1 < count_ ? &requests_[i + 1] : nullptr;
        }
        requests_[count_ - 1].send_flags = IBV_SEND_SIGNALED;
        ibv_send_wr *bad = nullptr;
        return ibv_post_send(queue_.pair->get(), requests_, &bad);
    }

  protected:
    void open(uint64_t addr, uint32_t rkey) {
        ibv_send_wr &request = requests_[count_++];
        request.opcode = IBV_WR_RDMA_READ;
        request.send_flags = 0;
        request.sg_list = &sges_[sge_];
        request.wr.rdma.remote_addr = addr;
        request.wr.rdma.rkey = rkey;
    }
    void add(uint64_t addr, uint32_t nbytes, uint32_t lkey) { sges_[sge_++] = {addr, nbytes, lkey}; }
    const Queue &queue_;

  private:
    static constexpr uint32_t kRequests = 32, kSges = 8;
    const Regions &regions_;
    const PeerSpec &spec_;
    uint32_t count_ = 0, sge_ = 0;
    uint32_t region_ = ~0u, slot_ = ~0u, rkey_ = 0, lkey_ = 0;
    uint64_t base_ = 0;
    ibv_send_wr requests_[kRequests];
    ibv_sge sges_[kRequests * kSges];
};

// The same for rows of the table of cookies.
class PostChecks : public Post {
  public:
    PostChecks(const Queue &queue, const Regions &regions, const PeerSpec &spec, const Scratch &scratch)
        : Post(queue, regions, spec), table_(spec.table_addr), rkey_(spec.table_rkeys[queue.theirs]),
          lkey_(scratch.lkey(queue.ours)) {}
    void begin(uint32_t, uint64_t offset) { open(table_ + offset, rkey_); }
    void piece(uint64_t addr, uint32_t, uint32_t nbytes) { add(addr, nbytes, lkey_); }

  private:
    const uint64_t table_;
    const uint32_t rkey_, lkey_;
};

} // namespace kvrdma::verbs
