// Element-wise sum of up to 16 arrays, in the order given.
//
// No header is included, since NVRTC has no include path on some machines: halves are converted by
// an instruction, bfloat16 by its bits. The target may be one of the sources: each element is read
// from every source and then written by one and the same thread.

typedef unsigned long long u64;
typedef unsigned int u32;
typedef unsigned short u16;

// Must match MAX_SOURCES on the host.
#define MAX_SOURCES 16

// Loads that one thread has under way before it adds: enough to cover the latency of a peer's
// memory with one round for the eight GPUs of a machine.
#define IN_FLIGHT 8

struct Sources {
    const void *at[MAX_SOURCES];
};

struct F16 {
    typedef u16 Stored;
    typedef float Sum;
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
    typedef float Sum;
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
    typedef float Sum;
    static __device__ __forceinline__ float load(float value) { return value; }
    static __device__ __forceinline__ float store(float value) { return value; }
};

struct F64 {
    typedef double Stored;
    typedef double Sum;
    static __device__ __forceinline__ double load(double value) { return value; }
    static __device__ __forceinline__ double store(double value) { return value; }
};

// Without a sign, so that overflow wraps around.
struct I32 {
    typedef u32 Stored;
    typedef u32 Sum;
    static __device__ __forceinline__ u32 load(u32 value) { return value; }
    static __device__ __forceinline__ u32 store(u32 value) { return value; }
};

template <typename Stored> union Pack {
    uint4 whole;
    Stored part[16 / sizeof(Stored)];
};

// `vectors` says that all addresses are aligned to 16 bytes.
template <typename Element>
static __device__ __forceinline__ void sum(const Sources &sources, u32 number, void *target_bytes, u64 count, u32 vectors) {
    typedef typename Element::Stored Stored;
    typedef typename Element::Sum Sum;
    const u32 lanes = 16 / sizeof(Stored);
    const u64 first = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    const u64 stride = (u64)gridDim.x * blockDim.x;
    const u64 whole = vectors ? count / lanes : 0;

    for (u64 at = first; at < whole; at += stride) {
        Sum sums[lanes];
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
                        const Sum value = Element::load(packs[i].part[lane]);
                        sums[lane] = base + i == 0 ? value : sums[lane] + value;
                    }
                }
            }
        }
        Pack<Stored> result;
#pragma unroll
        for (u32 lane = 0; lane < lanes; ++lane) result.part[lane] = Element::store(sums[lane]);
        ((uint4 *)target_bytes)[at] = result.whole;
    }

    for (u64 at = whole * lanes + first; at < count; at += stride) {
        Sum total = Element::load(((const Stored *)sources.at[0])[at]);
        for (u32 i = 1; i < number; ++i) total += Element::load(((const Stored *)sources.at[i])[at]);
        ((Stored *)target_bytes)[at] = Element::store(total);
    }
}

#define SUM_KERNEL(name, Element)                                                                                      \
    extern "C" __global__ void __launch_bounds__(512)                                                                  \
        name(const __grid_constant__ Sources sources, u32 number, void *target, u64 count, u32 vectors) {              \
        sum<Element>(sources, number, target, count, vectors);                                                         \
    }

SUM_KERNEL(warplink_sum_f16, F16)
SUM_KERNEL(warplink_sum_bf16, Bf16)
SUM_KERNEL(warplink_sum_f32, F32)
SUM_KERNEL(warplink_sum_f64, F64)
SUM_KERNEL(warplink_sum_i32, I32)
