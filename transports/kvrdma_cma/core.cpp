// What callers do: regions, peers, posting, closing. Nothing here waits for a peer, or copies more than a few KiB.
#include "core.hpp"

#include <atomic>
#include <chrono>
#include <cstring>
#include <sys/epoll.h>
#include <system_error>
#include <thread>

namespace kvrdma::cma {

namespace {

constexpr auto kCloseWait = std::chrono::seconds(4);

std::vector<uint64_t> sizes_of(const std::vector<RemoteMemory> &memory) {
    std::vector<uint64_t> sizes;
    for (const auto &region : memory)
        sizes.push_back(region.nbytes);
    return sizes;
}

// Adds to the regions a batch touches on either side.
void note_run(Batch &batch, const Run &run) {
    Span &span = batch.written.try_emplace(run.local_region, Span{run.begin, run.end}).first->second;
    span.begin = std::min(span.begin, run.begin);
    span.end = std::max(span.end, run.end);
    batch.remote_regions.insert(run.remote_region);
}

void check_own_memory(uint64_t addr, uint64_t nbytes) {
    char byte = 0;
    if (addr + nbytes < addr || peek(getpid(), addr, &byte, 1) || peek(getpid(), addr + nbytes - 1, &byte, 1))
        throw StatusError("RegistrationError", std::to_string(nbytes) + " bytes at " + std::to_string(addr) +
                                                   " are not memory that this process can read",
                          EFAULT);
}

} // namespace

PeerState::PeerState(uint64_t number, const Identity &who, std::vector<RemoteMemory> regions)
    : id(number), identity(who), pidfd(who.pid), memory(std::move(regions)), sizes(sizes_of(memory)) {}

void Batch::fail(const char *kind, const std::string &why, int code) {
    if (failed())
        return;
    error_kind = kind;
    error = "read " + std::to_string(read) + " from peer " + std::to_string(peer->id) + " (process " +
            std::to_string(peer->identity.pid) + "): " + why;
    error_code = code;
}

Fd::Fd(int fd, const char *what) : fd_(fd) {
    if (fd < 0)
        throw StatusError("TransportError", std::string(what) + ": " + strerror(errno) + " (see ulimit -n)", errno);
}

Fd::~Fd() { ::close(fd_); }

Core::Core()
    : owner_pid_(getpid()), epoll_(epoll_create1(EPOLL_CLOEXEC), "epoll_create1"),
      wake_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK), "eventfd") {
    epoll_event event{.events = EPOLLIN, .data = {.u64 = 0}};
    epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, wake_.get(), &event);
    const Cookie cookie = random_cookie();
    identity_ = {owner_pid_, start_time(owner_pid_),
                 {0, reinterpret_cast<uint64_t>(take_cookie(cookie)), cookie}};
}

std::shared_ptr<Core> Core::open(int threads) {
    std::shared_ptr<Core> core(new Core);
    try {
        for (int i = 0; i < threads; ++i)
            core->start(&Core::work);
        core->start(&Core::watch);
    } catch (const std::system_error &error) {
        core->close();
        throw StatusError("TransportError", std::string("cannot start a thread: ") + error.what(),
                          error.code().value());
    }
    return core;
}

// Threads are detached and keep the core alive, so that close() can stop waiting for one that is stuck in the
// kernel without leaving it a dangling pointer.
void Core::start(void (Core::*body)()) {
    std::lock_guard lock(mutex_);
    std::thread([self = shared_from_this(), body] {
        (self.get()->*body)();
        std::lock_guard ended(self->mutex_);
        --self->threads_;
        self->thread_ended_.notify_all();
    }).detach();
    ++threads_;
}

void Core::check_open() const {
    std::lock_guard lock(mutex_);
    require_open();
}

void Core::require_own_process() const {
    if (getpid() != owner_pid_)
        throw StatusError("TransportClosedError", "the transport was opened in process " +
                                                      std::to_string(owner_pid_) + " and does not survive fork: "
                                                      "open it after the fork, or spawn");
}

void Core::require_open() const {
    require_own_process();
    if (closed_)
        throw StatusError("TransportClosedError", "the transport is closed");
}

Cookie *Core::take_cookie(const Cookie &value) {
    if (free_cookies_.empty())
        free_cookies_.push_back(&cookies_.emplace_back());
    Cookie *cookie = free_cookies_.back();
    free_cookies_.pop_back();
    *cookie = value;
    return cookie;
}

// Peers may read it at any time: it must be zero before the memory it stood for can be used otherwise.
void Core::drop_cookie(Cookie *cookie) {
    for (uint8_t &byte : *cookie)
        *static_cast<volatile uint8_t *>(&byte) = 0;
    std::atomic_thread_fence(std::memory_order_seq_cst);
    free_cookies_.push_back(cookie);
}

Mark Core::add_region(uint64_t addr, uint64_t nbytes) {
    std::lock_guard lock(mutex_);
    require_open();
    if (nbytes == 0)
        throw StatusError("RegistrationError", "a region of 0 bytes at " + std::to_string(addr));
    check_own_memory(addr, nbytes);
    const Cookie value = random_cookie();
    Cookie *cookie = take_cookie(value);
    const uint32_t id = next_region_++;
    regions_[id] = {addr, nbytes, cookie};
    table_.add(id, addr, nbytes);
    return {id, reinterpret_cast<uint64_t>(cookie), value};
}

