// One peer that is read: its queue pairs, and the reads on their way. Belongs to the worker's thread once it is wired up.
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
#include "queue.hpp"
#include "regions.hpp"
#include "wireup.hpp"

namespace kvrdma::verbs {

struct Options {
    uint32_t queues_per_lane = 4;
    uint32_t busy_poll_us = 0;
};

struct RemoteRegion {
    uint64_t addr, nbytes;
    uint32_t slot;
    Cookie cookie;
    std::vector<uint32_t> rkeys; // by device of the peer
};

struct Lane {
    uint16_t ours, theirs;
};

struct PeerSpec {
    std::vector<std::string> hosts;
    uint16_t port;
    Cookie instance;
    uint64_t table_addr;
    std::vector<uint32_t> table_rkeys;
    std::vector<RemoteRegion> regions;
    std::vector<Lane> lanes;
};

struct Failure {
    const char *kind = "";
    std::string message;
    int code = 0;
    explicit operator bool() const noexcept { return *kind != 0; }
};

// What callers' threads know of a peer.
struct Contact {
    uint64_t id = 0;
    std::vector<uint64_t> sizes;
    std::mutex mutex; // orders reads with the peer's end
    bool gone = false;
    std::string why;
};

// Filled by the worker, waited for in connect().
struct Connecting {
    std::mutex mutex;
    std::condition_variable changed;
    bool ended = false;
    Failure failure;

    void end(Failure why);
};

struct Read {
    uint64_t id = 0, nrows = 0, rows_posted = 0, nbytes = 0;
    std::vector<Row> rows;
    size_t tail = 0; // the last of them, read once the others have arrived
    size_t end = 0;  // of the rows, or the checks, that may be posted now
    std::vector<uint32_t> local_slots, remote_regions;
    Cursor at;
    uint32_t outstanding = 0; // chains
    Failure failure;
    // After the data: cookies of the regions read, into a piece of the worker's scratch memory.
    bool checking = false;
    int64_t scratch = -1;
    size_t checked = 0; // regions
    std::vector<Row> checks;

    bool posted() const noexcept { return at.row == end; }
};

// Memory for cookies on their way, in equal pieces.
class Scratch {
  public:
    static constexpr size_t kCookies = 256, kPieces = 256;

    explicit Scratch(const Devices &devices);
    int64_t take(); // negative: none is free
    void give_back(int64_t piece) { free_.push_back(piece); }
    uint8_t *at(int64_t piece) const noexcept { return memory_.data() + piece * kCookies * sizeof(Cookie); }
    uint32_t lkey(size_t device) const noexcept { return memory_.registrations().lkey(device); }

  private:
    OwnMemory memory_;
    std::vector<int64_t> free_;
};

struct Shared {
    const Devices &devices;
    const Options &options;
    Regions &regions;
    CompletionQueue &done;
    Scratch scratch;
};

class Peer {
  public:
    // In the thread that connects: makes queue pairs and joins them with the peer's over TCP. Throws.
    Peer(Shared &shared, std::shared_ptr<Contact> contact, PeerSpec spec);
    void wire_up(int64_t deadline_ns, int stop);
    ~Peer();

    uint64_t id() const noexcept { return contact_->id; }
    int fd() const noexcept { return socket_.get(); }
    bool gone() const noexcept { return gone_; }
    std::string why() const { // it is gone
        std::lock_guard lock(contact_->mutex);
        return contact_->why;
    }
    const std::string &via() const noexcept { return via_; }

    // In the worker's thread.
    void begin(std::shared_ptr<Connecting> connecting); // reads the peer's cookie: the proof that reading works
    void add(std::unique_ptr<Read> read);
    bool post();         // one chain each for its reads; whether there is more to do now
    void collect();      // what its completion queues hold
    void on_readable();  // its socket
    void on_port_down(const Device &device, const std::string &event);
    int64_t deadline_ns() const noexcept { return renewing_ ? renew_by_ns_ : 0; }
    void check_time();
    void end(Failure why, bool lost); // every read ends with it, nothing is written afterwards
    void report_lost(); // last: once every read that callers had posted before has been reported

  private:
    void make_queues();
    std::vector<char> greeting() const;
    void join(const std::vector<QueueEnd> &theirs);
    bool post_chain(Read &read);
    void completed(const ibv_wc &wc);
    Queue *find(uint32_t serial) noexcept;
    void chain_ended(const Chain &chain);
    void head_arrived(Read &read);
    void start_checks(Read &read);
    void next_checks(Read &read);
    bool compare(Read &read);
    void end_read(Read &read);
    void failed(const ibv_wc &wc, Queue &queue);
    void renew();
    std::string name() const { return "peer " + std::to_string(contact_->id) + " (" + via_ + ")"; }

    Shared &shared_;
    const std::shared_ptr<Contact> contact_;
    const PeerSpec spec_;
    std::vector<ibv_cq *> cqs_; // by lane
    std::vector<Queue> queues_;
    Fd socket_;
    std::string via_;
    std::shared_ptr<Connecting> connecting_;
    std::map<uint64_t, std::unique_ptr<Read>> reads_;
    std::deque<Read *> posting_, waiting_; // with something to post; waiting for scratch memory
    std::vector<char> inbox_;
    bool renewing_ = false, must_renew_ = false, gone_ = false;
    Failure lost_; // what PeerLost will say
    int64_t renew_by_ns_ = 0;
    uint32_t next_serial_ = 1;
};

} // namespace kvrdma::verbs
