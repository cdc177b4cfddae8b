// Element types and operators of reductions, and the units in which elements are moved; a part of steps.cuh.
//
// An element type defines the layout of its elements in memory and the type of their sums: f32 for f16, bf16 and
// 8-bit floats; integers, whose overflow wraps around. An operator combines two such values, and finishes the result
// of all. Results are rounded once, to nearest, ties to even.

#ifndef WARPLINK_ELEMENTS_CUH
#define WARPLINK_ELEMENTS_CUH

#include <warplink/groups.cuh>

namespace warplink {

// Bytes that a thread moves at a time: 4, 8 or 16.
template <u32 BYTES> struct Unit {
    u32 word[BYTES / 4];
};

// ---- element types
//
// `Bits` is the stored type, `Value` the type of computations. A cell is the smallest number of whole words with
// whole elements: `unpack` and `pack` convert one.

struct F16 {
    typedef unsigned short Bits;
    typedef float Value;
    static constexpr u32 cell = 2;
    static __device__ __forceinline__ void unpack(const u32 *word, float *value) {
        asm("{.reg .f16 low, high; mov.b32 {low, high}, %2; cvt.f32.f16 %0, low; cvt.f32.f16 %1, high;}"
            : "=f"(value[0]), "=f"(value[1])
            : "r"(word[0]));
    }
    static __device__ __forceinline__ void pack(const float *value, u32 *word) {
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word[0]) : "f"(value[1]), "f"(value[0]));
    }
};

struct Bf16 {
    typedef unsigned short Bits;
    typedef float Value;
    static constexpr u32 cell = 2;
    static __device__ __forceinline__ void unpack(const u32 *word, float *value) {
        value[0] = __uint_as_float(word[0] << 16);
        value[1] = __uint_as_float(word[0] & 0xffff0000u);
    }
    static __device__ __forceinline__ void pack(const float *value, u32 *word) {
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word[0]) : "f"(value[1]), "f"(value[0]));
    }
};

struct F32 {
    typedef u32 Bits;
    typedef float Value;
    static constexpr u32 cell = 1;
    static __device__ __forceinline__ void unpack(const u32 *word, float *value) { value[0] = __uint_as_float(word[0]); }
    static __device__ __forceinline__ void pack(const float *value, u32 *word) { word[0] = __float_as_uint(value[0]); }
};

struct F64 {
    typedef u64 Bits;
    typedef double Value;
    static constexpr u32 cell = 1;
    static __device__ __forceinline__ void unpack(const u32 *word, double *value) {
        value[0] = __hiloint2double((int)word[1], (int)word[0]);
    }
    static __device__ __forceinline__ void pack(const double *value, u32 *word) {
        word[0] = (u32)__double2loint(value[0]);
        word[1] = (u32)__double2hiint(value[0]);
    }
};

// 8-bit floats. Values out of range become the largest finite value, not infinity.
template <u32 EXPONENT_BITS> struct F8 {
    typedef unsigned char Bits;
    typedef float Value;
    static constexpr u32 cell = 4;
    static constexpr bool e4m3 = EXPONENT_BITS == 4;
    static_assert(EXPONENT_BITS == 4 || EXPONENT_BITS == 5, "there are two formats");

    static __device__ __forceinline__ void unpack(const u32 *word, float *value) {
#pragma unroll
        for (u32 half = 0; half < 2; half++) {
            const u32 pair = word[0] >> 16 * half & 0xffffu;
            u32 halves;
#if __CUDA_ARCH__ >= 890
            if constexpr (e4m3)
                asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"((unsigned short)pair));
            else
#endif
                halves = as_f16(pair & 0xffu) | as_f16(pair >> 8) << 16;
            F16::unpack(&halves, value + 2 * half);
        }
    }

    static __device__ __forceinline__ void pack(const float *value, u32 *word) {
#if __CUDA_ARCH__ >= 890
        unsigned short low, high;
        if constexpr (e4m3) {
            asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(low) : "f"(value[1]), "f"(value[0]));
            asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(high) : "f"(value[3]), "f"(value[2]));
        } else {
            asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(low) : "f"(value[1]), "f"(value[0]));
            asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(high) : "f"(value[3]), "f"(value[2]));
        }
        word[0] = (u32)low | (u32)high << 16;
#else
        word[0] = rounded(value[0]) | rounded(value[1]) << 8 | rounded(value[2]) << 16 | rounded(value[3]) << 24;