void Core::remove_region(uint32_t id) {
    std::lock_guard lock(mutex_);
    require_open();
    const auto found = regions_.find(id);
    if (found == regions_.end())
        throw StatusError("RegistrationError", "region " + std::to_string(id) + " is not registered here");
    // By address, not by id: where regions overlap, a row counts to one of them.
    const uint64_t begin = found->second.addr, end = begin + found->second.nbytes;
    for (const auto &[read, batch] : in_flight_)
        for (const auto &[region, span] : batch->written)
            if (span.begin < end && begin < span.end)
                throw StatusError("RegionBusyError", "region " + std::to_string(id) + " is the destination of read " +
                                                         std::to_string(read) + ": poll until it ends");
    drop_cookie(found->second.cookie);
    table_.remove(id);
    regions_.erase(found);
}

uint64_t Core::connect(const Identity &who, std::vector<RemoteMemory> memory) {
    check_open();
    // The pidfd comes first: what is checked after it is about the process it stands for.
    auto peer = std::make_shared<PeerState>(0, who, std::vector<RemoteMemory>{});
    const std::string name = "process " + std::to_string(who.pid);
    const uint64_t started = start_time(who.pid);
    if (started == 0 && !peer->pidfd.exited())
        throw StatusError("ConnectError", "the start time of " + name + " cannot be read: " + strerror(errno) +
                                              " (see ulimit -n)", errno);
    if (started != 0 && started != who.start_time)
        throw StatusError("PeerIdentityError", name + " started at tick " + std::to_string(started) +
                                                   " of this boot, the address is of one that started at " +
                                                   std::to_string(who.start_time) + ": the PID was reused");
    Cookie seen;
    if (const int error = peek(who.pid, who.mark.cookie_addr, seen.data(), seen.size()))
        throw StatusError(error == EPERM ? "PeerPermissionError" : "ConnectError",
                          "the memory of " + name + " cannot be read: process_vm_readv: " + strerror(error), error);
    if (seen != who.mark.cookie)
        throw StatusError("PeerIdentityError", name + " has closed the transport that made this address, or runs "
                                                      "another program now: ask it for a new address");
    std::lock_guard lock(mutex_);
    require_open();
    const uint64_t id = next_id_++;
    peer = std::make_shared<PeerState>(id, who, std::move(memory));
    epoll_event event{.events = EPOLLIN, .data = {.u64 = id}};
    if (epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, peer->pidfd.fd(), &event))
        throw StatusError("ConnectError", name + " cannot be watched: " + strerror(errno), errno);
    peers_[id] = peer;
    return id;
}

uint64_t Core::read(uint64_t peer_id, const Given &given) {
    auto batch = std::make_shared<Batch>();
    batch->rows = buffers_.take();
    batch->rows_given = given.count;
    batch->tail = given.then_count;
    std::unique_lock lock(mutex_);
    require_open();
    const auto found = peers_.find(peer_id);
    if (found == peers_.end() || found->second->disconnected)
        throw StatusError("PeerLostError", "peer " + std::to_string(peer_id) + " is not connected: connect again");
    PeerState &peer = *found->second;
    if (!peer.lost.empty())
        throw StatusError("PeerLostError", "peer " + std::to_string(peer_id) + " was lost: " + peer.lost, peer.lost_code);
    const Taken taken = take_batch(given, batch->rows, table_, peer.sizes, [&](const Run &run) { note_run(*batch, run); });
    batch->nbytes = taken.nbytes;
    batch->peer = found->second;
    batch->read = next_id_++;
    ++peer.in_flight;
    const uint64_t id = batch->read;
    in_flight_[id] = batch;
    if (batch->rows.size() <= kRowsHere && taken.nbytes + taken.then_nbytes <= kBytesHere) {
        read_here(batch, lock);
        return id;
    }
    queue_.push_back(batch);
    const bool wake = !idle_.empty(); // a thread that does not wait looks at the queue before it does
    lock.unlock();               // else the thread that is woken waits for this one, which is then held to wake it again
    if (wake)
        work_ready_.notify_one();
    return id;
}

void Core::cancel(PeerState *peer, const char *why) {
    for (const auto &[read, batch] : in_flight_)
        if (!peer || batch->peer.get() == peer)
            batch->fail("ReadCancelledError", why, 0);
    end_failed();
    work_ready_.notify_all();
}

std::vector<Completion> Core::poll() {
    require_own_process(); // the descriptor is shared with a forked child; its reads would take our wake-ups
    return completions_.drain();
}

void Core::disconnect(uint64_t peer_id) {
    std::lock_guard lock(mutex_);
    const auto found = peers_.find(peer_id);
    if (found == peers_.end() || closed_ || getpid() != owner_pid_)
        return;
    const auto peer = found->second;
    peer->disconnected = true;
    cancel(peer.get(), "the peer was disconnected before it ended");
    settle(*peer);
}

void Core::close() {
    if (getpid() != owner_pid_)
        return; // a forked child has none of the threads
    std::unique_lock lock(mutex_);
    if (!closed_) {
        closed_ = true;
        for (auto &[id, region] : regions_)
            drop_cookie(region.cookie);
        drop_cookie(reinterpret_cast<Cookie *>(identity_.mark.cookie_addr));
        cancel(nullptr, "the transport was closed before it ended");
        const uint64_t one = 1;
        [[maybe_unused]] const ssize_t n = ::write(wake_.get(), &one, sizeof one);
    }
    thread_ended_.wait_for(lock, kCloseWait, [this] { return threads_ == 0; });
    if (threads_ == 0)
        peers_.clear();
}

} // namespace kvrdma::cma
