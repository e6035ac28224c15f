// Linear attention and the gated delta rule; linear_attention.cuh has the kernels.
#include "linear_attention.cuh"

using namespace xentile;

#define LINEAR_KERNEL(name, threads, ctas, ...)                            \
  extern "C" __global__ void __launch_bounds__(threads, ctas)              \
      linear_attention_##name(const __grid_constant__ LinearAttentionArguments a) { \
    __VA_ARGS__;                                                           \
  }

LINEAR_KERNEL(decays, kLinearThreads, 1, linear_attention::decays(a))

#define LINEAR_FORWARD(name, part, run, K, V)                                                   \
  LINEAR_KERNEL(name##_##K##_##V, kLinearThreads, 2,                                            \
                linear_attention::Forward<K, V, linear_attention::Part::part>::run(a))

#define LINEAR_OF_KEYS(K)                                                                       \
  LINEAR_KERNEL(prepare_##K, 128, 3, linear_attention::Prepare<K>::run(a))                      \
  LINEAR_KERNEL(heads_##K, kLinearThreads, 1, linear_attention::add_heads<K>(a))

#define LINEAR_OF_FORM(form, kDelta, K, V)                                                      \
  LINEAR_KERNEL(gradients_##form##_##K##_##V, kLinearThreads, 1,                                \
                linear_attention::Gradients<K, V, kDelta>::run(a))

// Without b the states and their gradients depend on no other: both chains run at once.
#define LINEAR_OF(K, V)                                                                         \
  LINEAR_OF_FORM(plain, false, K, V)                                                            \
  LINEAR_OF_FORM(delta, true, K, V)                                                             \
  LINEAR_KERNEL(step_##K##_##V, kLinearStepThreads, 2, linear_attention::Step<K, V>::run(a))    \
  LINEAR_FORWARD(forward, kWhole, run, K, V)                                                    \
  LINEAR_FORWARD(forward_exact, kWhole, run_exactly, K, V)                                      \
  LINEAR_FORWARD(forward_sums, kSums, run, K, V)                                                \
  LINEAR_FORWARD(forward_outputs, kOutputs, run, K, V)                                          \
  LINEAR_FORWARD(forward_outputs_exact, kOutputs, run_exactly, K, V)                            \
  LINEAR_KERNEL(combine_##K##_##V, kLinearThreads, 1, linear_attention::combine(a, K * V))      \
  LINEAR_KERNEL(chain_##K##_##V, kLinearThreads, 1,                                             \
                linear_attention::Chain<K, V, true>::run(a, blockIdx.x))                        \
  LINEAR_KERNEL(reverse_##K##_##V, kLinearThreads, 1,                                           \
                linear_attention::Reverse<K, V, true>::run(a, blockIdx.x))                      \
  LINEAR_KERNEL(outputs_##K##_##V, 128, 2, linear_attention::Outputs<K, V>::run(a))             \
  LINEAR_KERNEL(pull_##K##_##V, 128, 3, linear_attention::LocalGradients<K, V>::run(a))         \
  LINEAR_KERNEL(chains_##K##_##V, kLinearThreads, 1,                                            \
                if (blockIdx.x < a.reversed) linear_attention::Chain<K, V, false>::run(a, blockIdx.x); \
                else linear_attention::Reverse<K, V, false>::run(a, blockIdx.x - a.reversed))

LINEAR_OF_KEYS(64)
LINEAR_OF_KEYS(128)
LINEAR_OF(64, 64)
LINEAR_OF(64, 128)
LINEAR_OF(128, 64)
LINEAR_OF(128, 128)
