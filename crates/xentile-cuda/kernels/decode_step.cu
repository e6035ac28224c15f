// A token of a decoder at batch 1 in one launch (decode_step.cuh), for Hopper.
#include "decode_step.cuh"

#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)

extern "C" __global__ void __launch_bounds__(xentile::decode_step::kThreads, 1)
    decode_step_qwen3_small(const __grid_constant__ DecodeStepArguments a) {
  extern __shared__ __align__(1024) uint8_t shared[];
  xentile::decode_step::decode<xentile::decode_step::Qwen3Small>(a, shared);
}

#endif
