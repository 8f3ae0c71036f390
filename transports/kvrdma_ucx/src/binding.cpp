// The border to Python: convert, release the GIL, call, wrap.
#include <cstring>

#include "python.hpp"
#include "unlocked.hpp"
#include "transport.hpp"

namespace nb = nanobind;
using namespace nb::literals;
using kvrdma::Event;
using kvrdma::RowArray;

namespace kvrdma::ucx {

namespace {

// addr, nbytes, slot, GPU or -1, cookie, rkey
using RegionTuple = std::tuple<uint64_t, uint64_t, uint32_t, int, nb::bytes, nb::bytes>;

nb::bytes bytes_of(const std::string &text) { return nb::bytes(text.data(), text.size()); }
nb::bytes bytes_of(const Cookie &cookie) { return nb::bytes(cookie.data(), cookie.size()); }
std::string string_of(const nb::bytes &bytes) { return {bytes.c_str(), bytes.size()}; }

Cookie cookie_of(const nb::bytes &bytes) {
    Cookie cookie;
    if (bytes.size() != cookie.size())
        throw StatusError("BlobError", "a cookie has " + std::to_string(bytes.size()) + " bytes, not 16");
    std::memcpy(cookie.data(), bytes.c_str(), cookie.size());
    return cookie;
}

std::vector<RemoteRegion> regions_of(const std::vector<RegionTuple> &tuples) {
    std::vector<RemoteRegion> regions;
    for (const auto &[addr, nbytes, slot, cuda, cookie, rkey] : tuples)
        regions.push_back({addr, nbytes, slot, cuda, cookie_of(cookie), string_of(rkey)});
    return regions;
}

auto facts(const Transport &self) {
    const Facts facts = self.facts();
    return std::make_tuple(facts.version, facts.resources, facts.cuda, facts.refuses_emulation);
}

auto register_memory(Transport &self, uint64_t addr, uint64_t nbytes, int cuda) {
    Registered made = [&] {
        Unlocked unlocked;
        return self.register_memory(addr, nbytes, cuda);
    }();
    return std::make_tuple(made.id, made.slot, bytes_of(made.cookie), bytes_of(made.rkey));
}

auto address(const Transport &self) {
    const Address address = self.address();
    return std::make_tuple(bytes_of(address.worker), bytes_of(address.instance), address.table_addr,
                           bytes_of(address.table_rkey));
}

auto connect(Transport &self, const nb::bytes &worker, const nb::bytes &instance, uint64_t table_addr,
             const nb::bytes &table_rkey, const std::vector<RegionTuple> &regions, double timeout_s) {
    PeerSpec spec{string_of(worker), cookie_of(instance), table_addr, string_of(table_rkey), regions_of(regions)};
    Unlocked unlocked;
    Connected made = self.connect(std::move(spec), timeout_s);
    return std::make_tuple(made.peer, made.one_sided, made.via);
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

} // namespace kvrdma::ucx

NB_MODULE(_ucx, module) {
    using kvrdma::ucx::Options;
    using kvrdma::ucx::Transport;
    kvrdma::register_translator();
    nb::set_leak_warnings(false); // an interpreter may end with transports open: they are closed, not destroyed
    nb::call_guard<kvrdma::Unlocked> unlocked;
    module.doc() = "The native part of kvrdma_ucx; kvrdma_ucx.transport is its only user.";
    module.def("ucx_version", &kvrdma::ucx::ucx_version, "Version of the UCX that was loaded.");
    module.def("is_one_sided", &kvrdma::ucx::is_one_sided, "transport"_a,
               "Whether a GET over this UCX transport needs nothing from the target's CPU.");
    nb::class_<Transport>(module, "Transport")
        .def_prop_ro_static("max_regions", [](const nb::object &) { return kvrdma::ucx::Regions::kSlots; })
        .def(
            "__init__",
            [](Transport *self, bool require_one_sided, uint32_t max_in_flight, bool peer_errors) {
                kvrdma::Unlocked open_may_take_a_second;
                new (self) Transport(Options{require_one_sided, max_in_flight, peer_errors});
            },
            nb::kw_only(), "require_one_sided"_a, "max_in_flight"_a, "peer_errors"_a = true)
        .def("facts", &kvrdma::ucx::facts, "(version, resources, cuda, refuses emulation)")
        .def("register", &kvrdma::ucx::register_memory, "addr"_a, "nbytes"_a, "cuda"_a,
             "(id, slot, cookie, rkey); cuda is the GPU's index or -1.")
        .def("deregister", &Transport::deregister, "region"_a, unlocked)
        .def("address", &kvrdma::ucx::address, "(worker address, instance, table addr, table rkey)")
        .def("connect", &kvrdma::ucx::connect, "worker"_a, "instance"_a, "table_addr"_a, "table_rkey"_a, "regions"_a,
             "timeout_s"_a, "(peer, one_sided, via); regions are (addr, nbytes, slot, cuda, cookie, rkey).")
        .def("read", &kvrdma::ucx::read, "peer"_a, "grids"_a.noconvert(), "then"_a.noconvert())
        .def("poll", &kvrdma::ucx::poll)
        .def("fileno", &Transport::fd)
        .def("disconnect", &Transport::disconnect, "peer"_a, unlocked)
        .def("close", &Transport::close, unlocked);
}
