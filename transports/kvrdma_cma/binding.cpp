// Python's view of the core: convert, release the GIL, call, wrap. kvrdma_cma/transport.py is the only user.
#include <cstring>

#include "core.hpp"
#include "python.hpp"
#include "unlocked.hpp"

namespace kvrdma::cma {

static Cookie cookie_of(const nb::bytes &bytes) {
    Cookie cookie;
    if (bytes.size() != cookie.size())
        throw StatusError("BlobError", "a cookie has " + std::to_string(bytes.size()) + " bytes, not 16");
    memcpy(cookie.data(), bytes.c_str(), cookie.size());
    return cookie;
}

static nb::bytes bytes_of(const Cookie &cookie) {
    return nb::bytes(cookie.data(), cookie.size());
}

// The core, called without the GIL.
class Handle {
  public:
    explicit Handle(int threads) : core_(Core::open(threads)) {}
    ~Handle() { close(); }

    template <typename Body> auto call(Body body) {
        Unlocked unlocked;
        return body(*core_);
    }

    void close() {
        Unlocked unlocked;
        core_->close();
    }

  private:
    std::shared_ptr<Core> core_;
};

using RemoteRow = std::tuple<uint64_t, uint64_t, uint64_t, nb::bytes>; // addr, nbytes, cookie addr, cookie

static uint64_t connect(Handle &handle, int pid, uint64_t start, uint64_t cookie_addr, const nb::bytes &cookie,
                        const std::vector<RemoteRow> &rows) {
    const Identity who{pid, start, {0, cookie_addr, cookie_of(cookie)}};
    std::vector<RemoteMemory> memory;
    for (const auto &[addr, nbytes, at, value] : rows)
        memory.push_back({addr, nbytes, at, cookie_of(value)});
    return handle.call([&](Core &core) { return core.connect(who, std::move(memory)); });
}

static uint64_t read(Handle &handle, uint64_t peer, const GridArrays &grids, const GridArrays &then) {
    const Given given = given_of(grids, then);
    return handle.call([&](Core &core) { return core.read(peer, given); });
}

NB_MODULE(_cma, module) {
    register_translator();
    nb::set_leak_warnings(false); // threads of the caller may hold a core when the interpreter ends
    module.doc() = "Native core of the cma transport: batched process_vm_readv on its own threads.";
    module.def("start_time", &start_time, nb::arg("pid"), "Start time of a process in ticks since boot, or 0.");
    module.def("leave_processor", &leave_processor,
               "Move the calling thread to another processor, for tests; False if it may use no other near by.");
    nb::class_<Handle>(module, "Core", "Regions, peers and reads of one process.")
        .def(nb::init<int>(), nb::arg("threads"))
        .def(
            "identity",
            [](Handle &handle) {
                const Identity who = handle.call([](Core &core) { return core.identity(); });
                return std::make_tuple(who.pid, who.start_time, who.mark.cookie_addr, bytes_of(who.mark.cookie));
            },
            "(pid, start time, cookie addr, cookie)")
        .def(
            "add_region",
            [](Handle &handle, uint64_t addr, uint64_t nbytes) {
                const Mark mark = handle.call([&](Core &core) { return core.add_region(addr, nbytes); });
                return std::make_tuple(mark.id, mark.cookie_addr, bytes_of(mark.cookie));
            },
            nb::arg("addr"), nb::arg("nbytes"), "(region id, cookie addr, cookie)")
        .def(
            "remove_region",
            [](Handle &handle, uint32_t id) { handle.call([=](Core &core) { core.remove_region(id); }); },
            nb::arg("id"))
        .def("check_open", [](Handle &handle) { handle.call([](Core &core) { core.check_open(); }); })
        .def("connect", &connect, nb::arg("pid"), nb::arg("start_time"), nb::arg("cookie_addr"), nb::arg("cookie"),
             nb::arg("memory"))
        .def("read", &read, nb::arg("peer"), nb::arg("grids").noconvert(), nb::arg("then").noconvert())
        .def("poll", [](Handle &handle) { return events_of(handle.call([](Core &core) { return core.poll(); })); })
        .def("fileno", [](Handle &handle) { return handle.call([](Core &core) { return core.fd(); }); })
        .def(
            "disconnect",
            [](Handle &handle, uint64_t peer) { handle.call([=](Core &core) { core.disconnect(peer); }); },
            nb::arg("peer"))
        .def("close", &Handle::close);
}

} // namespace kvrdma::cma
