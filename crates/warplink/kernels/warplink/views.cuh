// Parts of tensors, as selected by the text of kernel sections; a part of sections.cuh.

#ifndef WARPLINK_VIEWS_CUH
#define WARPLINK_VIEWS_CUH

#include <warplink/groups.cuh>

namespace warplink {

typedef long long i64;

// Integers of a section: 32 bits if all of its sizes and indices fit.
#ifndef WARPLINK_INDEX
#define WARPLINK_INDEX long long
#endif
typedef WARPLINK_INDEX Index;

namespace detail {

template <typename T> struct Unsigned;
template <> struct Unsigned<int> {
    typedef u32 Type;
};
template <> struct Unsigned<long long> {
    typedef u64 Type;
};
typedef Unsigned<Index>::Type UnsignedIndex;

// Parts are multiples of this number of indices. Must match the host.
constexpr Index part_unit = 16;

}  // namespace detail

// Rounds down, like integers of programs.
__device__ __forceinline__ Index divide(Index a, Index b) {
    const Index rounded = a / b;
    return a % b != 0 && (a < 0) != (b < 0) ? rounded - 1 : rounded;
}

// The remainder of `divide`; it has the sign of `b`.
__device__ __forceinline__ Index modulo(Index a, Index b) {
    const Index left = a % b;
    return left != 0 && (left < 0) != (b < 0) ? left + b : left;
}

// The same for non-negative values.
__device__ __forceinline__ Index quotient(Index a, Index b) { return (Index)((detail::UnsignedIndex)a / (detail::UnsignedIndex)b); }
__device__ __forceinline__ Index remainder(Index a, Index b) { return (Index)((detail::UnsignedIndex)a % (detail::UnsignedIndex)b); }

__device__ __forceinline__ Index least(Index a, Index b) { return b < a ? b : a; }
__device__ __forceinline__ Index greatest(Index a, Index b) { return a < b ? b : a; }
__device__ __forceinline__ Index logarithm(Index a) { return 63 - __clzll((i64)a); }

// Length of the parts that n, which is not negative, is divided into.
__device__ __forceinline__ Index part(Index n, Index parts) {
    const detail::UnsignedIndex units = parts * detail::part_unit;
    return (Index)(((detail::UnsignedIndex)n + units - 1) / units) * detail::part_unit;
}

// A part of a tensor, in elements from its start. The leading axis has two lengths: `extent`, by which it is divided
// into parts, as if the tensor continued, and `length`, the elements that exist.
template <u32 AXES> struct View {
    Index offset, length;
    Index extent[AXES], stride[AXES];

    __device__ __forceinline__ View<AXES - 1> index(Index i) const {
        View<AXES - 1> view;
        view.offset = offset + i * stride[0];
        if constexpr (AXES > 1) {
            view.length = extent[1];
#pragma unroll
            for (u32 axis = 1; axis < AXES; axis++) {
                view.extent[axis - 1] = extent[axis];
                view.stride[axis - 1] = stride[axis];
            }
        }
        return view;
    }

    __device__ __forceinline__ View range(Index from, Index to) const {
        View view = *this;
        view.offset += least(from, length) * stride[0];
        view.extent[0] = to - from;
        view.length = greatest(least(length, to) - from, 0);
        return view;
    }

    __device__ __forceinline__ View part(Index i, Index parts) const {
        View view = *this;
        const Index size = warplink::part(extent[0], parts), from = least(i * size, length);
        view.offset += from * stride[0];
        view.extent[0] = size;
        view.length = least(length - from, size);
        return view;
    }

    __device__ __forceinline__ u64 elements() const {
        u64 count = length;
#pragma unroll
        for (u32 axis = 1; axis < AXES; axis++) count *= (u64)extent[axis];
        return count;
    }
};

// A single element.
template <> struct View<0> {
    Index offset;
    __device__ __forceinline__ u64 elements() const { return 1; }
};

// Number of elements that a step moves: that of the shortest operand.
template <typename V> __device__ __forceinline__ u64 shortest(const V &view) { return view.elements(); }
template <typename V, typename... Others> __device__ __forceinline__ u64 shortest(const V &view, const Others &...others) {
    const u64 count = view.elements(), rest = shortest(others...);
    return rest < count ? rest : count;
}

// Start of a view in memory: plain, as packets half of which is data, or as packets of 128 bytes.
template <typename Element, u32 AXES> __device__ __forceinline__ u64 plain(u64 base, const View<AXES> &view) {
    return base + sizeof(typename Element::Bits) * (u64)view.offset;
}
template <typename Element, u32 AXES> __device__ __forceinline__ u64 packets(u64 base, const View<AXES> &view) {
    return base + 2 * sizeof(typename Element::Bits) * (u64)view.offset;
}
template <typename Element, u32 AXES> __device__ __forceinline__ u64 lines(u64 base, const View<AXES> &view) {
    return base + sizeof(typename Element::Bits) * (u64)view.offset / 120 * 128;
}

}  // namespace warplink

#endif
