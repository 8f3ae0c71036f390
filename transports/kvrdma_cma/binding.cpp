// Python's view of the core: convert, release the GIL, call, wrap. kvrdma_cma/transport.py is the only user.
#include <cstring>

#include "core.hpp"
#include "python.hpp"

namespace kvrdma::cma {

using nb::gil_scoped_release;

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

// The core, closed when Python drops it.
class Handle {
  public:
    explicit Handle(int threads) : core_(Core::open(threads)) {}
    ~Handle() {
        gil_scoped_release release;
        core_->close();
    }
    Core *operator->() const { return core_.get(); }

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
    gil_scoped_release release;
    return handle->connect(who, std::move(memory));
}

static uint64_t read(Handle &handle, uint64_t peer, const RowArray &array) {
    gil_scoped_release release;
    return handle->read(peer, copy_rows(array));
}

NB_MODULE(_cma, module) {
    register_translator();
    module.doc() = "Native core of the cma transport: batched process_vm_readv on its own threads.";
    module.def("start_time", &start_time, nb::arg("pid"), "Start time of a process in ticks since boot, or 0.");
    nb::class_<Handle>(module, "Core", "Regions, peers and reads of one process.")
        .def(nb::init<int>(), nb::arg("threads"))
        .def(
            "identity",
            [](Handle &handle) {
                const Identity who = handle->identity();
                return std::make_tuple(who.pid, who.start_time, who.mark.cookie_addr, bytes_of(who.mark.cookie));
            },
            "(pid, start time, cookie addr, cookie)")
        .def(
            "add_region",
            [](Handle &handle, uint64_t addr, uint64_t nbytes) {
                const Mark mark = handle->add_region(addr, nbytes);
                return std::make_tuple(mark.id, mark.cookie_addr, bytes_of(mark.cookie));
            },
            nb::arg("addr"), nb::arg("nbytes"), "(region id, cookie addr, cookie)")
        .def(
            "remove_region", [](Handle &handle, uint32_t id) { handle->remove_region(id); }, nb::arg("id"))
        .def("check_open", [](Handle &handle) { handle->check_open(); })
        .def("connect", &connect, nb::arg("pid"), nb::arg("start_time"), nb::arg("cookie_addr"), nb::arg("cookie"),
             nb::arg("memory"))
        .def("read", &read, nb::arg("peer"), nb::arg("rows"))
        .def("poll", [](Handle &handle) { return events_of(handle->poll()); })
        .def("fileno", [](Handle &handle) { return handle->fd(); })
        .def(
            "disconnect", [](Handle &handle, uint64_t peer) { handle->disconnect(peer); }, nb::arg("peer"),
            nb::call_guard<gil_scoped_release>())
        .def(
            "close", [](Handle &handle) { handle->close(); }, nb::call_guard<gil_scoped_release>());
}

} // namespace kvrdma::cma
