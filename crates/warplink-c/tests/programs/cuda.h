// So much of CUDA C++ that g++ can parse warplink/device.cuh. Where the header comes to use more, add it here.

#define __device__
#define __forceinline__ inline

struct uint2 {
    unsigned x, y;
};
struct uint4 {
    unsigned x, y, z, w;
};
struct CudaIndex {
    unsigned x, y, z;
};
extern const CudaIndex threadIdx, blockIdx, blockDim, gridDim;

void __syncthreads();
int __syncthreads_or(int);
void __syncwarp(unsigned mask = ~0u);
int __any_sync(unsigned mask, int value);
unsigned long long __shfl_sync(unsigned mask, unsigned long long value, int lane, int width);
unsigned long long atomicCAS(unsigned long long *, unsigned long long, unsigned long long);
