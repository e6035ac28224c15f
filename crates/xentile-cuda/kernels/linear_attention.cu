// Linear attention and the gated delta rule; linear_attention.cuh and linear_attention_sums.cuh have the kernels.
#include "linear_attention.cuh"
#include "linear_attention_sums.cuh"

using namespace xentile;

#define LINEAR_KERNEL(name, threads, ctas, ...)                            \
  extern "C" __global__ void __launch_bounds__(threads, ctas)              \
      linear_attention_##name(const __grid_constant__ LinearAttentionArguments a) { \
    __VA_ARGS__;                                                           \
  }

LINEAR_KERNEL(decays, kLinearThreads, 1, linear_attention::decays(a))

#define LINEAR_SUM(name, result, part, run, K, V)                                               \
  LINEAR_KERNEL(name##_##K##_##V, kLinearThreads, 2,                                            \
                linear_attention::CausalSum<K, V, linear_attention::Result::result,             \
                                            linear_attention::Part::part>::run(a))

#define LINEAR_OF_KEYS(K)                                                                       \
  LINEAR_KERNEL(prepare_##K, 128, 3, linear_attention::Prepare<K>::run(a))                      \
  LINEAR_KERNEL(heads_##K, kLinearThreads, 1, linear_attention::add_heads<K>(a))

#define LINEAR_OF(K, V)                                                                         \
  LINEAR_KERNEL(step_##K##_##V, kLinearStepThreads, 2, linear_attention::Step<K, V>::run(a))    \
  LINEAR_SUM(group_states, kDq, kStates, run, K, V)                                          \
  LINEAR_SUM(group_gradients, kDk, kStates, run, K, V)                                       \
  LINEAR_SUM(forward, kO, kRows, run, K, V)                                                  \
  LINEAR_SUM(forward_exact, kO, kRows, run_exactly, K, V)                                    \
  LINEAR_KERNEL(backward_##K##_##V, kLinearThreads, 2, linear_attention::AllGradients<K, V>::run(a)) \
  LINEAR_KERNEL(backward_exact_##K##_##V, kLinearThreads, 2,                                    \
                linear_attention::AllGradients<K, V>::run_exactly(a))                           \
  LINEAR_KERNEL(combine_##K##_##V, kLinearThreads, 1, linear_attention::combine<false>(a, K * V)) \
  LINEAR_KERNEL(combine_gradients_##K##_##V, kLinearThreads, 1, linear_attention::combine<true>(a, K * V)) \
  LINEAR_KERNEL(decay_gradients_##K##_##V, kLinearThreads, 1, linear_attention::DecayGradients<K, V>::run(a)) \
  LINEAR_KERNEL(chain_##K##_##V, kLinearThreads, 1, linear_attention::Chain<K, V>::run(a))      \
  LINEAR_KERNEL(reverse_##K##_##V, kLinearThreads, 1, linear_attention::Reverse<K, V>::run(a))  \
  LINEAR_KERNEL(outputs_##K##_##V, 128, 2, linear_attention::Outputs<K, V>::run(a))             \
  LINEAR_KERNEL(pull_##K##_##V, 128, 3, linear_attention::LocalGradients<K, V>::run(a))         \
  LINEAR_KERNEL(gradients_##K##_##V, kLinearThreads, 1, linear_attention::Gradients<K, V>::run(a))

LINEAR_OF_KEYS(64)
LINEAR_OF_KEYS(128)
LINEAR_OF(64, 64)
LINEAR_OF(64, 128)
LINEAR_OF(128, 64)
LINEAR_OF(128, 128)
