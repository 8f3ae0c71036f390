#include "transport.hpp"

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <sys/eventfd.h>
#include <unistd.h>
#include <utility>

#include "errors.hpp"

namespace kvrdma::verbs {

namespace {

Devices open_all(const std::vector<PortChoice> &ports) {
    Devices devices;
    for (const PortChoice &port : ports)
        devices.push_back(std::make_unique<Device>(port));
    return devices;
}

} // namespace

Transport::Transport(const std::vector<PortChoice> &ports, const Options &options)
    : options_(options), owner_(getpid()), stop_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)), devices_(open_all(ports)),
      regions_(std::make_unique<Regions>(devices_)),
      worker_(std::make_unique<Worker>(devices_, options_, *regions_, done_)) {}

void Transport::refuse_forked_child() const {
    if (getpid() != owner_)
        throw StatusError("TransportClosedError", "this verbs transport was opened in process " + std::to_string(owner_) +
                                                      " and does not survive fork; spawn the process");
}

Transport::Lock Transport::open() const {
    refuse_forked_child();
    Lock lock(open_mutex_);
    if (!worker_)
        throw StatusError("TransportClosedError", "the verbs transport is closed");
    return lock;
}

std::shared_ptr<Contact> Transport::find(uint64_t peer) const {
    std::lock_guard lock(peers_mutex_);
    const auto found = peers_.find(peer);
    return found == peers_.end() ? nullptr : found->second;
}

void Transport::forget(uint64_t peer) {
    std::lock_guard lock(peers_mutex_);
    peers_.erase(peer);
}

Registered Transport::register_memory(uint64_t addr, uint64_t nbytes, int cuda) {
    const Lock lock = open();
    return regions_->add(addr, nbytes, cuda);
}

void Transport::deregister(uint64_t region) {
    const Lock lock = open();
    regions_->remove(region);
}

Address Transport::address() const {
    const Lock lock = open();
    std::vector<std::string> names;
    for (const auto &device : devices_)
        names.push_back(device->name());
    return {regions_->instance(), worker_->port(), reinterpret_cast<uint64_t>(regions_->table().data()),
            regions_->table().registrations().rkeys(), std::move(names)};
}

std::pair<uint64_t, std::string> Transport::connect(PeerSpec spec, double timeout_s) {
    const int64_t deadline_ns = now_ns() + static_cast<int64_t>(timeout_s * 1e9);
    auto contact = std::make_shared<Contact>();
    auto connecting = std::make_shared<Connecting>();
    for (const RemoteRegion &region : spec.regions)
        contact->sizes.push_back(region.nbytes);
    std::string via;
    {
        const Lock lock = open(); // close() makes what waits here give up
        {
            std::lock_guard peers(peers_mutex_);
            contact->id = next_peer_++;
        }
        auto peer = std::make_unique<Peer>(worker_->shared(), contact, std::move(spec));
        peer->wire_up(deadline_ns, stop_.get());
        via = peer->via();
        std::lock_guard peers(peers_mutex_);
        peers_.emplace(contact->id, contact);
        worker_->submit(AddPeerCommand{std::move(peer), connecting});
    }
    std::unique_lock waiting(connecting->mutex);
    const bool ended = connecting->changed.wait_for(waiting, std::chrono::nanoseconds(deadline_ns - now_ns()),
                                                    [&] { return connecting->ended; });
    if (ended && !connecting->failure)
        return {contact->id, via};
    Failure why = connecting->failure;
    waiting.unlock();
    if (!ended) {
        why = {"ConnectError", "peer " + std::to_string(contact->id) + " (" + via +
                                   ") was joined, but nothing can be read from it: is RDMA traffic between the two hosts "
                                   "let through (UDP 4791 for RoCE), and is the MTU the same?", ETIMEDOUT};
        disconnect(contact->id);
    }
    forget(contact->id);
    throw StatusError(why.kind, why.message, why.code);
}

uint64_t Transport::read(uint64_t peer_id, const Given &given) {
    const Lock lock = open();
    const std::shared_ptr<Contact> contact = find(peer_id);
    if (!contact)
        throw StatusError("PeerLostError", "peer " + std::to_string(peer_id) + " is not connected");
    if (const size_t count = std::max(given.count, given.then_count); count > kMaxRows)
        throw StatusError("RowsError", "a batch of " + std::to_string(count) + " rows: one read takes at most " +
                                           std::to_string(kMaxRows));
    auto read = std::make_unique<Read>();
    read->nrows = given.count;
    read->tail = given.then_count;
    std::vector<bool> seen(contact->sizes.size());
    read->nbytes = regions_->slots().acquire(given, contact->sizes, read->rows, read->local_slots,
                                             [&](const Run &run) {
                                                 if (!seen[run.remote_region])
                                                     read->remote_regions.push_back(run.remote_region);
                                                 seen[run.remote_region] = true;
                                             });
    const uint64_t id = read->id = next_read_++;
    std::lock_guard queueing(contact->mutex);
    if (contact->gone) {
        regions_->slots().release(read->rows, read->local_slots);
        throw StatusError("PeerLostError", "peer " + std::to_string(peer_id) + " was lost: " + contact->why);
    }
    worker_->submit(ReadCommand{peer_id, std::move(read)});
    return id;
}

std::vector<Completion> Transport::poll() {
    refuse_forked_child(); // the eventfd is the parent's, too: reading it there would hide what the parent waits for
    return done_.drain();
}

void Transport::disconnect(uint64_t peer_id) {
    const Lock lock(open_mutex_);
    const std::shared_ptr<Contact> contact = find(peer_id);
    if (!contact || !worker_ || getpid() != owner_)
        return;
    {
        std::lock_guard queueing(contact->mutex);
        contact->gone = true;
        contact->why = "it was disconnected";
    }
    forget(peer_id);
    worker_->submit(DisconnectCommand{peer_id});
}

void Transport::close() {
    if (getpid() != owner_) { // a forked child has no thread to end and must not touch what the parent uses
        (void)worker_.release(), (void)regions_.release();
        for (auto &device : devices_)
            (void)device.release();
        return;
    }
    const uint64_t one = 1;
    [[maybe_unused]] const ssize_t written = ::write(stop_.get(), &one, sizeof one);
    std::unique_lock lock(open_mutex_);
    worker_.reset();
    regions_.reset();
    devices_.clear();
    std::lock_guard peers(peers_mutex_);
    peers_.clear();
}

} // namespace kvrdma::verbs
