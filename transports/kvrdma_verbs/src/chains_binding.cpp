// The builder of work requests for tests: what it would post, for a pretended NIC.
#include "python.hpp"

#include "chains.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace kvrdma::verbs {

namespace {

using PieceTuple = std::tuple<uint64_t, uint32_t, uint32_t>;                         // addr, local region, nbytes
using RequestTuple = std::tuple<uint32_t, uint64_t, std::vector<PieceTuple>>;        // remote region, offset, pieces
using ChainTuple = std::tuple<size_t, std::vector<RequestTuple>>;                    // queue, requests

struct Recorder {
    std::vector<RequestTuple> requests;
    void begin(uint32_t region, uint64_t offset) { requests.push_back({region, offset, {}}); }
    void piece(uint64_t addr, uint32_t region, uint32_t nbytes) { std::get<2>(requests.back()).push_back({addr, region, nbytes}); }
    void end() {}
};

struct PretendedQueue {
    QueueLoad load;
};

// Rows as they are given, sorted; the local region is the upper half of the region's number, as after take_rows. Chains
// complete, oldest first, only when every queue is full; queue i completes speeds[i] chains at a time.
std::vector<ChainTuple> plan(const RowArray &array, uint32_t max_sge, uint64_t max_request, uint32_t max_requests,
                             uint64_t max_chain, uint32_t depth, const std::vector<uint32_t> &speeds) {
    const Limits limits{max_sge, max_request, max_requests, max_chain};
    const auto *given = reinterpret_cast<const Row *>(array.data());
    const std::vector<Row> rows(given, given + array.shape(0));
    std::vector<PretendedQueue> queues(speeds.size(), PretendedQueue{{depth, 0}});
    std::vector<std::vector<ChainSize>> posted(speeds.size());
    std::vector<ChainTuple> chains;
    for (Cursor at; at.row < rows.size();) {
        const size_t queue = pick_queue(queues);
        if (queue == queues.size()) {
            for (size_t i = 0; i < queues.size(); ++i)
                for (uint32_t done = 0; done < speeds[i] && !posted[i].empty(); ++done) {
                    queues[i].load.free += posted[i].front().requests;
                    queues[i].load.nbytes -= posted[i].front().nbytes;
                    posted[i].erase(posted[i].begin());
                }
            continue;
        }
        Recorder recorder;
        const ChainSize size = build_chain(rows, rows.size(), at, queues[queue].load.free, limits, recorder);
        queues[queue].load.free -= size.requests;
        queues[queue].load.nbytes += size.nbytes;
        posted[queue].push_back(size);
        chains.emplace_back(queue, std::move(recorder.requests));
    }
    return chains;
}

} // namespace

} // namespace kvrdma::verbs

NB_MODULE(_chains, module) {
    kvrdma::register_translator();
    module.doc() = "The builder of work requests, for tests.";
    module.def("plan", &kvrdma::verbs::plan, "rows"_a.noconvert(), nb::kw_only(), "max_sge"_a, "max_request"_a,
               "max_requests"_a, "max_chain"_a, "depth"_a, "speeds"_a,
               "[(queue, [(remote region, offset, [(addr, local region, nbytes)])])]");
}
