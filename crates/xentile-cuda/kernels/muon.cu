// The kernels of Muon's symmetric products, for Hopper alone.
#include "muon.cuh"

using namespace xentile;

#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)

#define MUON(name, tall, result)                                         \
  extern "C" __global__ void __launch_bounds__(kMuonThreads, 1)          \
      muon_##name(const __grid_constant__ MuonArguments a) {             \
    muon::multiply<tall, muon::Result::result>(a);                       \
  }

MUON(gram_wide, false, kGram)
MUON(gram_tall, true, kGram)
MUON(partial_wide, false, kPartial)
MUON(partial_tall, true, kPartial)
MUON(square, false, kSquare)

extern "C" __global__ void __launch_bounds__(kMuonSumThreads, 1)
    muon_sum(const __grid_constant__ MuonArguments a) {
  muon::sum(a);
}

#endif
