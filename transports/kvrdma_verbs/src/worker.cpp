#include "worker.hpp"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <pthread.h>
#include <sched.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <system_error>
#include <unistd.h>
#include <utility>

#include "errors.hpp"

namespace kvrdma::verbs {

namespace {

constexpr size_t kMaxVisitors = 4096;
constexpr int64_t kHelloNs = 5'000'000'000, kTidyNs = 1'000'000'000;
constexpr int kSourceShift = 56, kEvents = 64;

} // namespace

Worker::Worker(const Devices &devices, const Options &options, Regions &regions, CompletionQueue &done)
    : shared_{devices, options, regions, done, Scratch(devices)}, poll_(epoll_create1(EPOLL_CLOEXEC)),
      command_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
    if (poll_.get() < 0 || command_.get() < 0)
        throw StatusError("TransportUnavailableError", "epoll or eventfd failed: out of file descriptors?", errno);
    listener_ = listen_everywhere(port_);
    watch(command_.get(), Source::kCommand, 0);
    watch(listener_.get(), Source::kListener, 0);
    for (size_t i = 0; i < devices.size(); ++i) {
        watch(devices[i]->channel()->fd, Source::kChannel, i);
        watch(devices[i]->context()->async_fd, Source::kAsync, i);
    }
    try {
        thread_ = std::thread([this] { run(); });
        pthread_setname_np(thread_.native_handle(), "kvrdma-verbs");
    } catch (const std::system_error &error) {
        throw StatusError("TransportUnavailableError",
                          std::string("the thread cannot be started, raise ulimit -u: ") + error.what(),
                          error.code().value());
    }
}

Worker::~Worker() {
    submit(StopCommand{});
    thread_.join();
    peers_.clear();
    visitors_.clear();
    for (ibv_cq *cq : visitor_cqs_)
        if (cq)
            library().destroy_cq(cq);
}

void Worker::watch(int fd, Source source, uint64_t id) {
    epoll_event event{};
    event.events = EPOLLIN | (source == Source::kPeer || source == Source::kVisitor ? EPOLLRDHUP : 0u);
    event.data.u64 = static_cast<uint64_t>(source) << kSourceShift | id;
    if (epoll_ctl(poll_.get(), EPOLL_CTL_ADD, fd, &event) != 0)
        throw StatusError("TransportError", std::string("epoll_ctl failed: ") + std::strerror(errno) + " (see ulimit -n)", errno);
}

void Worker::submit(Command command) {
    {
        std::lock_guard lock(mutex_);
        commands_.push_back(std::move(command));
    }
    if (asleep_.exchange(false)) { // only a sleeping thread costs a system call
        const uint64_t one = 1;
        [[maybe_unused]] const ssize_t written = ::write(command_.get(), &one, sizeof one);
    }
}

void Worker::run() {
    const sched_param any{}; // a batch thread does not preempt the caller that has just posted and woken it
    (void)sched_setscheduler(0, SCHED_BATCH, &any);
    epoll_event events[kEvents];
    while (!stopping_) {
        take_commands();
        retire();
        bool more = false;
        for (auto &[id, peer] : peers_)
            more |= peer->post();
        tidy();
        if (stopping_)
            return;
        const int count = epoll_wait(poll_.get(), events, kEvents, more ? 0 : wait_ms());
        asleep_ = false;
        if (count > 0)
            active_ns_ = now_ns();
        for (int i = 0; i < count; ++i)
            handle(events[i].data.u64);
    }
}

// How long to sleep: not at all while there are commands or the user wants the thread to spin, else until something
// has to be looked after.
int Worker::wait_ms() {
    if (std::any_of(peers_.begin(), peers_.end(), [](const auto &each) { return each.second->gone(); }))
        return 0; // to be retired
    const int64_t spin_ns = int64_t{shared_.options.busy_poll_us} * 1000;
    if (spin_ns && now_ns() - active_ns_ < spin_ns)
        return 0;
    asleep_ = true;
    std::lock_guard lock(mutex_);
    if (!commands_.empty())
        return 0;
    const bool timed = std::any_of(peers_.begin(), peers_.end(), [](const auto &each) { return each.second->deadline_ns(); }) ||
                       std::any_of(visitors_.begin(), visitors_.end(), [](const auto &each) { return !each.second.joined; });
    return timed ? static_cast<int>(kTidyNs / 1'000'000) : -1;
}

