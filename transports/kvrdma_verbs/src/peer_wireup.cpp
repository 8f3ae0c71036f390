// How the queue pairs of a peer come to be: at first in the thread that connects, after an error in the worker's.
#include <algorithm>
#include <cerrno>
#include <cstring>
#include <sys/socket.h>

#include "errors.hpp"
#include "peer.hpp"

namespace kvrdma::verbs {

namespace {

constexpr int64_t kRenewNs = 3'000'000'000;

const char *why_not(Verdict verdict) {
    switch (verdict) {
    case Verdict::kOtherInstance:
        return "has restarted: another transport answers at this address; ask it for its new address and keys";
    case Verdict::kOtherProtocol:
        return "speaks another version of the verbs messages: use one kvrdma version";
    default:
        return "has no queue pair left for this connection";
    }
}

} // namespace

// A completion queue never overflows: even after an error, when every request completes by itself, it has room.
void Peer::make_queues() {
    const uint32_t each = shared_.options.queues_per_lane;
    for (size_t lane = 0; lane < spec_.lanes.size(); ++lane) {
        const auto [ours, theirs] = spec_.lanes[lane];
        const Device &device = *shared_.devices[ours];
        if (lane == cqs_.size()) {
            ibv_cq *cq = library().create_cq(device.context(), static_cast<int>(2 * each * device.max_requests()),
                                             reinterpret_cast<void *>(contact_->id), device.channel(), 0);
            if (!cq)
                throw StatusError("ConnectError", device.name() + " has no completion queue left: " + std::strerror(errno) +
                                                      ": connect fewer peers, or check ulimit -l", errno);
            cqs_.push_back(cq);
            ibv_req_notify_cq(cq, 0);
        }
        for (uint32_t i = 0; i < each; ++i) {
            Limits limits;
            limits.max_sge = device.max_sge();
            limits.max_request = std::min(limits.max_request, device.max_message());
            queues_.push_back({ours, theirs, next_serial_++, limits,
                               std::make_unique<QueuePair>(device, cqs_[lane], device.max_requests()), {}, {}, 0});
        }
    }
}

std::vector<char> Peer::greeting() const {
    Hello hello;
    hello.queues = static_cast<uint16_t>(queues_.size());
    hello.instance = spec_.instance;
    std::vector<char> bytes(sizeof hello + queues_.size() * sizeof(QueueEnd));
    std::memcpy(bytes.data(), &hello, sizeof hello);
    for (size_t i = 0; i < queues_.size(); ++i) {
        const QueueEnd end = queues_[i].pair->end(queues_[i].theirs);
        std::memcpy(bytes.data() + sizeof hello + i * sizeof end, &end, sizeof end);
    }
    return bytes;
}

void Peer::join(const std::vector<QueueEnd> &theirs) {
    for (size_t i = 0; i < queues_.size(); ++i) {
        queues_[i].pair->join(theirs[i], true);
        queues_[i].load.free = shared_.devices[queues_[i].ours]->max_requests();
    }
}

void Peer::wire_up(int64_t deadline_ns, int stop) {
    make_queues();
    socket_ = connect_to(spec_.hosts, spec_.port, deadline_ns, stop);
    const std::vector<char> hello = greeting();
    send_all(socket_.get(), hello.data(), hello.size(), deadline_ns, stop);
    Answer answer;
    receive_all(socket_.get(), &answer, sizeof answer, deadline_ns, stop);
    if (answer.magic != kMagic)
        throw StatusError("ConnectError", "another program listens at port " + std::to_string(spec_.port) + " of the peer");
    if (answer.protocol != kProtocol || answer.verdict != Verdict::kOk || answer.queues != queues_.size()) {
        const bool restarted = answer.verdict == Verdict::kOtherInstance;
        throw StatusError(restarted ? "PeerIdentityError" : "ConnectError",
                          "peer " + std::to_string(contact_->id) + " " +
                              why_not(answer.protocol != kProtocol ? Verdict::kOtherProtocol : answer.verdict));
    }
    std::vector<QueueEnd> theirs(queues_.size());
    receive_all(socket_.get(), theirs.data(), theirs.size() * sizeof(QueueEnd), deadline_ns, stop);
    join(theirs);
}

// Joins new queue pairs over the same connection. Once the old ones are destroyed nothing can be written for them, so the
// reads that were on them are posted again, from the first row of theirs that had not completed.
void Peer::renew() {
    must_renew_ = false;
    for (const Queue &queue : queues_)
        for (const Chain &chain : queue.posted) {
            Read &read = *chain.read;
            const bool earlier = chain.from.row < read.at.row ||
                                 (chain.from.row == read.at.row && chain.from.offset < read.at.offset);
            if (earlier)
                read.at = chain.from;
            read.outstanding = 0;
        }
    queues_.clear();
    posting_.clear();
    std::vector<Read *> all;
    for (const auto &[id, read] : reads_)
        all.push_back(read.get());
    for (Read *read : all) {
        if (read->failure)
            end_read(*read);
        else if (std::find(waiting_.begin(), waiting_.end(), read) == waiting_.end())
            posting_.push_back(read);
    }
    try {
        make_queues();
        const std::vector<char> hello = greeting();
        send_all(socket_.get(), hello.data(), hello.size(), now_ns(), -1); // fits the socket's buffer
    } catch (const StatusError &error) {
        return end({"PeerLostError", name() + " cannot be connected again: " + error.what(), error.code()}, true);
    }
    inbox_.clear();
    renewing_ = true;
    renew_by_ns_ = now_ns() + kRenewNs;
}

void Peer::check_time() {
    if (renewing_ && now_ns() > renew_by_ns_)
        end({"PeerLostError", name() + " did not answer when it was asked to connect again", ETIMEDOUT}, true);
}

void Peer::on_readable() {
    const size_t wanted = sizeof(Answer) + queues_.size() * sizeof(QueueEnd);
    char bytes[512];
    while (!gone_) {
        const ssize_t got = ::recv(socket_.get(), bytes, sizeof bytes, MSG_DONTWAIT);
        if (got < 0 && (errno == EAGAIN || errno == EINTR))
            break;
        if (got < 0)
            return end({"PeerLostError", name() + " is gone, host or line: " + std::strerror(errno), errno}, true);
        if (got == 0)
            return end({"PeerLostError", name() + " is gone: it has closed its transport or its process has ended", 0}, true);
        inbox_.insert(inbox_.end(), bytes, bytes + got);
        if (!renewing_ || inbox_.size() > wanted)
            return end({"PeerLostError", name() + " sent what nobody asked for: it is not a sound kvrdma", 0}, true);
    }
    if (gone_ || !renewing_ || inbox_.size() < wanted)
        return;
    Answer answer;
    std::memcpy(&answer, inbox_.data(), sizeof answer);
    std::vector<QueueEnd> theirs(queues_.size());
    std::memcpy(theirs.data(), inbox_.data() + sizeof answer, theirs.size() * sizeof(QueueEnd));
    inbox_.clear();
    renewing_ = false;
    try {
        if (answer.magic != kMagic || answer.verdict != Verdict::kOk || answer.queues != queues_.size())
            throw StatusError("ConnectError", why_not(answer.verdict));
        join(theirs);
    } catch (const StatusError &error) {
        end({"PeerLostError", name() + " cannot be connected again: " + error.what(), error.code()}, true);
    }
}

} // namespace kvrdma::verbs
