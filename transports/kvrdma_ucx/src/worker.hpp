// The progress thread: the only thread that touches the UCP workers and the endpoints.
//
// It owns two workers. One serves: its address is what peers get. The other reads: every endpoint belongs to it. UCX
// pairs the endpoints two workers open to each other into one connection, so with a single worker a peer that
// disconnects would end this process's reads from it, too.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <variant>
#include <vector>

#include "consumer.hpp"
#include "endpoint.hpp"
#include "fork.hpp"

namespace kvrdma::ucx {

struct ConnectCommand {
    std::shared_ptr<Peer> peer;
    PeerSpec spec;
    std::shared_ptr<Connecting> connecting;
};
struct ReadCommand {
    uint64_t peer;
    std::unique_ptr<Read> read;
};
struct DisconnectCommand {
    uint64_t peer;
    Failure why;
};
struct UseCudaCommand {
    void *context;
};
struct StopCommand {};
using Command = std::variant<ConnectCommand, ReadCommand, DisconnectCommand, UseCudaCommand, StopCommand>;

class Worker {
  public:
    Worker(Context &context, const Options &options, Regions &regions, CompletionQueue &done);
    ~Worker(); // ends the thread, within 5 s
    Worker(const Worker &) = delete;
    Worker &operator=(const Worker &) = delete;

    const std::string &address() const noexcept { return address_; }
    void submit(Command command);

    // Called back by UCX, in the thread.
    void ask_hello(const void *header, size_t header_nbytes, const char *data, size_t nbytes);
    void answer_hello(const void *header, size_t header_nbytes, const char *data, size_t nbytes);
    void ask_read(const void *header, size_t header_nbytes, const char *data, size_t nbytes);
    void goodbye(const void *header, size_t header_nbytes, const char *data, size_t nbytes);
    void data(const void *header, size_t header_nbytes, const char *data, size_t nbytes);

  private:
    struct Greeting {
        Hello hello;
        std::string address; // of the asking side's worker
    };

    void run();
    bool step();
    void move_on(int64_t now);
    bool take_commands();
    void execute(ConnectCommand &command);
    void execute(ReadCommand &command);
    void execute(DisconnectCommand &command);
    void execute(UseCudaCommand &command);
    void execute(StopCommand &command);
    bool progress();
    bool work();
    void greet();
    void close_failed();
    void retire_finished();
    void sleep();
    void shut_down();

    void create_workers();
    void listen(); // worker_messages.cpp
    Shared shared_;
    ucp_worker_h server_ = nullptr;
    ucp_worker_h &reader_ = shared_.worker;
    std::string address_;
    int poll_fd_ = -1, command_fd_ = -1;
    ForkGuard fork_guard_;

    std::mutex mutex_;
    std::vector<Command> commands_;
    std::atomic<bool> asleep_ = false;

    // Of the thread.
    std::map<uint64_t, std::unique_ptr<Endpoint>> endpoints_;
    std::vector<std::unique_ptr<Endpoint>> parked_; // UCX may still call them back
    std::map<uint64_t, std::unique_ptr<Consumer>> consumers_;
    std::vector<Greeting> greetings_;
    std::vector<Hello> answers_;
    bool stopping_ = false;
    bool serving_ = false; // messages of served reads have come in since the thread last thought of sleeping
    bool crowded_ = false; // one of them from the processor that the thread runs on
    int64_t stop_deadline_ns_ = 0, closing_until_ns_ = 0;
    int64_t awake_until_ns_ = 0, awake_serving_ns_ = 0, settled_until_ns_ = 0;

    std::thread thread_;
};

} // namespace kvrdma::ucx