#endif
    }

  private:
    // The bits of the same value in half precision, which represents every value of both formats.
    static __device__ __forceinline__ u32 as_f16(u32 bits) {
        // Half precision has the exponent of e5m2.
        if constexpr (!e4m3) return bits << 8;
        const u32 sign = (bits & 0x80u) << 8, magnitude = bits & 0x7fu;
        if (magnitude == 0x7fu) return sign | 0x7fffu;
        // The exponent's bias is 8 smaller; subnormals are multiples of 2^-9.
        if (magnitude >= 8) return sign | ((magnitude << 7) + (8u << 10));
        u32 half;
        asm("{.reg .f16 value; cvt.rn.f16.f32 value, %1; mov.b32 %0, {value, value};}" : "=r"(half) : "f"((float)magnitude * 0.001953125f));
        return sign | (half & 0x7fffu);
    }

    static __device__ __forceinline__ u32 rounded(float value) {
        constexpr u32 mantissa = e4m3 ? 3 : 2, bias = e4m3 ? 7 : 15;
        constexpr u32 largest = e4m3 ? 0x7e : 0x7b;
        const u32 bits = __float_as_uint(value), sign = bits >> 24 & 0x80u, magnitude = bits & 0x7fffffffu;
        if (magnitude > 0x7f800000u) return 0x7fu;
        // For a normal result, the exponent is rebiased and the mantissa rounded, which may carry; for a subnormal
        // one, the mantissa is shifted with its leading one.
        const u32 smallest = (127u - bias + 1) << 23;
        u32 result;
        if (magnitude >= smallest) {
            const u32 shift = 23 - mantissa, odd = magnitude >> shift & 1u;
            result = (magnitude - ((127u - bias) << 23) + (1u << (shift - 1)) - 1 + odd) >> shift;
        } else {
            const u32 shift = 23 - mantissa + (127u - bias + 1) - (magnitude >> 23);
            if (shift > 24 || magnitude < 0x00800000u) return sign;
            const u32 whole = (magnitude & 0x7fffffu) | 0x800000u, odd = whole >> shift & 1u;
            result = (whole + (1u << (shift - 1)) - 1 + odd) >> shift;
        }
        return sign | (result > largest ? largest : result);
    }
};

typedef F8<4> E4m3;
typedef F8<5> E5m2;

// Integers of 1, 4 or 8 bytes; `T` determines the sign and, except for bytes, the size.
template <typename T, typename STORED> struct Integer {
    typedef STORED Bits;
    typedef T Value;
    static constexpr u32 cell = sizeof(Bits) == 1 ? 4 : 1;
    static __device__ __forceinline__ void unpack(const u32 *word, T *value) {
        if constexpr (sizeof(Bits) == 8) {
            value[0] = (T)((u64)word[0] | (u64)word[1] << 32);
        } else if constexpr (sizeof(Bits) == 4) {
            value[0] = (T)word[0];
        } else {
#pragma unroll
            // Shifted to the top and back, which extends the sign of a signed type.
            for (u32 i = 0; i < 4; i++) value[i] = (T)(word[0] << 8 * (3 - i)) >> 24;
        }
    }
    static __device__ __forceinline__ void pack(const T *value, u32 *word) {
        if constexpr (sizeof(Bits) == 8) {
            word[0] = (u32)(u64)value[0];
            word[1] = (u32)((u64)value[0] >> 32);
        } else if constexpr (sizeof(Bits) == 4) {
            word[0] = (u32)value[0];
        } else {
            word[0] = 0;
#pragma unroll
            for (u32 i = 0; i < 4; i++) word[0] |= ((u32)value[i] & 0xffu) << 8 * i;
        }
    }
};

typedef Integer<int, u32> I32;
typedef Integer<u32, u32> U32;
typedef Integer<long long, u64> I64;
typedef Integer<u64, u64> U64;
typedef Integer<int, unsigned char> I8;
typedef Integer<u32, unsigned char> U8;

// ---- operators
//
// `begin` converts a value before it is combined, if the operator requires that; `finish` computes the result from
// `number` combined values.

