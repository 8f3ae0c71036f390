#include "transport.hpp"

#include <algorithm>
#include <chrono>
#include <unistd.h>

#include "cuda.hpp"

namespace kvrdma::ucx {

Transport::Transport(const Options &options)
    : options_(options), owner_(getpid()), context_(std::make_unique<Context>()),
      regions_(std::make_unique<Regions>(*context_)),
      worker_(std::make_unique<Worker>(*context_, options_, *regions_, done_)) {}

void Transport::refuse_forked_child() const {
    if (getpid() != owner_)
        throw StatusError("TransportClosedError", "this UCX transport was opened in process " + std::to_string(owner_) +
                                                      " and does not survive fork; spawn the process");
}

Transport::Lock Transport::open() const {
    refuse_forked_child();
    Lock lock(open_mutex_);
    if (!worker_)
        throw StatusError("TransportClosedError", "the UCX transport is closed");
    return lock;
}

std::shared_ptr<Peer> Transport::find(uint64_t peer) const {
    std::lock_guard lock(peers_mutex_);
    const auto found = peers_.find(peer);
    return found == peers_.end() ? nullptr : found->second;
}

void Transport::forget(uint64_t peer) {
    std::lock_guard lock(peers_mutex_);
    peers_.erase(peer);
}

Facts Transport::facts() const {
    const Lock lock = open();
    return {ucx_version(), context_->resources(), context_->supports(UCS_MEMORY_TYPE_CUDA),
            context_->refuses_emulation()};
}

Registered Transport::register_memory(uint64_t addr, uint64_t nbytes, int cuda) {
    const Lock lock = open();
    if (cuda >= 0 && !context_->supports(UCS_MEMORY_TYPE_CUDA))
        throw StatusError("RegistrationError", "UCX " + ucx_version() +
                                                   " here cannot handle CUDA memory: it was built without CUDA, found no "
                                                   "driver, or UCX_TLS leaves out cuda; install kvrdma[cuda12] or "
                                                   "kvrdma[cuda13]");
    Registered made = regions_->add(addr, nbytes, cuda);
    if (cuda >= 0)
        worker_->submit(UseCudaCommand{cuda_context_of(addr, nbytes, cuda)});
    return made;
}

void Transport::deregister(uint64_t region) {
    const Lock lock = open();
    regions_->remove(region);
}

Address Transport::address() const {
    const Lock lock = open();
    return {worker_->address(), regions_->instance(), regions_->table_addr(), regions_->table_rkey()};
}

Connected Transport::connect(PeerSpec spec, double timeout_s) {
    auto peer = std::make_shared<Peer>();
    auto connecting = std::make_shared<Connecting>();
    for (const RemoteRegion &region : spec.regions)
        peer->sizes.push_back(region.nbytes);
    {
        const Lock lock = open();
        std::lock_guard peers(peers_mutex_);
        peer->id = next_peer_++;
        peers_.emplace(peer->id, peer);
        worker_->submit(ConnectCommand{peer, std::move(spec), connecting});
    } // close() must not wait for this one
    std::unique_lock waiting(connecting->mutex);
    const bool ended = connecting->changed.wait_for(waiting, std::chrono::duration<double>(timeout_s),
                                                    [&] { return connecting->ended; });
    if (ended && !connecting->failure)
        return {peer->id, connecting->one_sided, connecting->via};
    Failure why = connecting->failure;
    waiting.unlock();
    if (!ended) {
        why = {"ConnectError",
               "peer " + std::to_string(peer->id) + " did not answer within " + std::to_string(timeout_s) +
                   " s: it is stopped, gone, or another program listens at its address",
               UCS_ERR_TIMED_OUT};
        disconnect(peer->id);
    }
    forget(peer->id);
    throw StatusError(why.kind, why.message, why.code);
}

uint64_t Transport::read(uint64_t peer_id, const Given &given) {
    const Lock lock = open();
    const std::shared_ptr<Peer> peer = find(peer_id);
    if (!peer)
        throw StatusError("PeerLostError", "peer " + std::to_string(peer_id) + " is not connected");
    if (const size_t count = std::max(given.count, given.then_count); count > kMaxRows)
        throw StatusError("RowsError", "a batch of " + std::to_string(count) + " rows: one read takes at most " +
                                           std::to_string(kMaxRows));
    auto read = std::make_unique<Read>();
    read->nrows = given.count;
    read->tail = given.then_count;
    read->nbytes = regions_->acquire(given, peer->sizes, read->rows, read->local_slots);
    const uint64_t id = read->id = next_read_++;
    std::lock_guard queueing(peer->mutex);
    if (peer->gone) {
        regions_->release(read->rows, read->local_slots);
        throw StatusError("PeerLostError", "peer " + std::to_string(peer_id) + " was lost: " + peer->why);
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
    const std::shared_ptr<Peer> peer = find(peer_id);
    if (!peer || getpid() != owner_) // closed, too: then every peer is gone already
        return;
    {
        std::lock_guard queueing(peer->mutex);
        peer->gone = true;
        peer->why = "it was disconnected";
    }
    forget(peer_id);
    worker_->submit(DisconnectCommand{
        peer_id, {"ReadCancelledError", "peer " + std::to_string(peer_id) + " was disconnected before the read ended", 0}});
}

void Transport::close() {
    if (getpid() != owner_) { // a forked child has no thread to end and must not touch what the parent uses
        (void)worker_.release(), (void)regions_.release(), (void)context_.release();
        return;
    }
    std::unique_lock lock(open_mutex_);
    worker_.reset();
    regions_.reset();
    context_.reset();
    std::lock_guard peers(peers_mutex_);
    peers_.clear();
}

} // namespace kvrdma::ucx
