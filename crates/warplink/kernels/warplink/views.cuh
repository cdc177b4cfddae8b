// Parts of tensors, as the text of kernel sections selects them; a part of sections.cuh.

#ifndef WARPLINK_VIEWS_CUH
#define WARPLINK_VIEWS_CUH

#include <warplink/groups.cuh>

namespace warplink {

typedef long long i64;

// Rounded down, as integers of programs are.
__device__ __forceinline__ i64 divide(i64 a, i64 b) {
    const i64 quotient = a / b;
    return a % b != 0 && (a < 0) != (b < 0) ? quotient - 1 : quotient;
}

// What `divide` leaves: it has the sign of `b`.
__device__ __forceinline__ i64 modulo(i64 a, i64 b) {
    const i64 left = a % b;
    return left != 0 && (left < 0) != (b < 0) ? left + b : left;
}

__device__ __forceinline__ i64 least(i64 a, i64 b) { return b < a ? b : a; }
__device__ __forceinline__ i64 greatest(i64 a, i64 b) { return a < b ? b : a; }
__device__ __forceinline__ i64 logarithm(i64 a) { return 63 - __clzll(a); }

namespace detail {

// Parts are multiples of so many indices. Must match the host.
constexpr i64 part_unit = 16;

}  // namespace detail

// The length of the parts that n is cut into.
__device__ __forceinline__ i64 part(i64 n, i64 parts) {
    const u64 units = (u64)(parts * detail::part_unit);
    return (i64)(((u64)greatest(n, 0) + units - 1) / units) * detail::part_unit;
}

// A part of a tensor, in elements from its start. The leading axis has two lengths: `extent` is what it is cut
// into parts by, as if the tensor went on, and `length` is what is there.
template <u32 AXES> struct View {
    i64 offset, length;
    i64 extent[AXES], stride[AXES];

    __device__ __forceinline__ View<AXES - 1> index(i64 i) const {
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

    __device__ __forceinline__ View range(i64 from, i64 to) const {
        View view = *this;
        view.offset += least(from, length) * stride[0];
        view.extent[0] = to - from;
        view.length = greatest(least(length, to) - from, 0);
        return view;
    }

    __device__ __forceinline__ View part(i64 i, i64 parts) const {
        View view = *this;
        const i64 size = warplink::part(extent[0], parts), from = least(i * size, extent[0]);
        view.offset += least(from, length) * stride[0];
        view.extent[0] = size;
        view.length = least(greatest(length - from, 0), size);
        return view;
    }

    __device__ __forceinline__ u64 elements() const {
        i64 count = length;
#pragma unroll
        for (u32 axis = 1; axis < AXES; axis++) count *= extent[axis];
        return (u64)count;
    }
};

// A single element.
template <> struct View<0> {
    i64 offset;
    __device__ __forceinline__ u64 elements() const { return 1; }
};

// How many elements a step moves: as many as the shortest of its operands has.
template <typename V> __device__ __forceinline__ u64 shortest(const V &view) { return view.elements(); }
template <typename V, typename... Others> __device__ __forceinline__ u64 shortest(const V &view, const Others &...others) {
    const u64 count = view.elements(), rest = shortest(others...);
    return rest < count ? rest : count;
}

// Where a view starts in memory: plain, as packets of which half is data, or as packets of 128 bytes.
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
