/* xentile's kernels as XLA custom calls: the interface of libxentile_xla.
 *
 * Link the library, or load it with dlopen, and register what xentile_targets lists with XLA:
 *
 *     size_t count;
 *     const xentile_target* targets = xentile_targets(&count);
 *     for (size_t i = 0; i < count; ++i) {
 *       register(targets[i].target, targets[i].platform, targets[i].stage, targets[i].handler);
 *     }
 *
 * Nothing here needs XLA's headers; with them, the two structs declared below are XLA's own.
 * docs/internals/custom-calls.md says what every target takes and gives. All functions may be called from any
 * thread, and what they return lives as long as the library.
 */
#ifndef XENTILE_XLA_H_
#define XENTILE_XLA_H_

#include <stddef.h>
#include <stdint.h>

/* The version of this header; xentile_version tells that of the library. */
#define XENTILE_VERSION "0.1.0"

/* Rises when the layout of xentile_target, or what some target takes or gives, changes. A library
 * whose xentile_table_version differs does not fit this header. */
#define XENTILE_TABLE_VERSION 3

/* The version of XLA's FFI that the handlers answer. */
#define XENTILE_FFI_VERSION_MAJOR 0
#define XENTILE_FFI_VERSION_MINOR 1

#ifdef __cplusplus
extern "C" {
#endif

/* Of xla/ffi/api/c_api.h. */
struct XLA_FFI_CallFrame;
struct XLA_FFI_Error;

/* A handler: null for success. */
typedef struct XLA_FFI_Error* (*xentile_handler)(struct XLA_FFI_CallFrame* call_frame);

/* A handler to register. */
typedef struct xentile_target {
  /* Bytes of this struct in the library. */
  size_t struct_size;
  /* The name that a program calls, such as "xentile_scale". */
  const char* target;
  /* The platform, as XLA's registries name it: "Host" or "CUDA". */
  const char* platform;
  /* The stage of a call that the handler is for: the number of an XLA_FFI_ExecutionStage, of which 2
   * is initialize and 3 execute. */
  uint32_t stage;
  /* The handler's name among the symbols of the library. */
  const char* symbol;
  /* The handler. */
  xentile_handler handler;
} xentile_target;

/* The version of the library, as in "0.1.0". */
const char* xentile_version(void);

/* XENTILE_TABLE_VERSION of the library. */
uint32_t xentile_table_version(void);

/* The version of XLA's FFI that the handlers answer; an older runtime refuses them. Either pointer may
 * be null. */
void xentile_ffi_version(int32_t* major, int32_t* minor);

/* The table, and the number of its targets in *count unless that is null. */
const xentile_target* xentile_targets(size_t* count);

/* The instruction set that the kernels use on this processor: "amx_bf16", "avx512_bf16", "avx512", "avx2",
 * "neon" or "portable". On Linux the first call may ask the system for leave to use AMX, which holds for the
 * whole process. */
const char* xentile_cpu_isa(void);

/* The tile that a sweep found quickest for `vocab` columns of `dtype` ("f32", "bf16", "f16"), by the name of
 * its table, such as "linear_cross_entropy.cpu": returns 1, with tokens in *time_block and columns in
 * *block_size, or 0 where there is none. Either of these two pointers may be null. */
int32_t xentile_tuned_tile(const char* table, const char* dtype, size_t vocab, size_t* time_block,
                           size_t* block_size);

/* 1 where XLA's own program was measured to be faster than the kernel of an operation ("activation") in its
 * variant ("relu single"; "" where it has none) on a backend ("cuda"), else 0. */
int32_t xentile_prefers_xla(const char* backend, const char* operation, const char* variant);

/* The handlers. */
struct XLA_FFI_Error* xentile_activation_forward_host(struct XLA_FFI_CallFrame* call_frame);
struct XLA_FFI_Error* xentile_activation_backward_host(struct XLA_FFI_CallFrame* call_frame);
struct XLA_FFI_Error* xentile_cross_entropy_forward_host(struct XLA_FFI_CallFrame* call_frame);
struct XLA_FFI_Error* xentile_cross_entropy_backward_host(struct XLA_FFI_CallFrame* call_frame);
struct XLA_FFI_Error* xentile_cross_entropy_fused_host(struct XLA_FFI_CallFrame* call_frame);
struct XLA_FFI_Error* xentile_cross_entropy_distribution_host(
    struct XLA_FFI_CallFrame* call_frame);
struct XLA_FFI_Error* xentile_cross_entropy_distribution_fused_host(
    struct XLA_FFI_CallFrame* call_frame);
struct XLA_FFI_Error* xentile_cross_entropy_distribution_backward_host(
    struct XLA_FFI_CallFrame* call_frame);
struct XLA_FFI_Error* xentile_flash_attention_forward_host(
    struct XLA_FFI_CallFrame* call_frame);
struct XLA_FFI_Error* xentile_flash_attention_backward_host(
    struct XLA_FFI_CallFrame* call_frame);
struct XLA_FFI_Error* xentile_fp8_quantize_host(struct XLA_FFI_CallFrame* call_frame);
struct XLA_FFI_Error* xentile_fp8_quantize_transposed_host(struct XLA_FFI_CallFrame* call_frame);
struct XLA_FFI_Error* xentile_fp8_quantize_scaled_host(struct XLA_FFI_CallFrame* call_frame);
struct XLA_FFI_Error* xentile_fp8_quantize_scaled_transposed_host(
    struct XLA_FFI_CallFrame* call_frame);
struct XLA_FFI_Error* xentile_fp8_quantize_amax_host(struct XLA_FFI_CallFrame* call_frame);
struct XLA_FFI_Error* xentile_layer_norm_forward_host(struct XLA_FFI_CallFrame* call_frame);
struct XLA_FFI_Error* xentile_layer_norm_backward_host(struct XLA_FFI_CallFrame* call_frame);
struct XLA_FFI_Error* xentile_linear_cross_entropy_forward_host(
    struct XLA_FFI_CallFrame* call_frame);
struct XLA_FFI_Error* xentile_linear_cross_entropy_backward_host(
    struct XLA_FFI_CallFrame* call_frame);
struct XLA_FFI_Error* xentile_linear_cross_entropy_fused_host(
    struct XLA_FFI_CallFrame* call_frame);
struct XLA_FFI_Error* xentile_linear_cross_entropy_keep_host(
    struct XLA_FFI_CallFrame* call_frame);
struct XLA_FFI_Error* xentile_linear_cross_entropy_resume_host(
    struct XLA_FFI_CallFrame* call_frame);
struct XLA_FFI_Error* xentile_rms_norm_forward_host(struct XLA_FFI_CallFrame* call_frame);
struct XLA_FFI_Error* xentile_rms_norm_add_forward_host(struct XLA_FFI_CallFrame* call_frame);
struct XLA_FFI_Error* xentile_rms_norm_backward_host(struct XLA_FFI_CallFrame* call_frame);
struct XLA_FFI_Error* xentile_rms_norm_add_backward_host(struct XLA_FFI_CallFrame* call_frame);
struct XLA_FFI_Error* xentile_rope_host(struct XLA_FFI_CallFrame* call_frame);
struct XLA_FFI_Error* xentile_scale_host(struct XLA_FFI_CallFrame* call_frame);

/* Those for NVIDIA GPUs, two for most targets, which libraries built with CUDA have. A library that has them
 * loads on any machine; where a driver or a GPU is missing, it is the call that says so. */
struct XLA_FFI_Error* xentile_activation_forward_cuda_initialize(
    struct XLA_FFI_CallFrame* call_frame);
struct XLA_FFI_Error* xentile_activation_forward_cuda(
    struct XLA_FFI_CallFrame* call_frame);
struct XLA_FFI_Error* xentile_activation_backward_cuda_initialize(
    struct XLA_FFI_CallFrame* call_frame);
struct XLA_FFI_Error* xentile_activation_backward_cuda(
    struct XLA_FFI_CallFrame* call_frame);
struct XLA_FFI_Error* xentile_cross_entropy_forward_cuda_initialize(
    struct XLA_FFI_CallFrame* call_frame);
struct XLA_FFI_Error* xentile_cross_entropy_forward_cuda(
    struct XLA_FFI_CallFrame* call_frame);
struct XLA_FFI_Error* xentile_cross_entropy_backward_cuda_initialize(
    struct XLA_FFI_CallFrame* call_frame);
struct XLA_FFI_Error* xentile_cross_entropy_backward_cuda(
    struct XLA_FFI_CallFrame* call_frame);
struct XLA_FFI_Error* xentile_cross_entropy_fused_cuda_initialize(
    struct XLA_FFI_CallFrame* call_frame);
struct XLA_FFI_Error* xentile_cross_entropy_fused_cuda(
    struct XLA_FFI_CallFrame* call_frame);
struct XLA_FFI_Error* xentile_cross_entropy_distribution_cuda_initialize(
    struct XLA_FFI_CallFrame* call_frame);
struct XLA_FFI_Error* xentile_cross_entropy_distribution_cuda(
    struct XLA_FFI_CallFrame* call_frame);
struct XLA_FFI_Error* xentile_cross_entropy_distribution_fused_cuda_initialize(
    struct XLA_FFI_CallFrame* call_frame);
struct XLA_FFI_Error* xentile_cross_entropy_distribution_fused_cuda(
    struct XLA_FFI_CallFrame* call_frame);
struct XLA_FFI_Error* xentile_cross_entropy_distribution_backward_cuda_initialize(
    struct XLA_FFI_CallFrame* call_frame);
struct XLA_FFI_Error* xentile_cross_entropy_distribution_backward_cuda(
    struct XLA_FFI_CallFrame* call_frame);
struct XLA_FFI_Error* xentile_flash_attention_forward_cuda_initialize(
    struct XLA_FFI_CallFrame* call_frame);
struct XLA_FFI_Error* xentile_flash_attention_forward_cuda(
    struct XLA_FFI_CallFrame* call_frame);
struct XLA_FFI_Error* xentile_flash_attention_backward_cuda_initialize(
    struct XLA_FFI_CallFrame* call_frame);
struct XLA_FFI_Error* xentile_flash_attention_backward_cuda(
    struct XLA_FFI_CallFrame* call_frame);
struct XLA_FFI_Error* xentile_fp8_quantize_cuda_initialize(struct XLA_FFI_CallFrame* call_frame);
struct XLA_FFI_Error* xentile_fp8_quantize_cuda(struct XLA_FFI_CallFrame* call_frame);
struct XLA_FFI_Error* xentile_fp8_quantize_transposed_cuda_initialize(
    struct XLA_FFI_CallFrame* call_frame);
struct XLA_FFI_Error* xentile_fp8_quantize_transposed_cuda(struct XLA_FFI_CallFrame* call_frame);
struct XLA_FFI_Error* xentile_fp8_quantize_swiglu_cuda_initialize(
    struct XLA_FFI_CallFrame* call_frame);
struct XLA_FFI_Error* xentile_fp8_quantize_swiglu_cuda(
    struct XLA_FFI_CallFrame* call_frame);
struct XLA_FFI_Error* xentile_fp8_quantize_swiglu_transposed_cuda_initialize(
    struct XLA_FFI_CallFrame* call_frame);
struct XLA_FFI_Error* xentile_fp8_quantize_swiglu_transposed_cuda(
    struct XLA_FFI_CallFrame* call_frame);
struct XLA_FFI_Error* xentile_fp8_quantize_rms_norm_cuda_initialize(
    struct XLA_FFI_CallFrame* call_frame);
struct XLA_FFI_Error* xentile_fp8_quantize_rms_norm_cuda(
    struct XLA_FFI_CallFrame* call_frame);
struct XLA_FFI_Error* xentile_fp8_quantize_rms_norm_add_cuda_initialize(
    struct XLA_FFI_CallFrame* call_frame);
struct XLA_FFI_Error* xentile_fp8_quantize_rms_norm_add_cuda(
    struct XLA_FFI_CallFrame* call_frame);
struct XLA_FFI_Error* xentile_fp8_quantize_rms_norm_transposed_cuda_initialize(
    struct XLA_FFI_CallFrame* call_frame);
struct XLA_FFI_Error* xentile_fp8_quantize_rms_norm_transposed_cuda(
    struct XLA_FFI_CallFrame* call_frame);
struct XLA_FFI_Error* xentile_fp8_quantize_rms_norm_add_transposed_cuda_initialize(
    struct XLA_FFI_CallFrame* call_frame);
struct XLA_FFI_Error* xentile_fp8_quantize_rms_norm_add_transposed_cuda(
    struct XLA_FFI_CallFrame* call_frame);
struct XLA_FFI_Error* xentile_fp8_quantize_scaled_cuda_initialize(
    struct XLA_FFI_CallFrame* call_frame);
struct XLA_FFI_Error* xentile_fp8_quantize_scaled_cuda(struct XLA_FFI_CallFrame* call_frame);
struct XLA_FFI_Error* xentile_fp8_quantize_scaled_transposed_cuda_initialize(
    struct XLA_FFI_CallFrame* call_frame);
struct XLA_FFI_Error* xentile_fp8_quantize_scaled_transposed_cuda(
    struct XLA_FFI_CallFrame* call_frame);
struct XLA_FFI_Error* xentile_fp8_quantize_amax_cuda_initialize(
    struct XLA_FFI_CallFrame* call_frame);
struct XLA_FFI_Error* xentile_fp8_quantize_amax_cuda(struct XLA_FFI_CallFrame* call_frame);
struct XLA_FFI_Error* xentile_layer_norm_forward_cuda_initialize(
    struct XLA_FFI_CallFrame* call_frame);
struct XLA_FFI_Error* xentile_layer_norm_forward_cuda(
    struct XLA_FFI_CallFrame* call_frame);
struct XLA_FFI_Error* xentile_layer_norm_backward_cuda_initialize(
    struct XLA_FFI_CallFrame* call_frame);
struct XLA_FFI_Error* xentile_layer_norm_backward_cuda(
    struct XLA_FFI_CallFrame* call_frame);
struct XLA_FFI_Error* xentile_rms_norm_forward_cuda_initialize(
    struct XLA_FFI_CallFrame* call_frame);
struct XLA_FFI_Error* xentile_rms_norm_forward_cuda(
    struct XLA_FFI_CallFrame* call_frame);
struct XLA_FFI_Error* xentile_rms_norm_add_forward_cuda_initialize(
    struct XLA_FFI_CallFrame* call_frame);
struct XLA_FFI_Error* xentile_rms_norm_add_forward_cuda(
    struct XLA_FFI_CallFrame* call_frame);
struct XLA_FFI_Error* xentile_rms_norm_backward_cuda_initialize(
    struct XLA_FFI_CallFrame* call_frame);
struct XLA_FFI_Error* xentile_rms_norm_backward_cuda(
    struct XLA_FFI_CallFrame* call_frame);
struct XLA_FFI_Error* xentile_rms_norm_add_backward_cuda_initialize(
    struct XLA_FFI_CallFrame* call_frame);
struct XLA_FFI_Error* xentile_rms_norm_add_backward_cuda(
    struct XLA_FFI_CallFrame* call_frame);
struct XLA_FFI_Error* xentile_rope_cuda_initialize(
    struct XLA_FFI_CallFrame* call_frame);
struct XLA_FFI_Error* xentile_rope_cuda(struct XLA_FFI_CallFrame* call_frame);
struct XLA_FFI_Error* xentile_qk_norm_rope_forward_cuda_initialize(
    struct XLA_FFI_CallFrame* call_frame);
struct XLA_FFI_Error* xentile_qk_norm_rope_forward_cuda(
    struct XLA_FFI_CallFrame* call_frame);
struct XLA_FFI_Error* xentile_qk_norm_rope_backward_cuda_initialize(
    struct XLA_FFI_CallFrame* call_frame);
struct XLA_FFI_Error* xentile_qk_norm_rope_backward_cuda(
    struct XLA_FFI_CallFrame* call_frame);
struct XLA_FFI_Error* xentile_scale_cuda_initialize(
    struct XLA_FFI_CallFrame* call_frame);
struct XLA_FFI_Error* xentile_scale_cuda(struct XLA_FFI_CallFrame* call_frame);
/* These call cuBLASLt, and have nothing to initialize. */
struct XLA_FFI_Error* xentile_linear_cross_entropy_forward_cuda(
    struct XLA_FFI_CallFrame* call_frame);
struct XLA_FFI_Error* xentile_linear_cross_entropy_backward_cuda(
    struct XLA_FFI_CallFrame* call_frame);
struct XLA_FFI_Error* xentile_linear_cross_entropy_fused_cuda(
    struct XLA_FFI_CallFrame* call_frame);
struct XLA_FFI_Error* xentile_linear_cross_entropy_distribution_fused_cuda(
    struct XLA_FFI_CallFrame* call_frame);
struct XLA_FFI_Error* xentile_linear_cross_entropy_add_cuda(
    struct XLA_FFI_CallFrame* call_frame);

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* XENTILE_XLA_H_ */
