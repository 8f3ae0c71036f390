// What the threads do: prepare, copy and finish batches; notice peers that die.
#include <algorithm>
#include <cstring>
#include <sched.h>
#include <sys/epoll.h>
#include <utility>

#include "core.hpp"

namespace kvrdma::cma {

namespace {

// One call's worth: enough to hide the call, little enough to share a batch between threads and to stop soon.
constexpr uint64_t kChunkBytes = 4u << 20;
// A second thread is woken for what takes the first one longer than waking does.
constexpr uint64_t kWakeBytes = 256u << 10;

} // namespace

void Core::work() {
    // Not to preempt the thread that has just posted: with few processors it would be held for the whole copy.
    const sched_param any{};
    sched_setscheduler(0, SCHED_BATCH, &any);
    Pieces pieces;
    std::unique_lock lock(mutex_);
    while (true) {
        while (queue_.empty()) {
            if (closed_)
                return;
            idle_.push_back(gettid());
            work_ready_.wait(lock);
            std::erase(idle_, gettid());
            called_ = made_room_ = false;
        }
        const auto batch = queue_.front();
        queue_.pop_front();
        batch->queued = false;
        if (!batch->prepared) {
            prepare(*batch, lock);
            batch->queued = true;
            queue_.push_front(batch);
            continue;
        }
        uint64_t nbytes = 0;
        if (claim(*batch, pieces, nbytes)) {
            ++batch->working;
            bool called = false;
            if (!batch->claimed()) {
                batch->queued = true;
                queue_.push_back(batch);
                called = !idle_.empty() && nbytes >= kWakeBytes && !call_another();
            }
            copy_apart(*batch, pieces, lock, called);
            --batch->working;
        }
        if (!batch->queued && batch->working == 0 && (batch->failed() || batch->claimed()))
            finish(batch, lock);
    }
}

// Wakes a thread for what is left. False if the one that was called for the chunk before has not come.
bool Core::call_another() {
    if (called_)
        return made_room_;
    called_ = true;
    work_ready_.notify_one();
    return true;
}

// Merging is off the caller's path and needs no lock: nobody else looks at the rows before it is done.
void Core::prepare(Batch &batch, std::unique_lock<std::mutex> &lock) {
    if (!batch.failed()) {
        lock.unlock();
        const size_t head = merge_batch(batch.rows, batch.tail);
        lock.lock();
        batch.end = batch.rows_posted = head;
    }
    batch.prepared = true;
}

// Takes the next chunk of the batch; false if there is none. Splits long rows so that threads can share them.
bool Core::claim(Batch &batch, Pieces &pieces, uint64_t &nbytes) const {
    pieces.clear();
    const uint64_t most = idle_.empty() ? kChunkBytes : kWakeBytes; // so that a thread that comes finds something to do
    if (!batch.peer->lost.empty())
        batch.fail("PeerLostError", batch.peer->lost, batch.peer->lost_code);
    if (batch.failed())
        return false;
    while (batch.next < batch.end && !pieces.full() && nbytes < most) {
        const Row &row = batch.rows[batch.next];
        const uint64_t part = std::min(row.length - batch.next_offset, most - nbytes);
        const uint64_t remote = batch.peer->memory[row.remote_region()].addr + row.offset;
        pieces.add(row.local + batch.next_offset, remote + batch.next_offset, part);
        nbytes += part;
        batch.next_offset += part;
        if (batch.next_offset == row.length) {
            ++batch.next;
            batch.next_offset = 0;
        }
    }
    return !pieces.empty();
}

// Copies, on a processor that no other thread of the pool copies on, or that a thread which was called waits for.
void Core::copy_apart(Batch &batch, Pieces &pieces, std::unique_lock<std::mutex> &lock, bool called) {
    const bool crowded = at_work_.test(processor());
    if (crowded || called) {
        const std::vector<pid_t> idle = called ? idle_ : std::vector<pid_t>{};
        lock.unlock();
        const size_t here = processor();
        const bool wanted = std::any_of(idle.begin(), idle.end(), [&](pid_t thread) { return waits_for(thread, here); });
        if (crowded || wanted)
            leave_processor();
        lock.lock();
        made_room_ |= wanted && called_;
    }
    const size_t here = processor();
    const bool alone = !at_work_.test(here);
    at_work_.set(here);
    copy(batch, pieces, lock);
    if (alone)
        at_work_.reset(here);
}

void Core::copy(Batch &batch, Pieces &pieces, std::unique_lock<std::mutex> &lock) {
    const pid_t pid = batch.peer->identity.pid;
    lock.unlock();
    const auto result = pieces.read_from(pid);
    char byte = 0;
    const bool remote_bad = result.error == EFAULT && peek(pid, result.remote, &byte, 1) == EFAULT;
    lock.lock();
    if (result.error == 0)
        return;
    char where[80];
    snprintf(where, sizeof where, " (local 0x%llx, remote 0x%llx)", (unsigned long long)result.local,
             (unsigned long long)result.remote);
    if (result.error == ESRCH)
        lose(*batch.peer, "its process has exited", ESRCH);
    else if (remote_bad)
        batch.fail("StaleRegionError", std::string("the peer has unmapped memory it registered") + where, EFAULT);
    else
        batch.fail("TransportError", std::string("process_vm_readv: ") + strerror(result.error) + where,
                   result.error);
}

// The rest of a batch whose head has arrived.
void Core::copy_tail(Batch &batch, std::unique_lock<std::mutex> &lock) {
    Pieces pieces;
    uint64_t nbytes = 0;
    batch.end = batch.rows.size();
    for (; claim(batch, pieces, nbytes); nbytes = 0)
        copy(batch, pieces, lock);
}

// The bytes count only if the process and its registrations were still what the keys say after they were read.
void Core::check_cookies(Batch &batch, std::unique_lock<std::mutex> &lock) {
    const PeerState &peer = *batch.peer;
    lock.unlock();
    Cookie seen{};
    std::string lost, stale;
    const auto differs = [&](uint64_t addr, const Cookie &cookie) {
        return peek(peer.identity.pid, addr, seen.data(), seen.size()) != 0 || seen != cookie;
    };
    for (const uint32_t index : batch.remote_regions)
        if (differs(peer.memory[index].cookie_addr, peer.memory[index].cookie))
            stale = "the peer has deregistered region " + std::to_string(index);
    if (differs(peer.identity.mark.cookie_addr, peer.identity.mark.cookie))
        lost = "it has closed its transport or runs another program now";
    if (peer.pidfd.exited())
        lost = "its process has exited";
    lock.lock();
    if (!lost.empty())
        lose(*batch.peer, lost, 0);
    else if (!stale.empty())
        batch.fail("StaleRegionError", stale, 0);
}

void Core::read_here(const std::shared_ptr<Batch> &batch, std::unique_lock<std::mutex> &lock) {
    Pieces pieces;
    uint64_t nbytes = 0;
    batch->queued = false;
    batch->working = 1; // whoever cancels it meanwhile leaves its end to this thread
    prepare(*batch, lock);
    for (; claim(*batch, pieces, nbytes); nbytes = 0)
        copy(*batch, pieces, lock);
    batch->working = 0;
    finish(batch, lock);
}

void Core::finish(const std::shared_ptr<Batch> &batch, std::unique_lock<std::mutex> &lock) {
    if (!batch->failed() && batch->end < batch->rows.size())
        copy_tail(*batch, lock);
    if (!batch->failed())
        check_cookies(*batch, lock);
    if (!batch->peer->lost.empty())
        batch->fail("PeerLostError", batch->peer->lost, batch->peer->lost_code);
    in_flight_.erase(batch->read);
    --batch->peer->in_flight;
    completions_.push({batch->error_kind, batch->read, batch->peer->id, batch->rows_given, batch->rows_posted,
                       batch->nbytes, batch->error, batch->error_code});
    buffers_.give_back(std::move(batch->rows));
    settle(*batch->peer);
}

void Core::lose(PeerState &peer, const std::string &why, int code) {
    if (peer.lost.empty()) {
        peer.lost = "process " + std::to_string(peer.identity.pid) + " is gone: " + why;
        peer.lost_code = code;
    }
    for (const auto &[read, batch] : in_flight_)
        if (batch->peer.get() == &peer)
            batch->fail("PeerLostError", peer.lost, peer.lost_code);
    end_failed();
    settle(peer);
}

// Ends the failed batches that no thread has in hand, so that they need not wait for their turn; the others are
// ended by the last thread that has them.
void Core::end_failed() {
    std::vector<std::shared_ptr<Batch>> failed;
    std::erase_if(queue_, [&](const auto &batch) {
        if (batch->failed())
            failed.push_back(batch);
        return batch->failed();
    });
    std::unique_lock<std::mutex> unused;
    for (const auto &batch : failed) {
        batch->queued = false;
        if (batch->working == 0)
            finish(batch, unused); // it has failed, so the lock is not touched
    }
}

// Reports a lost peer once its reads have ended, and forgets a disconnected one.
void Core::settle(PeerState &peer) {
    if (peer.in_flight)
        return;
    if (!peer.lost.empty() && !peer.lost_reported && !peer.disconnected && !closed_) {
        peer.lost_reported = true;
        completions_.push({"PeerLostError", 0, peer.id, 0, 0, 0, peer.lost, peer.lost_code});
    }
    if (!peer.lost.empty() || peer.disconnected)
        epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, peer.pidfd.fd(), nullptr);
    if (peer.disconnected)
        peers_.erase(peer.id); // the last use of `peer`
}

void Core::watch() {
    epoll_event events[16];
    while (true) {
        const int n = epoll_wait(epoll_.get(), events, 16, -1);
        std::lock_guard lock(mutex_);
        if (closed_)
            return;
        for (int i = 0; i < n; ++i) {
            const auto found = peers_.find(events[i].data.u64);
            if (found == peers_.end())
                continue;
            const auto peer = found->second; // settle may erase it
            epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, peer->pidfd.fd(), nullptr);
            lose(*peer, "its process has exited", ESRCH);
        }
    }
}

} // namespace kvrdma::cma
