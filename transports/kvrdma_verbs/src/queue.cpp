#include "queue.hpp"

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "errors.hpp"

namespace kvrdma::verbs {

namespace {

// Some 0.5 s until a peer that does not answer is given up: 4.096 us * 2^14, eight times.
constexpr uint8_t kTimeout = 14, kRetries = 7, kRnrTimer = 12, kHops = 64;
constexpr uint32_t kPsnMask = 0xffffff;

uint32_t random_psn() {
    uint32_t psn = 0;
    const Cookie cookie = random_cookie();
    std::memcpy(&psn, cookie.data(), sizeof psn);
    return psn & kPsnMask;
}

} // namespace

QueuePair::QueuePair(const Device &device, ibv_cq *cq, uint32_t max_requests) : device_(device), psn_(random_psn()) {
    ibv_qp_init_attr how{};
    how.send_cq = how.recv_cq = cq;
    how.qp_type = IBV_QPT_RC;
    how.cap.max_send_wr = max_requests;
    how.cap.max_recv_wr = 0;
    how.cap.max_send_sge = device.max_sge();
    how.cap.max_recv_sge = 1;
    qp_ = library().create_qp(device.pd(), &how);
    if (!qp_)
        throw StatusError("ConnectError", device.name() + " has no queue pair left: " + std::strerror(errno) + ": connect fewer peers, or check ulimit -l", errno);
    try {
        ibv_qp_attr attr{};
        attr.qp_state = IBV_QPS_INIT;
        attr.port_num = device.port();
        attr.qp_access_flags = IBV_ACCESS_REMOTE_READ;
        modify(attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS, "INIT");
    } catch (...) {
        library().destroy_qp(qp_);
        throw;
    }
}

QueuePair::~QueuePair() { library().destroy_qp(qp_); }

QueueEnd QueuePair::end(uint16_t their_device) const {
    const PortAddress &here = device_.address();
    return {their_device, here.lid, here.mtu, here.ethernet, device_.max_reads_in(), 0, qp_->qp_num, psn_, here.gid};
}

void QueuePair::modify(ibv_qp_attr &attr, int mask, const char *state) {
    if (const int code = library().modify_qp(qp_, &attr, mask))
        throw StatusError("ConnectError",
                          device_.name() + ": its queue pair does not reach " + state + ": " + std::strerror(code) +
                              "; no route to the peer's GID? Compare GID kind, subnet and MTU of both sides "
                              "(KVRDMA_VERBS_GID_INDEX)",
                          code);
}

// Whoever only serves reads needs no more than to receive.
void QueuePair::join(const QueueEnd &theirs, bool reads) {
    const PortAddress &here = device_.address();
    ibv_qp_attr attr{};
    attr.qp_state = IBV_QPS_RTR;
    attr.path_mtu = static_cast<ibv_mtu>(std::min(here.mtu, theirs.mtu));
    attr.dest_qp_num = theirs.number;
    attr.rq_psn = theirs.psn;
    attr.max_dest_rd_atomic = device_.max_reads_in();
    attr.min_rnr_timer = kRnrTimer;
    attr.ah_attr.port_num = device_.port();
    attr.ah_attr.dlid = theirs.lid;
    // Over Ethernet always; over InfiniBand where the subnets differ.
    attr.ah_attr.is_global = here.ethernet || std::memcmp(here.gid.data(), theirs.gid.data(), 8) != 0;
    if (attr.ah_attr.is_global) {
        std::memcpy(attr.ah_attr.grh.dgid.raw, theirs.gid.data(), theirs.gid.size());
        attr.ah_attr.grh.sgid_index = static_cast<uint8_t>(device_.gid_index());
        attr.ah_attr.grh.hop_limit = kHops;
    }
    modify(attr,
           IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC |
               IBV_QP_MIN_RNR_TIMER,
           "RTR");
    if (!reads)
        return;
    attr = {};
    attr.qp_state = IBV_QPS_RTS;
    attr.timeout = kTimeout;
    attr.retry_cnt = kRetries;
    attr.rnr_retry = kRetries;
    attr.sq_psn = psn_;
    attr.max_rd_atomic = std::min(device_.max_reads_out(), theirs.reads_in);
    modify(attr,
           IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN |
               IBV_QP_MAX_QP_RD_ATOMIC,
           "RTS");
}

} // namespace kvrdma::verbs
