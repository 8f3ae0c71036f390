// Applies one transpose in place to a list of pages. Layouts, widths and tables come from kvrdma/reshape/tiling.py.
//
// A unit (a page or an equal part of one) holds `groups` independent sub-units of `elements` elements. Tile mode:
// a CUDA block copies bytes [slice * slice_nbytes, ...) of every element of one sub-unit into shared memory and
// writes them back permuted. The source and destination bytes of a tile are the same set, so tiles never meet.
// Cycle mode (cycles != 0, elements too many for shared memory): a thread follows one cycle of the permutation.
// Nothing here is included, so that NVRTC needs no headers and tests/helpers can build the file for the host.

#ifndef KVRDMA_HOST_SHIM
extern __shared__ __align__(128) unsigned char tile[];
#endif

enum : unsigned { BATCH = 4 };

template <int N> struct Word;
template <> struct Word<1> { typedef unsigned char type; };
template <> struct Word<2> { typedef unsigned short type; };
template <> struct Word<4> { typedef unsigned int type; };
template <> struct Word<8> { typedef uint2 type; };
template <> struct Word<16> { typedef uint4 type; };

template <int V, int W> union Gather {
    typename Word<V>::type whole;
    typename Word<W>::type parts[V / W];
};

// Spreads the 16-byte cells of each 128-byte row over the banks: a transpose reads columns.
__device__ inline unsigned swizzle(unsigned at) {
    const unsigned row = at >> 7;
    return at ^ (((row ^ (row >> 3) ^ (row >> 6)) & 7u) << 4);
}

// Division by a number known only at run time, mostly a power of two.
struct Divider {
    unsigned by;
    int shift;
    __device__ explicit Divider(unsigned n) : by(n), shift((n & (n - 1)) ? -1 : __ffs(static_cast<int>(n)) - 1) {}
    __device__ unsigned operator()(unsigned x) const { return shift < 0 ? x / by : x >> shift; }
};

struct Tile {
    unsigned char* base;      // first byte of the slice in the sub-unit's first element
    const int* table;         // element read for each element written
    unsigned elements;
    unsigned element_nbytes;
    unsigned nbytes;          // bytes of this slice of an element
};

template <int V> __device__ inline typename Word<V>::type load_word(const Tile& t, const Divider& per_element, unsigned c) {
    unsigned from = c * V;
    if (t.nbytes != t.element_nbytes) {
        const unsigned e = per_element(c);
        from = e * t.element_nbytes + (c - e * per_element.by) * V;
    }
    return *reinterpret_cast<const typename Word<V>::type*>(t.base + from);
}

// Loads a batch before it stores one: the compiler may not reorder them and memory latency would show.
template <int V> __device__ void load_tile(const Tile& t) {
    typedef typename Word<V>::type word;
    const unsigned words = t.elements * t.nbytes / V;
    const Divider per_element(t.nbytes == t.element_nbytes ? 1u : t.nbytes / V);
    for (unsigned first = threadIdx.x; first < words; first += BATCH * blockDim.x) {
        word held[BATCH];
#pragma unroll
        for (unsigned k = 0; k < BATCH; ++k) {
            const unsigned c = first + k * blockDim.x;
            if (c < words) held[k] = load_word<V>(t, per_element, c);
        }
#pragma unroll
        for (unsigned k = 0; k < BATCH; ++k) {
            const unsigned c = first + k * blockDim.x;
            if (c < words) *reinterpret_cast<word*>(tile + swizzle(c * V)) = held[k];
        }
    }
}

template <int V, int W> __device__ void store_tile(const Tile& t) {
    typedef typename Word<W>::type piece;
    const bool linear = t.nbytes == t.element_nbytes;
    const unsigned words = t.elements * t.nbytes / V;
    const Divider per_element(t.nbytes / W);
#pragma unroll 2
    for (unsigned c = threadIdx.x; c < words; c += blockDim.x) {
        unsigned e = per_element(c * (V / W));
        unsigned i = c * (V / W) - e * per_element.by;
        const unsigned to = linear ? c * V : e * t.element_nbytes + i * W;
        Gather<V, W> out;
#pragma unroll
        for (int k = 0; k < V / W; ++k) {
            const unsigned from = (static_cast<unsigned>(__ldg(t.table + e)) * per_element.by + i) * W;
            out.parts[k] = *reinterpret_cast<const piece*>(tile + swizzle(from));
            if (++i == per_element.by) {
                i = 0;
                ++e;
            }
        }
        *reinterpret_cast<typename Word<V>::type*>(t.base + to) = out.whole;
    }
}

