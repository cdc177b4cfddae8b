// Element-wise operations on up to 16 arrays, in the order given: sum, product, maximum and minimum of contiguous
// arrays, and these, casts and copies of strided arrays.
//
// No header is included, since NVRTC has no include path on some machines: halves are converted by an instruction,
// bfloat16 by its bits. The target may be one of the sources: each element is read from every source and then written
// by the same thread.

typedef unsigned long long u64;
typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned char u8;

// Must match the host's.
#define MAX_SOURCES 16
#define MAX_AXES 4

// Loads that one thread has in flight before it combines: enough to cover the latency of a peer's memory in one round
// for the eight GPUs of a machine.
#define IN_FLIGHT 8

// Elements of strided arrays that one thread has in flight.
#define ITEMS 2

struct Sources {
    const void *at[MAX_SOURCES];
};

// Strides are in elements; axes are outermost first.
struct Operands {
    u64 extents[MAX_AXES];
    u64 target_strides[MAX_AXES];
    const void *at[MAX_SOURCES];
    u64 strides[MAX_SOURCES][MAX_AXES];
};

struct F16 {
    typedef u16 Stored;
    typedef float Wide;
    static __device__ __forceinline__ float load(u16 bits) {
        float value;
        asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
        return value;
    }
    static __device__ __forceinline__ u16 store(float value) {
        u16 bits;
        asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
        return bits;
    }
};