void Worker::handle(uint64_t tag) {
    const uint64_t id = tag & ((uint64_t{1} << kSourceShift) - 1);
    switch (static_cast<Source>(tag >> kSourceShift)) {
    case Source::kCommand: {
        uint64_t count = 0;
        [[maybe_unused]] const ssize_t got = ::read(command_.get(), &count, sizeof count);
        break;
    }
    case Source::kListener:
        accept_visitors();
        break;
    case Source::kChannel:
        on_channel(*shared_.devices[id]);
        break;
    case Source::kAsync:
        on_async(*shared_.devices[id]);
        break;
    case Source::kPeer:
        if (const auto found = peers_.find(id); found != peers_.end())
            found->second->on_readable();
        break;
    case Source::kVisitor:
        on_visitor(id);
        break;
    }
}

void Worker::take_commands() {
    std::vector<Command> commands;
    {
        std::lock_guard lock(mutex_);
        commands.swap(commands_);
    }
    for (Command &command : commands)
        std::visit([this](auto &what) { execute(what); }, command);
}

void Worker::execute(AddPeerCommand &command) {
    const uint64_t id = command.peer->id();
    try {
        watch(command.peer->fd(), Source::kPeer, id);
    } catch (const StatusError &error) {
        return command.connecting->end({"ConnectError", error.what(), error.code()});
    }
    Peer &peer = *peers_.emplace(id, std::move(command.peer)).first->second;
    peer.begin(std::move(command.connecting));
}

void Worker::execute(ReadCommand &command) {
    Read &read = *command.read;
    read.rows_posted = read.end = shared_.regions.slots().merge(read.rows, read.tail);
    if (const auto found = peers_.find(command.peer); found != peers_.end() && !found->second->gone())
        found->second->add(std::move(command.read));
    else { // the peer ended after the caller had looked: its contact was told before
        const std::string why = found != peers_.end() ? found->second->why() : "connect again";
        shared_.done.push({"PeerLostError", read.id, command.peer, read.nrows, 0, read.nbytes,
                           "peer " + std::to_string(command.peer) + " was lost before the read began: " + why, 0});
        shared_.regions.slots().release(read.rows, read.local_slots);
    }
}

void Worker::execute(DisconnectCommand &command) {
    if (const auto found = peers_.find(command.peer); found != peers_.end()) {
        found->second->end({"ReadCancelledError",
                            "peer " + std::to_string(command.peer) + " was disconnected before the read ended", 0}, false);
    }
}

void Worker::execute(StopCommand &) {
    stopping_ = true;
    for (auto &[id, peer] : peers_)
        peer->end({"ReadCancelledError", "the transport was closed before the read ended", 0}, false);
}

void Worker::on_channel(const Device &device) {
    ibv_cq *cq = nullptr;
    void *context = nullptr;
    while (library().get_cq_event(device.channel(), &cq, &context) == 0) {
        library().ack_cq_events(cq, 1);
        ibv_req_notify_cq(cq, 0); // before looking, so that nothing arrives unseen in between
        if (const auto found = peers_.find(reinterpret_cast<uint64_t>(context)); found != peers_.end())
            found->second->collect();
    }
    if (errno != EAGAIN && errno != EINTR)
        lose(device, std::string("that it is gone: ") + std::strerror(errno));
}

void Worker::on_async(const Device &device) {
    ibv_async_event event;
    while (library().get_async_event(device.context(), &event) == 0) {
        const ibv_event_type type = event.event_type;
        const std::string what = library().event_type_str(type);
        library().ack_async_event(&event);
        if (type == IBV_EVENT_DEVICE_FATAL)
            lose(device, what);
        else if (type == IBV_EVENT_PORT_ERR || (type == IBV_EVENT_GID_CHANGE && !device.active()))
            for (auto &[id, peer] : peers_)
                peer->on_port_down(device, what);
    }
    if (errno != EAGAIN && errno != EINTR)
        lose(device, std::string("that it is gone: ") + std::strerror(errno));
}

// The NIC was taken away. Its descriptors would wake the thread for ever, and nobody reads us by it any more.
void Worker::lose(const Device &device, const std::string &why) {
    (void)epoll_ctl(poll_.get(), EPOLL_CTL_DEL, device.channel()->fd, nullptr);
    (void)epoll_ctl(poll_.get(), EPOLL_CTL_DEL, device.context()->async_fd, nullptr);
    for (auto &[id, peer] : peers_)
        peer->on_port_down(device, why);
    std::erase_if(visitors_, [&](const auto &each) {
        const auto &pairs = each.second.pairs;
        return std::any_of(pairs.begin(), pairs.end(), [&](const auto &pair) { return &pair->device() == &device; });
    });
}

