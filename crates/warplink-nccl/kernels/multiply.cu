// Multiplies elements by a number of their type, stored in device memory or passed as a launch argument.

#include <warplink/elements.cuh>

using namespace warplink;

// Arithmetic is as in reductions; each product is rounded once.
template <typename T>
static __device__ __forceinline__ void multiply(typename T::Bits *target, const typename T::Bits *source, u64 count,
                                                const typename T::Bits *factor, u64 immediate) {
    u32 word[2] = {(u32)immediate, (u32)(immediate >> 32)};
    typename T::Value value[T::cell], by[T::cell];
    if (factor != nullptr) {
        u64 bits = (u64)*factor;
        word[0] = (u32)bits;
        word[1] = (u32)(bits >> 32);
    }
    T::unpack(word, by);
    for (u64 at = (u64)blockIdx.x * blockDim.x + threadIdx.x; at < count; at += (u64)gridDim.x * blockDim.x) {
        u64 bits = (u64)source[at];
        word[0] = (u32)bits;
        word[1] = (u32)(bits >> 32);
        T::unpack(word, value);
        for (u32 each = 0; each < T::cell; each++) value[each] *= by[0];
        T::pack(value, word);
        bits = (u64)word[1] << 32 | word[0];
        target[at] = (typename T::Bits)bits;
    }
}

#define KERNEL(NAME, T)                                                                                                \
    extern "C" __global__ void NAME(T::Bits *target, const T::Bits *source, u64 count, const T::Bits *factor,          \
                                    u64 immediate) {                                                                   \
        multiply<T>(target, source, count, factor, immediate);                                                         \
    }

KERNEL(multiply_f16, F16)
KERNEL(multiply_bf16, Bf16)
KERNEL(multiply_f32, F32)
KERNEL(multiply_f64, F64)
KERNEL(multiply_i32, I32)
KERNEL(multiply_u8, U8)
KERNEL(multiply_i8, I8)
KERNEL(multiply_u32, U32)
KERNEL(multiply_i64, I64)
KERNEL(multiply_u64, U64)
KERNEL(multiply_f8e4m3, E4m3)
KERNEL(multiply_f8e5m2, E5m2)
