// The border to Python.
#include "python.hpp"
#include "unlocked.hpp"

#include <nanobind/stl/pair.h>

#include <cstring>

#include "chains.hpp"
#include "transport.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace kvrdma::verbs {

namespace {

using PortTuple = std::tuple<std::string, int, int>;
using RegionTuple = std::tuple<uint64_t, uint64_t, uint32_t, nb::bytes, std::vector<uint32_t>>;
using LaneTuple = std::tuple<uint16_t, uint16_t>;

nb::bytes bytes_of(const Cookie &cookie) { return nb::bytes(cookie.data(), cookie.size()); }

Cookie cookie_of(const nb::bytes &bytes) {
    Cookie cookie{};
    if (bytes.size() != cookie.size())
        throw StatusError("BlobError", "a cookie of " + std::to_string(bytes.size()) + " bytes, not 16");
    std::memcpy(cookie.data(), bytes.c_str(), cookie.size());
    return cookie;
}

auto register_memory(Transport &self, uint64_t addr, uint64_t nbytes, int cuda) {
    Registered made;
    {
        Unlocked pinning_takes_time;
        made = self.register_memory(addr, nbytes, cuda);
    }
    return std::make_tuple(made.id, made.slot, bytes_of(made.cookie), made.rkeys);
}

auto address(const Transport &self) {
    const Address address = self.address();
    return std::make_tuple(bytes_of(address.instance), address.port, address.table_addr, address.table_rkeys,
                           address.devices);
}

auto connect(Transport &self, std::vector<std::string> hosts, uint16_t port, const nb::bytes &instance,
             uint64_t table_addr, std::vector<uint32_t> table_rkeys, const std::vector<RegionTuple> &regions,
             const std::vector<LaneTuple> &lanes, double timeout_s) {
    PeerSpec spec{std::move(hosts), port, cookie_of(instance), table_addr, std::move(table_rkeys), {}, {}};
    for (const auto &[addr, nbytes, slot, cookie, rkeys] : regions)
        spec.regions.push_back({addr, nbytes, slot, cookie_of(cookie), rkeys});
    for (const auto &[ours, theirs] : lanes)
        spec.lanes.push_back({ours, theirs});
    Unlocked unlocked;
    return self.connect(std::move(spec), timeout_s);
}

uint64_t read(Transport &self, uint64_t peer, const GridArrays &grids, const GridArrays &then) {
    const Given given = given_of(grids, then);
    Unlocked unlocked;
    return self.read(peer, given);
}

std::vector<Event> poll(Transport &self) {
    Unlocked unlocked;
    return events_of(self.poll());
}

} // namespace

} // namespace kvrdma::verbs

NB_MODULE(_verbs, module) {
    using kvrdma::verbs::Options;
    using kvrdma::verbs::PortChoice;
    using kvrdma::verbs::Transport;
    kvrdma::register_translator();
    nb::set_leak_warnings(false); // an interpreter may end with transports open: they are closed, not destroyed
    nb::call_guard<kvrdma::Unlocked> unlocked;
    module.doc() = "The native part of kvrdma_verbs; kvrdma_verbs.transport is its only user.";
    nb::class_<Transport>(module, "Transport")
        .def_prop_ro_static("max_regions", [](const nb::object &) { return kvrdma::verbs::Regions::kSlots; })
        .def(
            "__init__",
            [](Transport *self, const std::vector<kvrdma::verbs::PortTuple> &ports, uint32_t queues, uint32_t spin_us) {
                std::vector<PortChoice> chosen;
                for (const auto &[device, port, gid_index] : ports)
                    chosen.push_back({device, static_cast<uint8_t>(port), gid_index});
                kvrdma::Unlocked open_may_take_a_second;
                new (self) Transport(chosen, Options{queues, spin_us});
            },
            "ports"_a, nb::kw_only(), "queues_per_lane"_a, "busy_poll_us"_a,
            "ports are (device, port, GID index).")
        .def("register", &kvrdma::verbs::register_memory, "addr"_a, "nbytes"_a, "cuda"_a,
             "(id, slot, cookie, rkeys by device); cuda is the GPU's index or -1.")
        .def("deregister", &Transport::deregister, "region"_a, unlocked)
        .def("address", &kvrdma::verbs::address, "(instance, TCP port, table addr, table rkeys, device names)")
        .def("connect", &kvrdma::verbs::connect, "hosts"_a, "port"_a, "instance"_a, "table_addr"_a, "table_rkeys"_a,
             "regions"_a, "lanes"_a, "timeout_s"_a,
             "(peer, via); regions are (addr, nbytes, slot, cookie, rkeys), lanes (our device, theirs).")
        .def("read", &kvrdma::verbs::read, "peer"_a, "grids"_a.noconvert(), "then"_a.noconvert())
        .def("poll", &kvrdma::verbs::poll)
        .def("fileno", &Transport::fd)
        .def("disconnect", &Transport::disconnect, "peer"_a, unlocked)
        .def("close", &Transport::close, unlocked);
}
