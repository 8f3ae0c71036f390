// Builds kvrdma/reshape/reshape.cu for the host: a block's threads are std::threads that meet at a barrier.
// Blocks run one after another, last first; shared memory is exactly as large as asked and poisoned before each.
#include <barrier>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>

struct uint2 { alignas(8) unsigned x; unsigned y; };
struct uint4 { alignas(16) unsigned x; unsigned y, z, w; };
struct Index { unsigned x; };

#define KVRDMA_HOST_SHIM
#define __global__
#define __device__
#define __launch_bounds__(threads)

static thread_local Index threadIdx, blockIdx;
static Index blockDim;
static unsigned char* tile;
static std::unique_ptr<std::barrier<>> meeting;

static void __syncthreads() { meeting->arrive_and_wait(); }
static int __ffs(int value) { return __builtin_ffs(value); }
static unsigned min(unsigned a, unsigned b) { return a < b ? a : b; }
template <typename T> static T __ldg(const T* from) { return *from; }
[[noreturn]] static void __trap() {
    std::fputs("trap\n", stderr);
    std::abort();
}

#include KERNEL_SOURCE

// Takes the launch and then the kernel's own arguments; any kernel signature will do.
template <typename... Args>
static void launch(void (*kernel)(Args...), unsigned grid, unsigned threads, unsigned shared, Args... args) {
    meeting = std::make_unique<std::barrier<>>(threads);
    blockDim.x = threads;
    std::unique_ptr<unsigned char, void (*)(void*)> memory(nullptr, std::free);
    if (shared) memory.reset(static_cast<unsigned char*>(std::aligned_alloc(128, shared)));
    tile = memory.get();
    auto run = [&](unsigned thread) {
        threadIdx.x = thread;
        for (unsigned block = grid; block-- > 0;) {
            blockIdx.x = block;
            if (thread == 0 && shared) std::memset(tile, 0xEE, shared);
            __syncthreads();
            kernel(args...);
            __syncthreads();
        }
    };
    std::vector<std::thread> workers;
    for (unsigned thread = 1; thread < threads; ++thread) workers.emplace_back(run, thread);
    run(0);
    for (auto& worker : workers) worker.join();
}

extern "C" void host_launch(unsigned grid, unsigned threads, unsigned shared, unsigned char* base,
                            long long page_stride, const long long* pages, long long num_pages, const int* table,
                            long long offset, long long unit_stride, unsigned count, unsigned groups,
                            unsigned elements, unsigned element_nbytes, unsigned slice_nbytes, unsigned slices,
                            unsigned vector, unsigned piece, unsigned cycles) {
    launch(&kvrdma_reshape, grid, threads, shared, base, page_stride, pages, num_pages, table, offset, unit_stride,
           count, groups, elements, element_nbytes, slice_nbytes, slices, vector, piece, cycles);
}
