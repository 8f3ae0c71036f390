// Runs the core's threads hard without Python: two peers that are forked children, several posting threads,
// disconnects, a killed peer and a close in mid-read. Exits 0 when every read ended exactly once.
#include <atomic>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <sys/mman.h>
#include <sys/wait.h>
#include <thread>

#include "core.hpp"

using namespace kvrdma;
using namespace kvrdma::cma;

namespace {

constexpr uint64_t kBlock = 4096, kBlocks = 32, kBytes = kBlock * kBlocks;
constexpr uint64_t kPosters = 4, kReads = 200, kLast = 50;

// The peer registers nothing: it inherits, by fork, memory that the parent described before.
pid_t fork_peer() {
    const pid_t pid = fork();
    if (pid == 0) {
        pause();
        _exit(0);
    }
    return pid;
}

uint64_t connect_to(Core &core, pid_t pid, uint64_t source, const Mark &process, const Mark &region) {
    return core.connect({pid, start_time(pid), process},
                        {{source, kBytes, region.cookie_addr, region.cookie}});
}

std::vector<Row> rows_into(uint64_t destination, uint64_t seed) {
    std::vector<Row> rows;
    for (uint64_t i = 0; i < kBlocks; ++i)
        rows.push_back({destination + i * kBlock, 0, (i * 7 + seed) % kBlocks * kBlock, kBlock});
    return rows;
}

// With a tail of the last block.
Given given(const std::vector<Row> &rows) {
    Grid head, tail;
    head.cells = {rows.data(), rows.size() - 1};
    tail.cells = {&rows.back(), 1};
    return {{head}, {tail}, rows.size() - 1, 1};
}

} // namespace

int main() {
    // The source, and a destination of its own for every read, as the contract asks for.
    const uint64_t total = kBytes * (1 + kPosters * kReads + kLast);
    auto *memory = static_cast<char *>(
        mmap(nullptr, total, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    std::atomic<uint64_t> next{reinterpret_cast<uint64_t>(memory)};
    const auto rows = [&](uint64_t seed) { return rows_into(next += kBytes, seed); };
    const auto base = reinterpret_cast<uint64_t>(memory);
    memset(memory, 7, kBytes);
    const Mark process{0, base + kBlock, random_cookie()}, region{0, base + 2 * kBlock, random_cookie()};
    memcpy(memory + kBlock, process.cookie.data(), 16);
    memcpy(memory + 2 * kBlock, region.cookie.data(), 16);
    const pid_t first = fork_peer(), second = fork_peer();

    const auto core = Core::open(3);
    core->add_region(base, total);
    const uint64_t steady = connect_to(*core, first, base, process, region);
    const uint64_t doomed = connect_to(*core, second, base, process, region);
    std::atomic<uint64_t> posted{0}, refused{0};
    std::vector<std::thread> posters;
    for (uint64_t t = 0; t < kPosters; ++t)
        posters.emplace_back([&] {
            for (uint64_t i = 0; i < kReads; ++i)
                try {
                    const std::vector<Row> batch = rows(i);
                    core->read(i % 2 ? steady : doomed, given(batch));
                    ++posted;
                } catch (const StatusError &) {
                    ++refused;
                }
        });
    uint64_t done = 0, failed = 0, lost = 0;
    const auto drain = [&] {
        for (const auto &completion : core->poll())
            ++(completion.read == 0 ? lost : completion.kind.empty() ? done : failed);
    };
    while (done + failed < 100)
        drain();
    kill(second, SIGKILL);
    waitpid(second, nullptr, 0);
    for (auto &poster : posters)
        poster.join();
    while (lost == 0)
        drain();
    const uint64_t brief = connect_to(*core, first, base, process, region);
    for (uint64_t i = 0; i < kLast; ++i, ++posted) {
        const std::vector<Row> batch = rows(i);
        core->read(i % 2 ? steady : brief, given(batch));
    }
    core->disconnect(brief);
    core->close();
    drain();
    kill(first, SIGKILL);
    waitpid(first, nullptr, 0);
    printf("posted %lu refused %lu done %lu failed %lu lost %lu\n", posted.load(), refused.load(), done, failed, lost);
    return done + failed == posted && lost == 1 && done > 0 ? 0 : 1;
}
