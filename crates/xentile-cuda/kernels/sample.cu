// A token of each row of logits (sample.cuh), on GPUs that have clusters.
#include "sample.cuh"

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900

extern "C" __global__ void __launch_bounds__(kSampleThreads, 1)
    sample(const __grid_constant__ SampleArguments a) {
  extern __shared__ __align__(16) uint8_t memory[];
  xentile::sample::draw(a, memory);
}

extern "C" __global__ void __launch_bounds__(kSampleThreads, 1)
    sample_noise(const __grid_constant__ SampleArguments a) {
  xentile::sample::draw_bounds(a);
}

#endif
