// Exercises the core without Python, for the sanitizers: readers, a registrar, a poller and peers that come and go, all
// at once. Prints one line and exits 0 if every byte arrived and every read ended exactly once.
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <unistd.h>

#include "transport.hpp"

using namespace kvrdma;
using namespace kvrdma::ucx;

namespace {

constexpr uint64_t kRow = 4096, kRows = 512, kReaders = 4, kReadsEach = 20;
constexpr size_t kTail = 4; // rows of a read that come when the others have

void require(bool holds, const char *what) {
    if (!holds) {
        std::fprintf(stderr, "ucx_stress: %s\n", what);
        std::exit(1);
    }
}

PeerSpec spec_of(const Transport &producer, const std::vector<uint8_t> &memory, const Registered &region) {
    const Address address = producer.address();
    return {address.worker, address.instance, address.table_addr, address.table_rkey,
            {{reinterpret_cast<uint64_t>(memory.data()), memory.size(), region.slot, -1, region.cookie, region.rkey}}};
}

void read_all(Transport &consumer, uint64_t peer, std::vector<uint8_t> &into, std::atomic<int> &posted) {
    for (uint64_t turn = 0; turn < kReadsEach; ++turn) {
        std::vector<Row> rows;
        for (uint64_t i = 0; i < kRows; i += 2) // every other row, so that none is merged
            rows.push_back({reinterpret_cast<uint64_t>(into.data()) + i * kRow, 0, i * kRow, kRow});
        const size_t head = rows.size() - kTail;
        kvrdma::Grid first, second;
        first.cells = {rows.data(), head};
        second.cells = {rows.data() + head, kTail};
        consumer.read(peer, {{first}, {second}, head, kTail});
        ++posted;
    }
}

void come_and_go(Transport &consumer, const PeerSpec &spec) {
    for (int i = 0; i < 10; ++i)
        consumer.disconnect(consumer.connect(spec, 5).peer);
}

void register_and_forget(Transport &transport) {
    std::vector<uint8_t> memory(1 << 16);
    for (int i = 0; i < 200; ++i)
        transport.deregister(
            transport.register_memory(reinterpret_cast<uint64_t>(memory.data()), memory.size(), -1).id);
}

int poll_until(Transport &consumer, int expected) {
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(120);
    int done = 0;
    while (done < expected && std::chrono::steady_clock::now() < deadline) {
        for (const Completion &completion : consumer.poll()) {
            require(completion.kind.empty(), completion.message.c_str());
            ++done;
        }
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    return done;
}

} // namespace

int main(int, char **argv) {
    if (!std::getenv("UCX_MEM_EVENTS")) { // UCX's memory hooks and the thread sanitizer's crash each other
        setenv("UCX_MEM_EVENTS", "n", 1);
        execv("/proc/self/exe", argv);
    }
    std::vector<uint8_t> source(kRow * kRows);
    for (size_t i = 0; i < source.size(); ++i)
        source[i] = static_cast<uint8_t>(i * 2654435761u >> 24);
    std::vector<std::vector<uint8_t>> into(kReaders, std::vector<uint8_t>(source.size()));
    Transport producer({}), consumer({});
    const Registered region =
        producer.register_memory(reinterpret_cast<uint64_t>(source.data()), source.size(), -1);
    const PeerSpec spec = spec_of(producer, source, region);
    const uint64_t peer = consumer.connect(spec, 5).peer;
    for (auto &memory : into)
        consumer.register_memory(reinterpret_cast<uint64_t>(memory.data()), memory.size(), -1);

    std::atomic<int> posted = 0;
    std::vector<std::thread> threads;
    for (auto &memory : into)
        threads.emplace_back([&] { read_all(consumer, peer, memory, posted); });
    threads.emplace_back([&] { come_and_go(consumer, spec); });
    threads.emplace_back([&] { register_and_forget(consumer); });
    const int done = poll_until(consumer, kReaders * kReadsEach);
    for (std::thread &thread : threads)
        thread.join();
    for (const auto &memory : into)
        for (uint64_t i = 0; i < kRows; ++i)
            require((std::memcmp(&memory[i * kRow], &source[i * kRow], kRow) == 0) == (i % 2 == 0),
                    "a row differs, or one that was not asked for was written");
    require(done == posted, "some reads did not end");

    read_all(consumer, peer, into[0], posted); // and close with all of them in flight
    consumer.close();
    require(poll_until(consumer, 0) == 0, "");
    size_t ended = consumer.poll().size();
    require(ended == kReadsEach, "close() did not end every read");
    std::printf("ucx_stress: %d reads verified, %zu ended by close\n", done, ended);
}