namespace detail {

// Unsigned, so that overflow wraps around.
__device__ __forceinline__ int plus(int a, int b) { return (int)((u32)a + (u32)b); }
__device__ __forceinline__ long long plus(long long a, long long b) { return (long long)((u64)a + (u64)b); }
__device__ __forceinline__ u32 plus(u32 a, u32 b) { return a + b; }
__device__ __forceinline__ u64 plus(u64 a, u64 b) { return a + b; }
__device__ __forceinline__ float plus(float a, float b) { return __fadd_rn(a, b); }
__device__ __forceinline__ double plus(double a, double b) { return __dadd_rn(a, b); }

__device__ __forceinline__ int times(int a, int b) { return (int)((u32)a * (u32)b); }
__device__ __forceinline__ long long times(long long a, long long b) { return (long long)((u64)a * (u64)b); }
__device__ __forceinline__ u32 times(u32 a, u32 b) { return a * b; }
__device__ __forceinline__ u64 times(u64 a, u64 b) { return a * b; }
__device__ __forceinline__ float times(float a, float b) { return __fmul_rn(a, b); }
__device__ __forceinline__ double times(double a, double b) { return __dmul_rn(a, b); }

// The number, if the other value is a NaN.
template <typename T> __device__ __forceinline__ T smaller(T a, T b) { return b < a ? b : a; }
__device__ __forceinline__ float smaller(float a, float b) { return fminf(a, b); }
__device__ __forceinline__ double smaller(double a, double b) { return fmin(a, b); }
template <typename T> __device__ __forceinline__ T larger(T a, T b) { return a < b ? b : a; }
__device__ __forceinline__ float larger(float a, float b) { return fmaxf(a, b); }
__device__ __forceinline__ double larger(double a, double b) { return fmax(a, b); }

}  // namespace detail

struct Add {
    template <typename T> static __device__ __forceinline__ T combine(T a, T b) { return detail::plus(a, b); }
    template <typename T> static __device__ __forceinline__ T finish(T value, u32) { return value; }
};

struct Multiply {
    template <typename T> static __device__ __forceinline__ T combine(T a, T b) { return detail::times(a, b); }
    template <typename T> static __device__ __forceinline__ T finish(T value, u32) { return value; }
};

struct Minimum {
    template <typename T> static __device__ __forceinline__ T combine(T a, T b) { return detail::smaller(a, b); }
    template <typename T> static __device__ __forceinline__ T finish(T value, u32) { return value; }
};

struct Maximum {
    template <typename T> static __device__ __forceinline__ T combine(T a, T b) { return detail::larger(a, b); }
    template <typename T> static __device__ __forceinline__ T finish(T value, u32) { return value; }
};

// The sum divided by the number of values; for integers, truncated.
struct Average {
    template <typename T> static __device__ __forceinline__ T combine(T a, T b) { return detail::plus(a, b); }
    template <typename T> static __device__ __forceinline__ T finish(T value, u32 number) { return value / (T)number; }
};

// The sum of values that are multiplied by a factor, which every thread of the lane sets first. Of floats only.
struct ScaledSum {
    struct Factor {
        double exact;
        float rounded;
    };
    static __device__ __forceinline__ Factor &factor() {
        __shared__ Factor value;
        return value;
    }
    static __device__ __forceinline__ void set(double value) {
        if (threadIdx.x == 0) {
            factor().exact = value;
            factor().rounded = __double2float_rn(value);
        }
        __syncthreads();
    }
    static __device__ __forceinline__ float begin(float value) { return detail::times(value, factor().rounded); }
    static __device__ __forceinline__ double begin(double value) { return detail::times(value, factor().exact); }
    template <typename T> static __device__ __forceinline__ T combine(T a, T b) { return detail::plus(a, b); }
    template <typename T> static __device__ __forceinline__ T finish(T value, u32) { return value; }
};

namespace detail {

// Whether values change before they are combined.
template <typename Operator> constexpr bool begins = false;
template <> constexpr bool begins<ScaledSum> = true;

}  // namespace detail

// ---- units

