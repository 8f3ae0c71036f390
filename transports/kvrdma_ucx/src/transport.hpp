// What the binding wraps: a UCX transport without Python. Every method may be called from any thread.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <string>
#include <sys/types.h>
#include <vector>

#include "worker.hpp"

namespace kvrdma::ucx {

struct Address {
    std::string worker;
    Cookie instance;
    uint64_t table_addr;
    std::string table_rkey;
};

struct Connected {
    uint64_t peer;
    bool one_sided;
    std::string via;
};

struct Facts {
    std::string version;
    std::vector<std::string> resources;
    bool cuda, refuses_emulation;
};

class Transport {
  public:
    static constexpr uint64_t kMaxRows = 1u << 24;

    explicit Transport(const Options &options);
    ~Transport() { close(); }
    Transport(const Transport &) = delete;
    Transport &operator=(const Transport &) = delete;

    Facts facts() const;
    Registered register_memory(uint64_t addr, uint64_t nbytes, int cuda);
    void deregister(uint64_t region);
    Address address() const;
    Connected connect(PeerSpec spec, double timeout_s);
    uint64_t read(uint64_t peer, const Given &given);
    std::vector<Completion> poll();
    int fd() const noexcept { return done_.fd(); }
    void disconnect(uint64_t peer);
    void close();

  private:
    using Lock = std::shared_lock<std::shared_mutex>;
    void refuse_forked_child() const;
    Lock open() const; // throws if closed, or in a forked child
    std::shared_ptr<Peer> find(uint64_t peer) const;
    void forget(uint64_t peer);

    const Options options_;
    const pid_t owner_;
    CompletionQueue done_;
    std::unique_ptr<Context> context_;
    std::unique_ptr<Regions> regions_;
    std::unique_ptr<Worker> worker_;
    mutable std::shared_mutex open_mutex_; // exclusive: closing
    mutable std::mutex peers_mutex_;
    std::map<uint64_t, std::shared_ptr<Peer>> peers_;
    uint64_t next_peer_ = 1;
    std::atomic<uint64_t> next_read_ = 1;
};

} // namespace kvrdma::ucx