void Worker::accept_visitors() {
    while (true) {
        Fd socket(::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
        if (socket.get() < 0)
            return;
        if (visitors_.size() >= kMaxVisitors)
            continue; // hangs up
        keep_alive(socket.get());
        const uint64_t id = next_visitor_++;
        watch(socket.get(), Source::kVisitor, id);
        visitors_[id] = {std::move(socket), {}, {}, now_ns(), false};
    }
}

void Worker::on_visitor(uint64_t id) {
    const auto found = visitors_.find(id);
    if (found == visitors_.end())
        return;
    Visitor &visitor = found->second;
    char bytes[sizeof(Hello) + kMaxQueues * sizeof(QueueEnd)];
    while (true) {
        const ssize_t got = ::recv(visitor.socket.get(), bytes, sizeof bytes, MSG_DONTWAIT);
        if (got < 0 && (errno == EAGAIN || errno == EINTR))
            return;
        if (got <= 0) {
            visitors_.erase(found);
            return;
        }
        visitor.inbox.insert(visitor.inbox.end(), bytes, bytes + got);
        if (!greet(visitor)) {
            visitors_.erase(found);
            return;
        }
    }
}

// Answers a whole greeting; returns false if the connection is to be closed.
bool Worker::greet(Visitor &visitor) {
    Hello hello;
    if (visitor.inbox.size() < sizeof hello)
        return true;
    std::memcpy(&hello, visitor.inbox.data(), sizeof hello);
    if (hello.magic != kMagic || hello.queues == 0 || hello.queues > kMaxQueues)
        return false;
    const size_t nbytes = sizeof hello + hello.queues * sizeof(QueueEnd);
    if (visitor.inbox.size() < nbytes)
        return true;
    if (visitor.inbox.size() > nbytes)
        return false;
    std::vector<QueueEnd> theirs(hello.queues), ours;
    std::memcpy(theirs.data(), visitor.inbox.data() + sizeof hello, theirs.size() * sizeof(QueueEnd));
    visitor.inbox.clear();
    Answer answer;
    answer.verdict = make_pairs(visitor, hello, theirs, ours);
    answer.queues = static_cast<uint16_t>(ours.size());
    visitor.joined = answer.verdict == Verdict::kOk;
    std::vector<char> bytes(sizeof answer + ours.size() * sizeof(QueueEnd));
    std::memcpy(bytes.data(), &answer, sizeof answer);
    std::memcpy(bytes.data() + sizeof answer, ours.data(), ours.size() * sizeof(QueueEnd));
    // It fits the socket's buffer: there is nothing else in it.
    return ::send(visitor.socket.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL | MSG_DONTWAIT) ==
           static_cast<ssize_t>(bytes.size());
}

Verdict Worker::make_pairs(Visitor &visitor, const Hello &hello, const std::vector<QueueEnd> &theirs,
                           std::vector<QueueEnd> &ours) {
    visitor.pairs.clear(); // of the same reader, before an error
    if (hello.protocol != kProtocol)
        return Verdict::kOtherProtocol;
    if (hello.instance != shared_.regions.instance())
        return Verdict::kOtherInstance;
    visitor_cqs_.resize(shared_.devices.size(), nullptr);
    try {
        for (const QueueEnd &end : theirs) {
            if (end.device >= shared_.devices.size())
                return Verdict::kNoQueues;
            const Device &device = *shared_.devices[end.device];
            ibv_cq *&cq = visitor_cqs_[end.device];
            if (!cq && !(cq = library().create_cq(device.context(), 16, nullptr, nullptr, 0)))
                return Verdict::kNoQueues;
            visitor.pairs.push_back(std::make_unique<QueuePair>(device, cq, 1));
            visitor.pairs.back()->join(end, false);
            ours.push_back(visitor.pairs.back()->end(0));
        }
    } catch (const StatusError &) {
        visitor.pairs.clear();
        ours.clear();
        return Verdict::kNoQueues;
    }
    return Verdict::kOk;
}

// After the commands: nothing more can be posted to a peer that is gone, and what had been has ended.
void Worker::retire() {
    std::erase_if(peers_, [](const auto &each) {
        if (each.second->gone())
            each.second->report_lost();
        return each.second->gone();
    });
}

void Worker::tidy() {
    const int64_t now = now_ns();
    if (now - tidy_ns_ < kTidyNs)
        return;
    tidy_ns_ = now;
    std::erase_if(visitors_, [&](const auto &each) { return !each.second.joined && now - each.second.since_ns > kHelloNs; });
    for (auto &[id, peer] : peers_)
        peer->check_time();
}

} // namespace kvrdma::verbs
