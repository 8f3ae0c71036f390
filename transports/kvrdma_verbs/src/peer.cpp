#include "peer.hpp"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "errors.hpp"
#include "post.hpp"

namespace kvrdma::verbs {

namespace {

constexpr int kPollBatch = 32;

uint64_t id_of(const Queue &queue, uint32_t chain) { return uint64_t{queue.serial} << 32 | chain; }

} // namespace

void Connecting::end(Failure why) {
    {
        std::lock_guard lock(mutex);
        ended = true;
        failure = std::move(why);
    }
    changed.notify_all();
}

Scratch::Scratch(const Devices &devices) : memory_(devices, kPieces * kCookies * sizeof(Cookie)) {
    for (size_t piece = 0; piece < kPieces; ++piece)
        free_.push_back(static_cast<int64_t>(piece));
}

int64_t Scratch::take() {
    if (free_.empty())
        return -1;
    const int64_t piece = free_.back();
    free_.pop_back();
    return piece;
}

Peer::Peer(Shared &shared, std::shared_ptr<Contact> contact, PeerSpec spec)
    : shared_(shared), contact_(std::move(contact)), spec_(std::move(spec)) {
    for (const Lane &lane : spec_.lanes) {
        const Device &device = *shared_.devices[lane.ours];
        via_ += (via_.empty() ? "verbs/" : " ") + device.name();
        if (!device.active())
            throw StatusError("ConnectError", device.name() + " is not active: its link is down", ENETDOWN);
    }
}

Peer::~Peer() {
    queues_.clear();
    for (ibv_cq *cq : cqs_)
        library().destroy_cq(cq);
}

void Peer::begin(std::shared_ptr<Connecting> connecting) {
    connecting_ = std::move(connecting);
    auto probe = std::make_unique<Read>();
    probe->checking = true;
    probe->scratch = shared_.scratch.take();
    if (probe->scratch < 0)
        return end({"ConnectError", name() + ": too many peers connect at the same time: connect again when some have ended", EAGAIN}, false);
    probe->end = 1;
    probe->checks = {Row(reinterpret_cast<uint64_t>(shared_.scratch.at(probe->scratch)), 0, 0, sizeof(Cookie))};
    posting_.push_back(probe.get());
    reads_.emplace(0, std::move(probe));
}

void Peer::add(std::unique_ptr<Read> read) {
    Read &added = *reads_.emplace(read->id, std::move(read)).first->second;
    if (added.posted())
        head_arrived(added); // without rows: its regions may be gone all the same
    else
        posting_.push_back(&added);
}

bool Peer::post() {
    if (renewing_ || gone_)
        return false;
    for (size_t turns = posting_.size(); turns > 0 && !gone_; --turns) {
        Read &read = *posting_.front();
        if (!read.failure && !post_chain(read))
            return false; // every queue is full
        if (gone_)
            return false;
        posting_.pop_front();
        if (read.failure) {
            if (read.outstanding == 0)
                end_read(read);
        } else if (!read.posted()) {
            posting_.push_back(&read);
        }
    }
    return !gone_ && !posting_.empty() && pick_queue(queues_) < queues_.size();
}

bool Peer::post_chain(Read &read) {
    const size_t picked = pick_queue(queues_);
    if (picked == queues_.size())
        return false;
    Queue &queue = queues_[picked];
    Chain chain{queue.next_chain++, &read, read.at, {}};
    int error = 0;
    if (read.checking) {
        PostChecks post(queue, shared_.regions, spec_, shared_.scratch);
        chain.size = build_chain(read.checks, read.end, read.at, queue.load.free, queue.limits, post);
        error = post.post(id_of(queue, chain.number));
    } else {
        Post post(queue, shared_.regions, spec_);
        chain.size = build_chain(read.rows, read.end, read.at, queue.load.free, queue.limits, post);
        error = post.post(id_of(queue, chain.number));
    }
    if (error) {
        end({"PeerLostError", name() + ": nothing can be posted any more: " + std::strerror(error), error}, true);
        return true;
    }
    queue.load.free -= chain.size.requests;
    queue.load.nbytes += chain.size.nbytes;
    queue.posted.push_back(chain);
    ++read.outstanding;
    return true;
}

Queue *Peer::find(uint32_t serial) noexcept {
    const auto found =
        std::find_if(queues_.begin(), queues_.end(), [&](const Queue &queue) { return queue.serial == serial; });
    return found == queues_.end() ? nullptr : &*found;
}

void Peer::collect() {
    ibv_wc found[kPollBatch];
    for (size_t lane = 0; lane < cqs_.size() && !gone_; ++lane)
        for (int count; !gone_ && (count = ibv_poll_cq(cqs_[lane], kPollBatch, found)) > 0;)
            for (int i = 0; i < count && !gone_; ++i)
                completed(found[i]);
    if (must_renew_ && !gone_)
        renew();
}

void Peer::completed(const ibv_wc &wc) {
    Queue *const queue = find(static_cast<uint32_t>(wc.wr_id >> 32)); // null: of a queue pair that was given up
    if (!queue)
        return;
    if (wc.status != IBV_WC_SUCCESS)
        return failed(wc, *queue);
    const auto number = static_cast<uint32_t>(wc.wr_id);
    while (!queue->posted.empty() && static_cast<int32_t>(number - queue->posted.front().number) >= 0) {
        const Chain chain = queue->posted.front();
        queue->posted.pop_front();
        queue->load.free += chain.size.requests;
        queue->load.nbytes -= chain.size.nbytes;
        chain_ended(chain);
        if (gone_)
            return;
    }
}

void Peer::chain_ended(const Chain &chain) {
    Read &read = *chain.read;
    if (--read.outstanding > 0)
        return;
    if (read.failure) {
        if (std::find(posting_.begin(), posting_.end(), &read) == posting_.end())
            end_read(read);
    } else if (read.posted()) {
        if (!read.checking)
            head_arrived(read);
        else if (compare(read))
            next_checks(read);
    }
}

// Everything that might be posted is here: now for the tail, or, after it, for the checks.
void Peer::head_arrived(Read &read) {
    if (read.end == read.rows.size())
        return start_checks(read);
    read.end = read.rows.size();
    posting_.push_back(&read);
}

// Every byte is here: were the regions still registered when they were read?
void Peer::start_checks(Read &read) {
    read.checking = true;
    read.checked = 0;
    std::sort(read.remote_regions.begin(), read.remote_regions.end(),
              [&](uint32_t a, uint32_t b) { return spec_.regions[a].slot < spec_.regions[b].slot; });
    next_checks(read);
}

void Peer::next_checks(Read &read) {
    if (read.checked == read.remote_regions.size())
        return end_read(read);
    if (read.scratch < 0)
        read.scratch = shared_.scratch.take();
    if (read.scratch < 0) {
        waiting_.push_back(&read);
        return;
    }
    read.checks.clear();
    read.at = {};
    const size_t count = std::min(read.remote_regions.size() - read.checked, Scratch::kCookies);
    uint64_t to = reinterpret_cast<uint64_t>(shared_.scratch.at(read.scratch));
    for (size_t i = 0; i < count; ++i, to += sizeof(Cookie))
        read.checks.emplace_back(to, 0, spec_.regions[read.remote_regions[read.checked + i]].slot * sizeof(Cookie),
                                 sizeof(Cookie));
    merge_rows(read.checks);
    read.end = read.checks.size();
    posting_.push_back(&read);
}

// Returns false if the read has ended by it.
bool Peer::compare(Read &read) {
    const uint8_t *seen = shared_.scratch.at(read.scratch);
    if (connecting_ && read.id == 0) {
        if (std::memcmp(seen, spec_.instance.data(), sizeof(Cookie)) != 0)
            end({"PeerIdentityError", name() + " has closed its transport; ask it for its new address", 0}, false);
        else
            end_read(read);
        return false;
    }
    const size_t count = std::min(read.remote_regions.size() - read.checked, Scratch::kCookies);
    for (size_t i = 0; i < count; ++i, seen += sizeof(Cookie)) {
        const uint32_t region = read.remote_regions[read.checked + i];
        if (std::memcmp(seen, spec_.regions[region].cookie.data(), sizeof(Cookie)) == 0)
            continue;
        read.failure = {"StaleRegionError",
                        "region " + std::to_string(region) + " of " + name() + " was deregistered there before read " +
                            std::to_string(read.id) + " ended: its bytes must not be used; ask the peer for new keys",
                        0};
        end_read(read);
        return false;
    }
    read.checked += count;
    return true;
}

void Peer::end_read(Read &read) {
    if (read.scratch >= 0)
        shared_.scratch.give_back(read.scratch);
    std::erase(posting_, &read);
    std::erase(waiting_, &read);
    const auto kept = std::move(reads_.at(read.id));
    reads_.erase(read.id);
    if (kept->id == 0) {
        if (connecting_)
            std::exchange(connecting_, nullptr)->end(kept->failure);
    } else {
        shared_.regions.slots().release(kept->rows, kept->local_slots);
        const Failure &why = kept->failure;
        shared_.done.push({why.kind, kept->id, contact_->id, kept->nrows, kept->rows_posted, kept->nbytes, why.message,
                           why.code});
    }
    if (!waiting_.empty() && !gone_) {
        Read &next = *waiting_.front();
        waiting_.pop_front();
        next_checks(next);
    }
}

void Peer::failed(const ibv_wc &wc, Queue &queue) {
    if (wc.status == IBV_WC_WR_FLUSH_ERR)
        return; // what follows from an error that has been reported
    const std::string what = library().wc_status_str(wc.status);
    const auto number = static_cast<uint32_t>(wc.wr_id);
    const auto chain = std::find_if(queue.posted.begin(), queue.posted.end(),
                                    [&](const Chain &posted) { return posted.number == number; });
    const bool remote = wc.status == IBV_WC_REM_ACCESS_ERR || wc.status == IBV_WC_REM_INV_REQ_ERR ||
                        wc.status == IBV_WC_REM_OP_ERR;
    const bool local = wc.status == IBV_WC_LOC_PROT_ERR || wc.status == IBV_WC_LOC_LEN_ERR;
    if (chain == queue.posted.end() || !(remote || local) || chain->read->id == 0)
        return end({"PeerLostError", name() + " does not answer any more: " + what, static_cast<int>(wc.status)}, true);
    Read &read = *chain->read;
    if (!read.failure && remote)
        read.failure = {"StaleRegionError",
                        "read " + std::to_string(read.id) + " of " + name() +
                            " names memory that is not registered there any more (" + what + "): ask the peer for new keys",
                        static_cast<int>(wc.status)};
    else if (!read.failure)
        read.failure = {"TransportError", "read " + std::to_string(read.id) + " of " + name() + ": " + what,
                        static_cast<int>(wc.status)};
    must_renew_ = true; // the queue pair is of no use any more
}

void Peer::on_port_down(const Device &device, const std::string &event) {
    const bool used = std::any_of(spec_.lanes.begin(), spec_.lanes.end(),
                                  [&](const Lane &lane) { return shared_.devices[lane.ours].get() == &device; });
    if (used)
        end({"PeerLostError", name() + ": " + device.name() + " reports " + event + ": check cable, switch and driver", ENETDOWN}, true);
}

void Peer::end(Failure why, bool lost) {
    if (gone_)
        return;
    gone_ = true;
    {
        std::lock_guard lock(contact_->mutex);
        contact_->gone = true;
        contact_->why = why.message;
    }
    queues_.clear(); // from here on nothing is written
    posting_.clear();
    waiting_.clear();
    const bool connected = !connecting_;
    std::vector<Read *> all;
    for (const auto &[id, read] : reads_)
        all.push_back(read.get());
    for (Read *read : all) {
        if (!read->failure)
            read->failure = why;
        if (read->id == 0 && read->failure.kind == std::string("ReadCancelledError"))
            read->failure = {"TransportClosedError", "the transport was closed while connecting", 0};
        else if (read->id == 0 && read->failure.kind == std::string("PeerLostError"))
            read->failure.kind = "ConnectError";
        end_read(*read);
    }
    if (connecting_)
        std::exchange(connecting_, nullptr)->end(why);
    if (lost && connected)
        lost_ = std::move(why);
}

void Peer::report_lost() {
    if (lost_)
        shared_.done.push({"PeerLostError", 0, contact_->id, 0, 0, 0, lost_.message, lost_.code});
}

} // namespace kvrdma::verbs
