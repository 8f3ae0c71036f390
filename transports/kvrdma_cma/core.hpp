// The transport without Python: regions, peers, batches in flight, and the threads that read.
//
// One mutex guards everything but the copying itself. A worker takes a chunk of the batch at the front of the
// queue and puts the batch back behind the others before it copies, so that batches share the threads and one
// batch can use all of them.
#pragma once

#include <bitset>
#include <condition_variable>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

#include "completions.hpp"
#include "crowding.hpp"
#include "process.hpp"
#include "rows.hpp"

namespace kvrdma::cma {

struct RemoteMemory {
    uint64_t addr, nbytes;
    uint64_t cookie_addr;
    Cookie cookie;
};

// What a process tells peers about itself or about one of its regions.
struct Mark {
    uint32_t id = 0;
    uint64_t cookie_addr = 0;
    Cookie cookie{};
};

struct Identity {
    int pid = 0;
    uint64_t start_time = 0;
    Mark mark;
};

struct Span {
    uint64_t begin, end;
};

// Owns a file descriptor.
class Fd {
  public:
    Fd(int fd, const char *what); // throws TransportError if fd is negative
    ~Fd();
    Fd(const Fd &) = delete;
    Fd &operator=(const Fd &) = delete;
    int get() const noexcept { return fd_; }

  private:
    int fd_;
};

struct PeerState {
    PeerState(uint64_t number, const Identity &who, std::vector<RemoteMemory> regions);

    const uint64_t id;
    const Identity identity;
    const PidFd pidfd;
    const std::vector<RemoteMemory> memory;
    const std::vector<uint64_t> sizes;
    size_t in_flight = 0;
    std::string lost; // why, once the peer is lost
    int lost_code = 0;
    bool lost_reported = false;
    bool disconnected = false;
};

// A read up to this is done by the thread that asks for it, in some microseconds: waking another takes ten times that.
constexpr size_t kRowsHere = 8;
constexpr uint64_t kBytesHere = 4096;

struct Batch {
    uint64_t read = 0;
    std::shared_ptr<PeerState> peer;
    std::vector<Row> rows;
    uint64_t rows_given = 0, nbytes = 0;
    std::map<uint32_t, Span> written; // by local region: from the first to the last byte that may be written
    std::set<uint32_t> remote_regions;
    bool queued = true, prepared = false;
    size_t tail = 0;         // the last rows, read once the others have arrived
    size_t end = 0;          // of what may be claimed now
    size_t rows_posted = 0;
    size_t next = 0;         // first row not yet claimed
    uint64_t next_offset = 0; // and how much of it is
    size_t working = 0;      // threads with a chunk of it in hand
    std::string error_kind, error; // the first failure
    int error_code = 0;

    bool claimed() const noexcept { return prepared && next == end; }
    bool failed() const noexcept { return !error_kind.empty(); }
    void fail(const char *kind, const std::string &why, int code);
};

class Core : public std::enable_shared_from_this<Core> {
  public:
    static std::shared_ptr<Core> open(int threads);

    Identity identity() const { return identity_; }
    Mark add_region(uint64_t addr, uint64_t nbytes);
    void remove_region(uint32_t id);
    uint64_t connect(const Identity &who, std::vector<RemoteMemory> memory);
    uint64_t read(uint64_t peer, const Given &given);
    void disconnect(uint64_t peer);
    void check_open() const;
    void close();
    std::vector<Completion> poll();
    int fd() const noexcept { return completions_.fd(); }

  private:
    struct Local {
        uint64_t addr, nbytes;
        Cookie *cookie;
    };

    Core();
    void require_own_process() const;
    void require_open() const;
    Cookie *take_cookie(const Cookie &value);
    void drop_cookie(Cookie *cookie);
    void start(void (Core::*body)());

    // Threads; defined in worker.cpp.
    void work();
    bool call_another();
    void watch();
    void prepare(Batch &batch, std::unique_lock<std::mutex> &lock);
    bool claim(Batch &batch, Pieces &pieces, uint64_t &nbytes) const;
    void copy_apart(Batch &batch, Pieces &pieces, std::unique_lock<std::mutex> &lock, bool called);
    void copy(Batch &batch, Pieces &pieces, std::unique_lock<std::mutex> &lock);
    void copy_tail(Batch &batch, std::unique_lock<std::mutex> &lock);
    void check_cookies(Batch &batch, std::unique_lock<std::mutex> &lock);
    void read_here(const std::shared_ptr<Batch> &batch, std::unique_lock<std::mutex> &lock);
    void finish(const std::shared_ptr<Batch> &batch, std::unique_lock<std::mutex> &lock);
    void end_failed();
    void lose(PeerState &peer, const std::string &why, int code);
    void settle(PeerState &peer);
    void cancel(PeerState *peer, const char *why);

    const int owner_pid_;
    Identity identity_;
    CompletionQueue completions_;
    RowBuffers buffers_;
    mutable std::mutex mutex_;
    std::condition_variable work_ready_, thread_ended_;
    std::deque<std::shared_ptr<Batch>> queue_;
    std::unordered_map<uint64_t, std::shared_ptr<Batch>> in_flight_;
    std::unordered_map<uint64_t, std::shared_ptr<PeerState>> peers_;
    RegionTable table_;
    std::unordered_map<uint32_t, Local> regions_;
    std::deque<Cookie> cookies_; // stable addresses, reused, never given back while peers may look
    std::vector<Cookie *> free_cookies_;
    uint64_t next_id_ = 1;
    uint32_t next_region_ = 1;
    int threads_ = 0;
    std::vector<pid_t> idle_; // threads that wait for work, or were woken and have not come yet
    bool called_ = false, made_room_ = false; // a thread was woken and has not come; another left its processor to it
    std::bitset<kMostProcessors> at_work_;    // where threads copy
    const Fd epoll_, wake_;
    bool closed_ = false;
};

} // namespace kvrdma::cma
