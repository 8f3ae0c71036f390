// What a row costs from read() to the last work request, with a post that does nothing: `prepare` copies, checks, sorts
// and merges, as every transport does; `build_and_post` builds chains and fills work requests. Prints one JSON object;
// `valgrind --tool=callgrind --toggle-collect=build_and_post` counts instructions.
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <random>

#include <infiniband/verbs.h>

#include "chains.hpp"

namespace {

using namespace kvrdma;
using namespace kvrdma::verbs;

// As Post of peer.cpp, without a queue pair: the compiler may not leave out what nobody reads.
struct NullPost {
    ibv_send_wr requests[32];
    ibv_sge sges[32 * 8];
    uint32_t count = 0, sge = 0, region = ~0u, slot = ~0u, rkey = 0, lkey = 0;
    uint64_t base = 0;
    const std::vector<uint64_t> &bases;
    const std::vector<uint32_t> &keys;

    NullPost(const std::vector<uint64_t> &b, const std::vector<uint32_t> &k) : bases(b), keys(k) {}
    void begin(uint32_t to, uint64_t offset) {
        if (to != region)
            region = to, base = bases[to], rkey = keys[to];
        ibv_send_wr &request = requests[count++];
        request.opcode = IBV_WR_RDMA_READ;
        request.send_flags = 0;
        request.sg_list = &sges[sge];
        request.wr.rdma.remote_addr = base + offset;
        request.wr.rdma.rkey = rkey;
    }
    void piece(uint64_t addr, uint32_t to, uint32_t nbytes) {
        if (to != slot)
            slot = to, lkey = keys[to];
        sges[sge++] = {addr, nbytes, lkey};
    }
    void end() { requests[count - 1].num_sge = static_cast<int>(&sges[sge] - requests[count - 1].sg_list); }
    void post(uint64_t id) {
        for (uint32_t i = 0; i < count; ++i) {
            requests[i].wr_id = id;
            requests[i].next = i + 1 < count ? &requests[i + 1] : nullptr;
        }
        requests[count - 1].send_flags = IBV_SEND_SIGNALED;
        __asm__ volatile("" : : "r"(requests), "r"(sges) : "memory");
    }
};

struct Queue {
    QueueLoad load{128, 0};
};

struct Bench {
    std::vector<uint64_t> sizes, bases;
    std::vector<uint32_t> keys;
    RegionTable table;
    RowBuffers buffers;
    std::vector<Queue> queues = std::vector<Queue>(4);
    uint64_t requests = 0;
};

} // namespace

extern "C" __attribute__((noinline)) void prepare(Bench &bench, const std::vector<Row> &given, std::vector<Row> &rows) {
    Grid grid;
    grid.cells = {given.data(), given.size()};
    take_batch({{grid}, {}, given.size(), 0}, rows, bench.table, bench.sizes, [](const Run &) {});
    merge_batch(rows, 0);
}

extern "C" __attribute__((noinline)) void build_and_post(Bench &bench, const std::vector<Row> &rows) {
    Limits limits;
    limits.max_sge = 8;
    for (Cursor at; at.row < rows.size();) {
        const size_t picked = pick_queue(bench.queues);
        NullPost post(bench.bases, bench.keys);
        const ChainSize size = build_chain(rows, rows.size(), at, bench.queues[picked].load.free, limits, post);
        post.post(at.row);
        bench.queues[picked].load.nbytes += size.nbytes; // completed at once
        bench.requests += size.requests;
    }
}

int main(int argc, char **argv) {
    const char *pattern = argc > 1 ? argv[1] : "fragmented";
    const size_t count = argc > 2 ? std::strtoul(argv[2], nullptr, 10) : 16384, layers = 32;
    const int rounds = argc > 3 ? std::atoi(argv[3]) : 20;
    const uint64_t block = 4096, pool = 2 * count / layers * block, local = 1ull << 40;
    Bench bench;
    for (uint32_t layer = 0; layer < layers; ++layer) {
        bench.sizes.push_back(pool);
        bench.bases.push_back((1ull << 41) + layer * pool);
        bench.table.add(layer, local + layer * pool, pool);
        bench.keys.push_back(layer);
    }
    std::vector<Row> given;
    std::mt19937_64 random(1);
    std::vector<uint64_t> mine(2 * count / layers), theirs(mine.size());
    std::iota(mine.begin(), mine.end(), 0);
    std::iota(theirs.begin(), theirs.end(), 0);
    if (std::strcmp(pattern, "fragmented") == 0)
        std::shuffle(theirs.begin(), theirs.end(), random);
    if (std::strcmp(pattern, "contig") != 0)
        std::shuffle(mine.begin(), mine.end(), random);
    for (uint32_t layer = 0; layer < layers; ++layer)
        for (size_t i = 0; i < count / layers; ++i)
            given.emplace_back(local + layer * pool + mine[i] * block, layer, theirs[i] * block, block);
    std::vector<double> prepared, posted;
    const auto clock = [] { return std::chrono::steady_clock::now(); };
    const auto each = [&](auto from, auto to) {
        return std::chrono::duration<double, std::nano>(to - from).count() / static_cast<double>(count);
    };
    for (int round = 0; round < rounds; ++round) {
        std::vector<Row> rows = bench.buffers.take();
        const auto start = clock();
        prepare(bench, given, rows);
        const auto middle = clock();
        build_and_post(bench, rows);
        posted.push_back(each(middle, clock()));
        prepared.push_back(each(start, middle));
        bench.buffers.give_back(std::move(rows));
    }
    std::sort(prepared.begin(), prepared.end());
    std::sort(posted.begin(), posted.end());
    std::printf("{\"bench\": \"verbs\", \"pattern\": \"%s\", \"rows\": %zu, \"requests\": %lu, \"rounds\": %d, "
                "\"prepare_ns_per_row\": %.1f, \"build_and_post_ns_per_row\": %.1f}\n",
                pattern, count, bench.requests / rounds, rounds, prepared[prepared.size() / 2], posted[posted.size() / 2]);
}
