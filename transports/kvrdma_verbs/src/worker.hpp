// The transport's thread: posts, collects completions, watches peers, and joins the queue pairs of those that read us.
// It sleeps in epoll; every descriptor that can wake it is in one set.
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <variant>
#include <vector>

#include "peer.hpp"

namespace kvrdma::verbs {

struct AddPeerCommand {
    std::unique_ptr<Peer> peer;
    std::shared_ptr<Connecting> connecting;
};
struct ReadCommand {
    uint64_t peer;
    std::unique_ptr<Read> read;
};
struct DisconnectCommand {
    uint64_t peer;
};
struct StopCommand {};
using Command = std::variant<AddPeerCommand, ReadCommand, DisconnectCommand, StopCommand>;

// Somebody who reads us: a TCP connection and the queue pairs that answer.
struct Visitor {
    Fd socket;
    std::vector<std::unique_ptr<QueuePair>> pairs;
    std::vector<char> inbox;
    int64_t since_ns = 0;
    bool joined = false;
};

class Worker {
  public:
    Worker(const Devices &devices, const Options &options, Regions &regions, CompletionQueue &done);
    ~Worker();

    uint16_t port() const noexcept { return port_; }
    Shared &shared() noexcept { return shared_; }
    void submit(Command command);

  private:
    enum class Source : uint64_t { kCommand, kListener, kChannel, kAsync, kPeer, kVisitor };

    void watch(int fd, Source source, uint64_t id);
    void run();
    int wait_ms();
    void handle(uint64_t tag);
    void take_commands();
    void execute(AddPeerCommand &command);
    void execute(ReadCommand &command);
    void execute(DisconnectCommand &command);
    void execute(StopCommand &command);
    void on_channel(const Device &device);
    void on_async(const Device &device);
    void lose(const Device &device, const std::string &why);
    void accept_visitors();
    void on_visitor(uint64_t id);
    bool greet(Visitor &visitor);
    Verdict make_pairs(Visitor &visitor, const Hello &hello, const std::vector<QueueEnd> &theirs,
                       std::vector<QueueEnd> &ours);
    void retire();
    void tidy();

    Shared shared_;
    Fd poll_, command_, listener_;
    uint16_t port_ = 0;
    std::vector<ibv_cq *> visitor_cqs_; // by device; nothing ever completes there
    std::map<uint64_t, std::unique_ptr<Peer>> peers_;
    std::map<uint64_t, Visitor> visitors_;
    uint64_t next_visitor_ = 1;
    std::mutex mutex_;
    std::vector<Command> commands_;
    std::atomic<bool> asleep_{false};
    int64_t active_ns_ = 0, tidy_ns_ = 0;
    bool stopping_ = false;
    std::thread thread_;
};

} // namespace kvrdma::verbs
