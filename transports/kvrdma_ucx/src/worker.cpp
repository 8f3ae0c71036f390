#include "worker.hpp"

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <pthread.h>
#include <sched.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <system_error>
#include <unistd.h>
#include <utility>

#include "crowding.hpp"
#include "cuda.hpp"

namespace kvrdma::ucx {

namespace {

constexpr uint32_t kQuantum = 16;     // pieces one peer may post before the next one's turn
// How long the thread looks for more before it sleeps: longer between the messages of a served read, where every sleep
// costs both sides a wake-up that takes longer than the next message.
constexpr int64_t kAwakeNs = 10'000, kAwakeServingNs = 200'000;
constexpr int64_t kSettledNs = 500'000; // between two moves to another processor
constexpr int kRoundsPerStep = 64;    // events handled before new commands and pieces get their turn
constexpr int64_t kStopNs = 3'500'000'000;
constexpr int kClosingMs = 1;
constexpr int64_t kClosingNs = 100'000'000; // how long after a close the thread looks after it

int64_t now_ns() {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
        .count();
}

void watch(int poll_fd, int fd) {
    epoll_event event = {};
    event.events = EPOLLIN;
    event.data.fd = fd;
    if (epoll_ctl(poll_fd, EPOLL_CTL_ADD, fd, &event) != 0)
        throw StatusError("TransportError", std::string("epoll_ctl failed: ") + std::strerror(errno) + " (see ulimit -n)", errno);
}

ucp_worker_h new_worker(const Context &context) {
    ucp_worker_params_t params = {};
    params.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE;
    params.thread_mode = UCS_THREAD_MODE_SERIALIZED;
    ucp_worker_h worker = nullptr;
    throw_unless_ok(ucp_worker_create(context.handle(), &params, &worker), "TransportUnavailableError",
                    "UCX cannot create a worker; it has " + joined(context.resources()));
    return worker;
}

std::string address_of(ucp_worker_h worker) {
    ucp_address_t *address = nullptr;
    size_t nbytes = 0;
    throw_unless_ok(ucp_worker_get_address(worker, &address, &nbytes), "TransportUnavailableError",
                    "UCX worker has no address");
    std::string copy(reinterpret_cast<const char *>(address), nbytes);
    ucp_worker_release_address(worker, address);
    return copy;
}

// Not to be guessed by other consumers of the same transport.
uint64_t random_session() {
    uint64_t session = 0;
    const Cookie cookie = random_cookie();
    std::memcpy(&session, cookie.data(), sizeof session);
    return session | 1;
}

} // namespace

Worker::Worker(Context &context, const Options &options, Regions &regions, CompletionQueue &done)
    : shared_{context, options, regions, done} {
    try {
        create_workers();
        listen();
        thread_ = std::thread([this] { run(); });
        pthread_setname_np(thread_.native_handle(), "kvrdma-ucx");
    } catch (const std::system_error &error) {
        shut_down();
        throw StatusError("TransportUnavailableError",
                          std::string("the progress thread cannot be started, raise ulimit -u: ") + error.what(),
                          error.code().value());
    } catch (...) {
        shut_down();
        throw;
    }
}

Worker::~Worker() {
    submit(StopCommand{});
    thread_.join();
}

void Worker::create_workers() {
    server_ = new_worker(shared_.context);
    reader_ = new_worker(shared_.context);
    address_ = address_of(server_);
    shared_.worker_address = address_of(reader_);
    poll_fd_ = epoll_create1(EPOLL_CLOEXEC);
    command_fd_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (poll_fd_ < 0 || command_fd_ < 0)
        throw StatusError("TransportError", "epoll or eventfd failed: out of file descriptors?", errno);
    watch(poll_fd_, command_fd_);
    for (ucp_worker_h worker : {server_, reader_}) {
        int fd = -1;
        throw_unless_ok(ucp_worker_get_efd(worker, &fd), "TransportUnavailableError", "UCX worker has no wakeup fd");
        watch(poll_fd_, fd);
    }
    fork_guard_.begin(poll_fd_);
}

void Worker::submit(Command command) {
    {
        std::lock_guard lock(mutex_);
        commands_.push_back(std::move(command));
    }
    if (asleep_.exchange(false)) { // only a sleeping thread costs a system call
        const uint64_t one = 1;
        [[maybe_unused]] const ssize_t written = ::write(command_fd_, &one, sizeof one);
    }
}

void Worker::run() {
    const sched_param any{}; // a batch thread does not preempt the caller that has just posted and woken it
    (void)sched_setscheduler(0, SCHED_BATCH, &any);
    awake_serving_ns_ = processors_allowed() > 1 ? kAwakeServingNs : kAwakeNs; // on a single one the other side waits
    while (!stopping_ || (!(endpoints_.empty() && consumers_.empty()) && now_ns() < stop_deadline_ns_)) {
        const bool busy = step();
        const int64_t now = now_ns();
        move_on(now);
        if (busy)
            awake_until_ns_ = std::max(awake_until_ns_, now + (std::exchange(serving_, false) ? awake_serving_ns_ : kAwakeNs));
        else if (now > awake_until_ns_)
            sleep();
    }
    shut_down();
}

// The serving side moves away from a reader that runs on the same processor; were it both, they might do so together.
void Worker::move_on(int64_t now) {
    if (!std::exchange(crowded_, false) || now < settled_until_ns_)
        return;
    leave_processor();
    settled_until_ns_ = now + kSettledNs;
}

// One round of everything there is to do. Returns whether there was anything.
bool Worker::step() {
    bool busy = take_commands();
    retire_finished(); // after the commands: every read queued before its peer was lost has been taken
    busy |= progress();
    greet();
    close_failed();
    busy |= work();
    return busy;
}

bool Worker::take_commands() {
    bool any = false;
    while (true) {
        std::vector<Command> commands;
        {
            std::lock_guard lock(mutex_);
            commands.swap(commands_);
        }
        if (commands.empty())
            return any;
        any = true;
        for (Command &command : commands)
            std::visit([this](auto &what) { execute(what); }, command);
    }
}

void Worker::execute(ConnectCommand &command) {
    if (stopping_)
        return command.connecting->end({"TransportClosedError", "the transport was closed while connecting", 0});
    const uint64_t id = command.peer->id;
    try {
        auto endpoint = std::make_unique<Endpoint>(shared_, std::move(command.peer), std::move(command.spec),
                                                   command.connecting);
        Endpoint &added = *endpoints_.emplace(id, std::move(endpoint)).first->second;
        added.connect(endpoints_.begin()->first);
        fork_guard_.mark();
    } catch (const StatusError &error) {
        command.connecting->end({error.kind(), error.what(), error.code()});
    }
}

void Worker::execute(ReadCommand &command) {
    Read &read = *command.read;
    read.rows_posted = read.end = shared_.regions.merge(read.rows, read.tail);
    if (const auto found = endpoints_.find(command.peer); found != endpoints_.end())
        found->second->add(std::move(command.read));
    else
        shared_.regions.release(read.rows, read.local_slots);
}

void Worker::execute(DisconnectCommand &command) {
    if (const auto found = endpoints_.find(command.peer); found != endpoints_.end())
        found->second->close(std::move(command.why), false);
}

void Worker::execute(UseCudaCommand &command) { make_cuda_context_current(command.context); }

void Worker::execute(StopCommand &) {
    stopping_ = true;
    stop_deadline_ns_ = now_ns() + kStopNs;
    for (auto &[session, consumer] : consumers_)
        consumer->fail();
    for (auto &[id, endpoint] : endpoints_)
        endpoint->close({"ReadCancelledError", "the transport was closed before the read ended", 0}, false);
}

bool Worker::progress() {
    bool any = false;
    for (ucp_worker_h worker : {server_, reader_})
        for (int round = 0; round < kRoundsPerStep && ucp_worker_progress(worker); ++round)
            any = true;
    return any;
}

bool Worker::work() {
    bool more = false;
    for (auto &[session, consumer] : consumers_)
        more |= consumer->work();
    for (auto &[id, endpoint] : endpoints_)
        more |= endpoint->work(kQuantum);
    return more;
}

void Worker::greet() {
    if (!greetings_.empty() || !answers_.empty())
        fork_guard_.mark(); // whoever greets or answers has a connection
    for (Greeting &greeting : std::exchange(greetings_, {})) {
        for (auto &[id, consumer] : consumers_)
            if (consumer->is_from(greeting.address) && consumer->peer() < greeting.hello.oldest)
                consumer->fail();
        const uint64_t session = random_session();
        auto &consumer = consumers_[session] =
            std::make_unique<Consumer>(shared_.regions, session, greeting.hello, std::move(greeting.address));
        consumer->connect(server_, error_mode(shared_.options));
    }
    for (const Hello &answer : std::exchange(answers_, {}))
        if (const auto found = endpoints_.find(answer.peer); found != endpoints_.end())
            found->second->on_hello(answer);
}

void Worker::close_failed() {
    bool closing = !shared_.failed.empty() || stopping_;
    for (auto it = consumers_.begin(); it != consumers_.end();) {
        Consumer &consumer = *it->second;
        if (consumer.failed() && !consumer.closing())
            consumer.close();
        closing |= consumer.closing();
        it = consumer.finished() ? consumers_.erase(it) : std::next(it);
    }
    for (Endpoint *endpoint : std::exchange(shared_.failed, {}))
        endpoint->close_failed();
    for (const auto &[id, endpoint] : endpoints_)
        closing |= endpoint->closing();
    // UCX closes by callbacks that do not wake anybody: they need progress for a while.
    if (closing)
        closing_until_ns_ = now_ns() + kClosingNs;
}

void Worker::retire_finished() {
    for (auto it = endpoints_.begin(); it != endpoints_.end();) {
        if (!it->second->finished() && !it->second->parked()) {
            ++it;
            continue;
        }
        it->second->report();
        if (it->second->parked())
            parked_.push_back(std::move(it->second));
        it = endpoints_.erase(it);
    }
}

void Worker::sleep() {
    asleep_ = true;
    {
        std::lock_guard lock(mutex_);
        if (!commands_.empty()) {
            asleep_ = false;
            return;
        }
    }
    for (ucp_worker_h worker : {server_, reader_})
        if (ucp_worker_arm(worker) != UCS_OK) { // busy: something happened since the last round
            asleep_ = false;
            return;
        }
    epoll_event events[4];
    (void)epoll_wait(poll_fd_, events, 4, now_ns() < closing_until_ns_ ? kClosingMs : -1);
    asleep_ = false;
    uint64_t count = 0;
    [[maybe_unused]] const ssize_t got = ::read(command_fd_, &count, sizeof count);
}

// Destroying the workers ends whatever an endpoint could not close in time; only then are its reads reported.
void Worker::shut_down() {
    std::map<uint64_t, std::unique_ptr<Endpoint>> left;
    left.swap(endpoints_);
    fork_guard_.end(); // the sets are UCX's, and end with its workers
    for (auto &[id, endpoint] : left)
        if (endpoint->parked())
            endpoint->report(), parked_.push_back(std::move(endpoint));
    std::erase_if(left, [](const auto &each) { return !each.second; });
    if (!parked_.empty()) { // destroying their worker would abort as well
        shared_.context.leave_open();
        for (auto &endpoint : parked_)
            (void)endpoint.release();
        reader_ = server_ = nullptr;
    }
    for (ucp_worker_h *worker : {&reader_, &server_})
        if (*worker)
            ucp_worker_destroy(std::exchange(*worker, nullptr));
    for (auto &[id, endpoint] : left)
        endpoint->report();
    consumers_.clear();
    for (int *fd : {&poll_fd_, &command_fd_})
        if (*fd >= 0)
            ::close(std::exchange(*fd, -1));
}

} // namespace kvrdma::ucx