namespace detail {

// How many elements a unit has.
template <typename Element, u32 BYTES> constexpr u32 unit_elements = BYTES / sizeof(typename Element::Bits);

// The values of a unit, as they are combined.
template <typename Element, u32 BYTES> struct Accumulator {
    static constexpr u32 elements = unit_elements<Element, BYTES>;
    static constexpr u32 words = Element::cell * sizeof(typename Element::Bits) / 4;
    static_assert(BYTES % (4 * words) == 0, "units have whole cells");
    typename Element::Value value[elements];

    __device__ __forceinline__ void set(const Unit<BYTES> &unit) {
#pragma unroll
        for (u32 i = 0; i < elements / Element::cell; i++) Element::unpack(unit.word + words * i, value + Element::cell * i);
    }

    template <typename Operator> __device__ __forceinline__ void begin(const Unit<BYTES> &unit) {
        set(unit);
        if constexpr (begins<Operator>) {
#pragma unroll
            for (u32 i = 0; i < elements; i++) value[i] = Operator::begin(value[i]);
        }
    }

    template <typename Operator> __device__ __forceinline__ void combine(const Unit<BYTES> &unit) {
        Accumulator other;
        other.template begin<Operator>(unit);
#pragma unroll
        for (u32 i = 0; i < elements; i++) value[i] = Operator::combine(value[i], other.value[i]);
    }

    template <typename Operator> __device__ __forceinline__ Unit<BYTES> result(u32 number) {
        Unit<BYTES> unit;
#pragma unroll
        for (u32 i = 0; i < elements; i++) value[i] = Operator::finish(value[i], number);
#pragma unroll
        for (u32 i = 0; i < elements / Element::cell; i++) Element::pack(value + Element::cell * i, unit.word + words * i);
        return unit;
    }
};

// In code order: loads are issued in this order.
template <u32 BYTES> __device__ __forceinline__ Unit<BYTES> load_unit(u64 at) {
    Unit<BYTES> unit;
    if constexpr (BYTES == 16)
        asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(unit.word[0]), "=r"(unit.word[1]), "=r"(unit.word[2]), "=r"(unit.word[3])
                     : "l"(at)
                     : "memory");
    else if constexpr (BYTES == 8)
        asm volatile("ld.global.v2.u32 {%0, %1}, [%2];" : "=r"(unit.word[0]), "=r"(unit.word[1]) : "l"(at) : "memory");
    else
        asm volatile("ld.global.u32 %0, [%1];" : "=r"(unit.word[0]) : "l"(at) : "memory");
    return unit;
}

// The same with a fixed position in the code, which the assembler guarantees for volatile loads only.
template <u32 BYTES> __device__ __forceinline__ Unit<BYTES> load_unit_here(u64 at) {
    static_assert(BYTES == 4 || BYTES == 8, "what a packet has of data");
    Unit<BYTES> unit;
    if constexpr (BYTES == 8)
        asm volatile("ld.volatile.global.v2.u32 {%0, %1}, [%2];" : "=r"(unit.word[0]), "=r"(unit.word[1]) : "l"(at) : "memory");
    else
        asm volatile("ld.volatile.global.u32 %0, [%1];" : "=r"(unit.word[0]) : "l"(at) : "memory");
    return unit;
}

template <u32 BYTES> __device__ __forceinline__ void store_unit(u64 at, const Unit<BYTES> &unit) {
    if constexpr (BYTES == 16)
        asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(at), "r"(unit.word[0]), "r"(unit.word[1]), "r"(unit.word[2]), "r"(unit.word[3]) : "memory");
    else if constexpr (BYTES == 8)
        asm volatile("st.global.v2.u32 [%0], {%1, %2};" ::"l"(at), "r"(unit.word[0]), "r"(unit.word[1]) : "memory");
    else
        asm volatile("st.global.u32 [%0], %1;" ::"l"(at), "r"(unit.word[0]) : "memory");
}

// The first `number` elements of a unit, one by one, and zeros: for memory that is not aligned to a whole unit, or
// ends within it.
template <typename Element, u32 BYTES> __device__ __forceinline__ Unit<BYTES> load_elements(u64 at, u32 number) {
    typedef typename Element::Bits Bits;
    Unit<BYTES> unit = {};
#pragma unroll
    for (u32 i = 0; i < unit_elements<Element, BYTES>; i++) {
        if (i < number) {
            const Bits bits = ((const Bits *)at)[i];
            if constexpr (sizeof(Bits) == 8) {
                unit.word[2 * i] = (u32)bits;
                unit.word[2 * i + 1] = (u32)(bits >> 32);
            } else {
                unit.word[i * sizeof(Bits) / 4] |= (u32)bits << 8 * (i * sizeof(Bits) % 4);
            }
        }
    }
    return unit;
}

template <typename Element, u32 BYTES> __device__ __forceinline__ void store_elements(u64 at, const Unit<BYTES> &unit, u32 number) {
    typedef typename Element::Bits Bits;
#pragma unroll
    for (u32 i = 0; i < unit_elements<Element, BYTES>; i++) {
        if (i < number) {
            if constexpr (sizeof(Bits) == 8)
                ((Bits *)at)[i] = (u64)unit.word[2 * i] | (u64)unit.word[2 * i + 1] << 32;
            else
                ((Bits *)at)[i] = (Bits)(unit.word[i * sizeof(Bits) / 4] >> 8 * (i * sizeof(Bits) % 4));
        }
    }
}

}  // namespace detail
}  // namespace warplink

#endif
