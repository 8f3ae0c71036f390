// A peer as the progress thread sees it: connect, post, check, close. Every method runs in that thread.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "completions.hpp"
#include "context.hpp"
#include "messages.hpp"
#include "read.hpp"
#include "regions.hpp"

namespace kvrdma::ucx {

struct RemoteRegion {
    uint64_t addr, nbytes;
    uint32_t slot;
    int cuda; // index of the GPU there, negative for host memory
    Cookie cookie;
    std::string rkey;
};

// What a peer's address and keys say, as opened by Python.
struct PeerSpec {
    std::string address;
    Cookie instance;
    uint64_t table_addr;
    std::string table_rkey;
    std::vector<RemoteRegion> regions;
};

// The part of a peer that callers and the progress thread share.
struct Peer {
    uint64_t id = 0;
    std::vector<uint64_t> sizes;
    std::mutex mutex; // held while a read is queued: none is, once `gone` is set
    bool gone = false;
    std::string why;
};

// A caller waiting in connect().
struct Connecting {
    std::mutex mutex;
    std::condition_variable changed;
    bool ended = false;
    Failure failure;
    bool one_sided = false;
    std::string via;

    void end(Failure why) {
        std::lock_guard lock(mutex);
        ended = true;
        failure = std::move(why);
        changed.notify_all();
    }
};

// What the endpoints of one transport share.
struct Shared {
    Context &context;
    const Options &options;
    Regions &regions;
    CompletionQueue &done;
    ucp_worker_h worker = nullptr; // the one that reads
    std::string worker_address = {};
    std::vector<Endpoint *> failed = {}; // to be closed outside of UCX callbacks
};

inline ucp_err_handling_mode_t error_mode(const Options &options) {
    return options.peer_errors ? UCP_ERR_HANDLING_MODE_PEER : UCP_ERR_HANDLING_MODE_NONE;
}

class Endpoint {
  public:
    Endpoint(Shared &shared, std::shared_ptr<Peer> peer, PeerSpec spec, std::shared_ptr<Connecting> connecting);
    ~Endpoint();
    Endpoint(const Endpoint &) = delete;
    Endpoint &operator=(const Endpoint &) = delete;

    void connect(uint64_t oldest_peer);
    void on_hello(const Hello &answer);
    void on_data(const Data &header, const uint8_t *bytes, size_t nbytes); // in a UCX callback

    void add(std::unique_ptr<Read> read);
    // Ends what has arrived and posts up to `quantum` pieces. Returns whether there is more to do right now.
    bool work(uint32_t quantum);

    void fail(Failure why); // from UCX callbacks: the worker closes the endpoint afterwards
    void close_failed() { close(std::move(failure_), true); }
    void close(Failure why, bool lost);
    bool closing() const noexcept { return closing_; }
    bool finished() const noexcept { return closed_ && outstanding_ == 0; }
    // Given up before it was wired up, where UCX cannot bear that: it is reported, and kept as it is for ever.
    bool parked() const noexcept { return parked_; }
    void report(); // once finished: the end of every read, then of the peer

  private:
    // A part of a read that the peer was asked to serve.
    struct Part {
        uint64_t local;
        uint32_t slot, nbytes;
        bool arrived;
    };
    struct Ask {
        Endpoint *endpoint;
        Read *read;
        AskRead header;
        std::vector<uint8_t> payload;
        std::vector<Part> parts;
        size_t missing;
        bool sent;
    };

    // endpoint.cpp: connect and close
    void create();
    void examine_lanes();
    void send_hello();
    void say_goodbye();
    void unpack_keys();
    void plan_probes();
    void probe_next();
    void probe_arrived(ucs_status_t status);
    void connected(bool one_sided);
    [[noreturn]] void refuse_emulation(const std::string &found) const;

    // endpoint_served.cpp
    void post_asks(uint32_t quantum);
    bool post_ask(Read &read);
    void fill(Ask &ask, std::vector<WireRegion> &regions, std::vector<WirePiece> &pieces);
    bool send(Ask &ask);
    bool place(Ask &ask, const Data &header, const uint8_t *bytes, size_t nbytes);
    void ask_failed(Ask &ask, const Data &header);
    void ask_ended(uint64_t id);

    // endpoint_reads.cpp
    bool can_post() const noexcept;
    void post_pieces(uint32_t quantum);
    bool post_piece(Read &read);
    void post_checks();
    bool post_check(CookieCheck &check);
    void requeue(Read &read, std::deque<Read *> &queue, bool more);
    void settle(Read &read);
    void plan_checks(Read &read);
    void compare(const CookieCheck &check);
    void fail_read(Read &read, ucs_status_t status, const char *what);
    void request_ended(Read &read);
    void part_ended(Read &read);
    void end_read(Read &read);

    ucs_status_ptr_t get(void *to, size_t nbytes, uint64_t from, ucp_rkey_h rkey, ucp_request_param_t &param);
    Failure failure_of(ucs_status_t status, const std::string &what) const;
    std::string name() const;

    static void on_error(void *self, ucp_ep_h ep, ucs_status_t status);
    static void on_piece(void *request, ucs_status_t status, void *read);
    static void on_check(void *request, ucs_status_t status, void *check);
    static void on_probe(void *request, ucs_status_t status, void *self);
    static void on_ask_sent(void *request, ucs_status_t status, void *ask);
    static void on_hello_sent(void *request, ucs_status_t status, void *self);
    static void on_closed(void *request, ucs_status_t status, void *self);

    Shared &shared_;
    std::shared_ptr<Peer> peer_;
    PeerSpec spec_;
    std::shared_ptr<Connecting> connecting_; // null once connected
    OwnMemory scratch_;                      // where cookies arrive
    std::vector<uint32_t> free_chunks_;
    Hello hello_;
    Goodbye goodbye_;
    uint64_t session_ = 0; // the peer's id of this connection


    ucp_ep_h ep_ = nullptr;
    ucp_rkey_h table_ = nullptr;
    std::vector<ucp_rkey_h> rkeys_;
    bool one_sided_ = false;
    struct Probe {
        ucp_rkey_h rkey;
        uint64_t addr, nbytes;
    };
    std::vector<Probe> probes_; // last one first
    std::string lanes_, one_sided_lanes_, via_;

    uint64_t next_ask_ = 1;
    std::map<uint64_t, std::unique_ptr<Ask>> asks_;
    uint32_t outstanding_ = 0; // requests whose callback has not come
    std::map<uint64_t, std::unique_ptr<Read>> reads_;
    std::deque<Read *> posting_, checking_, arrived_;
    bool failing_ = false, closing_ = false, closed_ = false, lost_ = false, parked_ = false;
    bool greeted_ = false; // the greeting has left: the endpoint is wired up
    Failure failure_;
};

} // namespace kvrdma::ucx