struct Bf16 {
    typedef u16 Stored;
    typedef float Wide;
    static __device__ __forceinline__ float load(u16 bits) { return __uint_as_float((u32)bits << 16); }
    static __device__ __forceinline__ u16 store(float value) {
        u32 bits = __float_as_uint(value);
        // Rounding a NaN could carry into infinity.
        if ((bits & 0x7fffffffu) > 0x7f800000u) return (u16)(bits >> 16 | 0x40u);
        // To nearest, ties to even.
        return (u16)((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
    }
};

struct F32 {
    typedef float Stored;
    typedef float Wide;
    static __device__ __forceinline__ float load(float value) { return value; }
    static __device__ __forceinline__ float store(float value) { return value; }
};

struct F64 {
    typedef double Stored;
    typedef double Wide;
    static __device__ __forceinline__ double load(double value) { return value; }
    static __device__ __forceinline__ double store(double value) { return value; }
};

// Unsigned, so that overflow wraps around.
struct I32 {
    typedef u32 Stored;
    typedef u32 Wide;
    static __device__ __forceinline__ u32 load(u32 value) { return value; }
    static __device__ __forceinline__ u32 store(u32 value) { return value; }
};

static __device__ __forceinline__ float larger(float a, float b) { return fmaxf(a, b); }
static __device__ __forceinline__ float smaller(float a, float b) { return fminf(a, b); }
static __device__ __forceinline__ double larger(double a, double b) { return fmax(a, b); }
static __device__ __forceinline__ double smaller(double a, double b) { return fmin(a, b); }
static __device__ __forceinline__ u32 larger(u32 a, u32 b) { return (int)a > (int)b ? a : b; }
static __device__ __forceinline__ u32 smaller(u32 a, u32 b) { return (int)a < (int)b ? a : b; }

struct Sum {
    template <typename T> static __device__ __forceinline__ T combine(T a, T b) { return a + b; }
};

struct Product {
    template <typename T> static __device__ __forceinline__ T combine(T a, T b) { return a * b; }
};

struct Max {
    template <typename T> static __device__ __forceinline__ T combine(T a, T b) { return larger(a, b); }
};

struct Min {
    template <typename T> static __device__ __forceinline__ T combine(T a, T b) { return smaller(a, b); }
};

template <typename Stored> union Pack {
    uint4 whole;
    Stored part[16 / sizeof(Stored)];
};

// `vectors`: all addresses are aligned to 16 bytes.
template <typename Op, typename Element>
static __device__ __forceinline__ void combine(const Sources &sources, u32 number, void *target_bytes, u64 count,
                                               u32 vectors) {
    typedef typename Element::Stored Stored;
    typedef typename Element::Wide Wide;
    const u32 lanes = 16 / sizeof(Stored);
    const u64 first = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    const u64 stride = (u64)gridDim.x * blockDim.x;
    const u64 whole = vectors ? count / lanes : 0;

    for (u64 at = first; at < whole; at += stride) {
        Wide all[lanes];
        for (u32 base = 0; base < number; base += IN_FLIGHT) {
            Pack<Stored> packs[IN_FLIGHT];
#pragma unroll
            for (u32 i = 0; i < IN_FLIGHT; ++i) {
                if (base + i < number) packs[i].whole = ((const uint4 *)sources.at[base + i])[at];
            }
#pragma unroll
            for (u32 i = 0; i < IN_FLIGHT; ++i) {
                if (base + i < number) {
#pragma unroll
                    for (u32 lane = 0; lane < lanes; ++lane) {
                        const Wide value = Element::load(packs[i].part[lane]);
                        all[lane] = base + i == 0 ? value : Op::combine(all[lane], value);
                    }
                }
            }
        }
        Pack<Stored> result;
#pragma unroll
        for (u32 lane = 0; lane < lanes; ++lane) result.part[lane] = Element::store(all[lane]);
        ((uint4 *)target_bytes)[at] = result.whole;
    }

    for (u64 at = whole * lanes + first; at < count; at += stride) {
        Wide total = Element::load(((const Stored *)sources.at[0])[at]);
        for (u32 i = 1; i < number; ++i) {
            const Wide value = Element::load(((const Stored *)sources.at[i])[at]);
            total = Op::combine(total, value);
        }
        ((Stored *)target_bytes)[at] = Element::store(total);
    }
}

#define COMBINE_KERNEL(name, Op, Element)                                                                              \
    extern "C" __global__ void __launch_bounds__(512)                                                                  \
        name(const __grid_constant__ Sources sources, u32 number, void *target, u64 count, u32 vectors) {              \
        combine<Op, Element>(sources, number, target, count, vectors);                                                 \
    }

#define COMBINE_KERNELS(name, Op)                                                                                      \
    COMBINE_KERNEL(name##_f16, Op, F16)                                                                                \
    COMBINE_KERNEL(name##_bf16, Op, Bf16)                                                                              \
    COMBINE_KERNEL(name##_f32, Op, F32)                                                                                \
    COMBINE_KERNEL(name##_f64, Op, F64)                                                                                \
    COMBINE_KERNEL(name##_i32, Op, I32)

COMBINE_KERNELS(warplink_sum, Sum)
COMBINE_KERNELS(warplink_product, Product)
COMBINE_KERNELS(warplink_max, Max)
COMBINE_KERNELS(warplink_min, Min)

// The rest handles strided arrays and casts. Types and operations are run-time values: they are the same for all
// threads, and memory dominates the time.

// Must match the host's.
enum Type { F16_TYPE, BF16_TYPE, F32_TYPE, F64_TYPE, I32_TYPE, U8_TYPE };
enum Operation { SUM_OP, PRODUCT_OP, MAX_OP, MIN_OP };

// Conversions as on the host: fractions are truncated, values out of range saturate, and NaN becomes 0.
static __device__ __forceinline__ u32 to_i32(double value) {
    if (value != value) return 0;
    if (value <= -2147483648.0) return 0x80000000u;
    if (value >= 2147483647.0) return 0x7fffffffu;
    return (u32)(int)value;
}
static __device__ __forceinline__ u32 to_i32(float value) { return to_i32((double)value); }
static __device__ __forceinline__ u32 to_i32(u32 value) { return value; }

static __device__ __forceinline__ u8 to_u8(float value) {
    if (!(value > 0.0f)) return 0;
    return value >= 255.0f ? (u8)255 : (u8)(u32)value;
}
static __device__ __forceinline__ u8 to_u8(double value) {
    if (!(value > 0.0)) return 0;
    return value >= 255.0 ? (u8)255 : (u8)(u32)value;
}
static __device__ __forceinline__ u8 to_u8(u32 value) { return (u8)value; }

template <typename Wide> static __device__ __forceinline__ Wide load(u32 type, const void *array, u64 at) {
    switch (type) {
    case F16_TYPE: return (Wide)F16::load(((const u16 *)array)[at]);
    case BF16_TYPE: return (Wide)Bf16::load(((const u16 *)array)[at]);
    case F32_TYPE: return (Wide)((const float *)array)[at];
    case F64_TYPE: return (Wide)((const double *)array)[at];
    case I32_TYPE: return (Wide)((const int *)array)[at];
    default: return (Wide)((const u8 *)array)[at];
    }
}

template <typename Wide> static __device__ __forceinline__ void store(u32 type, void *array, u64 at, Wide value) {
    switch (type) {
    case F16_TYPE: ((u16 *)array)[at] = F16::store((float)value); break;
    case BF16_TYPE: ((u16 *)array)[at] = Bf16::store((float)value); break;
    case F32_TYPE: ((float *)array)[at] = (float)value; break;
    case F64_TYPE: ((double *)array)[at] = (double)value; break;
    case I32_TYPE: ((u32 *)array)[at] = to_i32(value); break;
    default: ((u8 *)array)[at] = to_u8(value); break;
    }
}

template <typename Wide> static __device__ __forceinline__ Wide combine_as(u32 op, Wide a, Wide b) {
    switch (op) {
    case SUM_OP: return a + b;
    case PRODUCT_OP: return a * b;
    case MAX_OP: return larger(a, b);
    default: return smaller(a, b);
    }
}

// The indices of an element, from its number in row-major order.
struct Index {
    u64 along[MAX_AXES];

    __device__ __forceinline__ Index(const Operands &operands, u32 axes, u64 number) {
#pragma unroll
        for (int axis = MAX_AXES - 1; axis >= 0; --axis) {
            along[axis] = 0;
            if (axis >= (int)axes) continue;
            if (axis == 0) {
                along[0] = number;
                continue;
            }
            const u64 extent = operands.extents[axis];
            // Division of 64 bits is slow.
            const u64 next = (number | extent) >> 32 ? number / extent : (u64)((u32)number / (u32)extent);
            along[axis] = number - next * extent;
            number = next;
        }
    }

    __device__ __forceinline__ u64 at(const u64 *strides) const {
        u64 sum = 0;
#pragma unroll
        for (int axis = 0; axis < MAX_AXES; ++axis) sum += along[axis] * strides[axis];
        return sum;
    }
};

template <typename Wide>
static __device__ __forceinline__ void strided(const Operands &operands, u32 axes, u32 op, u32 number, u32 from, u32 to,
                                               void *target, u64 count) {
    const u64 stride = (u64)gridDim.x * blockDim.x;
    for (u64 first = (u64)blockIdx.x * blockDim.x + threadIdx.x; first < count; first += ITEMS * stride) {
        Wide all[ITEMS];
#pragma unroll
        for (u32 item = 0; item < ITEMS; ++item) {
            const u64 at = first + item * stride;
            if (at < count) all[item] = load<Wide>(from, operands.at[0], Index(operands, axes, at).at(operands.strides[0]));
        }
        for (u32 i = 1; i < number; ++i) {
#pragma unroll
            for (u32 item = 0; item < ITEMS; ++item) {
                const u64 at = first + item * stride;
                if (at >= count) continue;
                const u64 place = Index(operands, axes, at).at(operands.strides[i]);
                all[item] = combine_as<Wide>(op, all[item], load<Wide>(from, operands.at[i], place));
            }
        }
#pragma unroll
        for (u32 item = 0; item < ITEMS; ++item) {
            const u64 at = first + item * stride;
            if (at < count) store<Wide>(to, target, Index(operands, axes, at).at(operands.target_strides), all[item]);
        }
    }
}

template <typename Stored>
static __device__ __forceinline__ void copy(const Operands &operands, u32 axes, void *target, u64 count) {
    const u64 stride = (u64)gridDim.x * blockDim.x;
    for (u64 first = (u64)blockIdx.x * blockDim.x + threadIdx.x; first < count; first += ITEMS * stride) {
        Stored all[ITEMS];
#pragma unroll
        for (u32 item = 0; item < ITEMS; ++item) {
            const u64 at = first + item * stride;
            if (at < count) all[item] = ((const Stored *)operands.at[0])[Index(operands, axes, at).at(operands.strides[0])];
        }
#pragma unroll
        for (u32 item = 0; item < ITEMS; ++item) {
            const u64 at = first + item * stride;
            if (at < count) ((Stored *)target)[Index(operands, axes, at).at(operands.target_strides)] = all[item];
        }
    }
}

#define STRIDED_KERNEL(name, Wide)                                                                                     \
    extern "C" __global__ void __launch_bounds__(512)                                                                  \
        name(const __grid_constant__ Operands operands, u32 axes, u32 op, u32 number, u32 from, u32 to, void *target,  \
             u64 count) {                                                                                              \
        strided<Wide>(operands, axes, op, number, from, to, target, count);                                            \
    }

STRIDED_KERNEL(warplink_strided_f32, float)
STRIDED_KERNEL(warplink_strided_f64, double)
STRIDED_KERNEL(warplink_strided_i32, u32)

// The elements have the size of `from`; their bits are copied.
extern "C" __global__ void __launch_bounds__(512)
    warplink_strided_copy(const __grid_constant__ Operands operands, u32 axes, u32, u32, u32 from, u32, void *target,
                          u64 count) {
    switch (from) {
    case F16_TYPE:
    case BF16_TYPE: copy<u16>(operands, axes, target, count); break;
    case F32_TYPE:
    case I32_TYPE: copy<u32>(operands, axes, target, count); break;
    case F64_TYPE: copy<u64>(operands, axes, target, count); break;
    default: copy<u8>(operands, axes, target, count); break;
    }
}