template <int V, int W> __device__ void move_tile(const Tile& t) {
    load_tile<V>(t);
    __syncthreads();
    store_tile<V, W>(t);
}

// One thread per (cycle, piece of the element); `first` and `step` spread them over the blocks of a sub-unit.
template <int W> __device__ void follow_cycles(const Tile& t, unsigned cycles, unsigned first, unsigned step) {
    typedef typename Word<W>::type piece;
    const Divider per_element(t.element_nbytes / W);
    const unsigned tasks = cycles * per_element.by;
    for (unsigned task = first; task < tasks; task += step) {
        const unsigned cycle = per_element(task);
        unsigned char* column = t.base + (task - cycle * per_element.by) * W;
        const unsigned leader = static_cast<unsigned>(t.table[t.elements + cycle]);
        const piece kept = *reinterpret_cast<const piece*>(column + static_cast<size_t>(leader) * t.element_nbytes);
        unsigned to = leader;
        unsigned from = static_cast<unsigned>(t.table[to]);
        while (from != leader) {
            *reinterpret_cast<piece*>(column + static_cast<size_t>(to) * t.element_nbytes) =
                *reinterpret_cast<const piece*>(column + static_cast<size_t>(from) * t.element_nbytes);
            to = from;
            from = static_cast<unsigned>(t.table[to]);
        }
        *reinterpret_cast<piece*>(column + static_cast<size_t>(to) * t.element_nbytes) = kept;
    }
}

// vector is 16 or equals piece; both are powers of two up to 16. One CUDA block per (page, unit, sub-unit, slice).
extern "C" __global__ void __launch_bounds__(256) kvrdma_reshape(
    unsigned char* base, long long page_stride, const long long* pages, long long num_pages, const int* table,
    long long offset, long long unit_stride, unsigned count, unsigned groups, unsigned elements,
    unsigned element_nbytes, unsigned slice_nbytes, unsigned slices, unsigned vector, unsigned piece,
    unsigned cycles) {
    unsigned rest = blockIdx.x;
    const unsigned slice = rest % slices;
    rest /= slices;
    const unsigned group = rest % groups;
    rest /= groups;
    const unsigned unit = rest % count;
    const long long page = pages[rest / count];
    if (page < 0 || page >= num_pages) {
        __trap();  // as torch's index kernels do: writing elsewhere would be a wrong byte
    }
    Tile t;
    t.base = base + page * page_stride + offset + unit * unit_stride +
             static_cast<long long>(group) * elements * element_nbytes;
    t.table = table;
    t.elements = elements;
    t.element_nbytes = element_nbytes;
    t.nbytes = element_nbytes;
    if (cycles) {
        const unsigned first = slice * blockDim.x + threadIdx.x;
        const unsigned step = slices * blockDim.x;
        switch (piece) {
            case 16: return follow_cycles<16>(t, cycles, first, step);
            case 8: return follow_cycles<8>(t, cycles, first, step);
            case 4: return follow_cycles<4>(t, cycles, first, step);
            case 2: return follow_cycles<2>(t, cycles, first, step);
            default: return follow_cycles<1>(t, cycles, first, step);
        }
    }
    const unsigned start = slice * slice_nbytes;
    t.base += start;
    t.nbytes = min(slice_nbytes, element_nbytes - start);
    switch (vector * 32 + piece) {
        case 16 * 32 + 16: return move_tile<16, 16>(t);
        case 16 * 32 + 8: return move_tile<16, 8>(t);
        case 16 * 32 + 4: return move_tile<16, 4>(t);
        case 16 * 32 + 2: return move_tile<16, 2>(t);
        case 16 * 32 + 1: return move_tile<16, 1>(t);
        case 8 * 32 + 8: return move_tile<8, 8>(t);
        case 4 * 32 + 4: return move_tile<4, 4>(t);
        case 2 * 32 + 2: return move_tile<2, 2>(t);
        default: return move_tile<1, 1>(t);
    }
}
