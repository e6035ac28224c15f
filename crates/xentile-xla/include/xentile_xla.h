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
 * docs/reference/targets.md says what every target takes and gives. All functions may be called from any
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

/* What every target takes and gives, as a JSON text, those without a handler in this library too:
 *
 *     {"table_version": 3, "targets": [
 *       {"name": "xentile_rope", "summary": "..",
 *        "handlers": {"Host": ["execute"], "CUDA": ["initialize", "execute"]},
 *        "operands": [{"name": "x", "dims": "*batch S H D", "dtype": ["f32", "bf16", "f16"], "role": "input",
 *                      "given": "always"}, ..],
 *        "results": [{"name": "y", .. "dtype": {"like": "x"}}, ..],
 *        "attributes": [{"name": "inverse", "type": "bool", "range": null, "absent": null,
 *                        "cuda_only": false}, ..], ..}, ..]}
 *
 * crates/xentile-xla/src/declaration.rs documents every key and how dimensions read. */
const char* xentile_declarations(void);

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

/* The plan of a linear cross-entropy's call, as a JSON text: chunks, GEMMs and bytes of scratch. Writes it with
 * its null to the `size` bytes at `answer` if it fits, and returns its length without the null. A request,
 * with extents of hidden [N, D] and the vocabulary V, and bytes of an element:
 *
 *     {"platform": "cuda",
 *      "problem": {"tokens": 8192, "hidden": 2048, "vocab": 128256, "hidden_bytes": 2, "weight_bytes": 2,
 *                  "bias": false, "reduced": true, "vocab_is_last": false, "running": false},
 *      "limits": {"scratch_bytes": 268435456}}
 *
 * For CPUs there is "dtype" ("bf16") beside "platform", and limits have "tile" ([time_block, block_size],
 * each may be null), "xla_products" (GEMMs of the program without the call) and "may_save_logits" (whether a
 * forward pass may save logits for the backward pass) too. The answer is {"plan": {"tokens": .., "columns": ..,
 * "products": .., "scratch_bytes": .., ..}}, {"plan": null} where no plan fits or none is better than XLA's
 * program, or {"error": ".."}. crates/xentile/src/linear_cross_entropy/plan.rs documents every key.
 *
 * With "call": {"pass": "fused", "plan": ..} in the place of "limits" the answer is what the call takes whose
 * target ends with the name of the pass: {"call": {"attributes": [["chunk_tokens", 2048], ..],
 * "scratch_bytes": ..}}. A library plans for every platform, whatever it has handlers for. */
size_t xentile_plan(const char* request, char* answer, size_t size);

/* The handlers: those whose names end with _host are for CPUs, the others for NVIDIA GPUs, which libraries built
 * with CUDA have. Such a library loads on any machine; where a driver or a GPU is missing, the call says so. Where
 * a target has two handlers for GPUs, _cuda_initialize loads what _cuda launches.
 * docs/reference/targets.md says what each takes and gives. */
/* From here on made by tests/declarations.rs. */

/* xentile_activation_forward: y of x, which packs gate and up where the layout is not single.
 * (x) -> (y). */
struct XLA_FFI_Error* xentile_activation_forward_host(struct XLA_FFI_CallFrame* call_frame);
struct XLA_FFI_Error* xentile_activation_forward_cuda_initialize(
    struct XLA_FFI_CallFrame* call_frame);
struct XLA_FFI_Error* xentile_activation_forward_cuda(struct XLA_FFI_CallFrame* call_frame);

/* xentile_activation_backward: dx, from x and the cotangent of y. (x, dy) -> (dx). */
struct XLA_FFI_Error* xentile_activation_backward_host(struct XLA_FFI_CallFrame* call_frame);
struct XLA_FFI_Error* xentile_activation_backward_cuda_initialize(
    struct XLA_FFI_CallFrame* call_frame);
struct XLA_FFI_Error* xentile_activation_backward_cuda(struct XLA_FFI_CallFrame* call_frame);

/* xentile_activation_backward_with_y: dx, and y as forward gives it, for a product's gradient
 * that reads y: y need not be kept. (x, dy) -> (dx, y). */
struct XLA_FFI_Error* xentile_activation_backward_with_y_host(struct XLA_FFI_CallFrame* call_frame);
struct XLA_FFI_Error* xentile_activation_backward_with_y_cuda_initialize(
    struct XLA_FFI_CallFrame* call_frame);
struct XLA_FFI_Error* xentile_activation_backward_with_y_cuda(struct XLA_FFI_CallFrame* call_frame);

/* xentile_causal_conv1d_forward: The causal depthwise convolution of sequences along T, and SiLU
 * of it on request. (x, weight, bias, initial_state, segment_ids) -> (y). */
struct XLA_FFI_Error* xentile_causal_conv1d_forward_host(struct XLA_FFI_CallFrame* call_frame);
struct XLA_FFI_Error* xentile_causal_conv1d_forward_cuda_initialize(
    struct XLA_FFI_CallFrame* call_frame);
struct XLA_FFI_Error* xentile_causal_conv1d_forward_cuda(struct XLA_FFI_CallFrame* call_frame);

/* xentile_causal_conv1d_backward: dx, the gradient of the initial state, and sums over blocks of
 * tokens of dweight and dbias. (x, weight, bias, initial_state, segment_ids, dy) -> (dx,
 * dweight, dbias, dinitial_state). */
struct XLA_FFI_Error* xentile_causal_conv1d_backward_host(struct XLA_FFI_CallFrame* call_frame);
struct XLA_FFI_Error* xentile_causal_conv1d_backward_cuda_initialize(
    struct XLA_FFI_CallFrame* call_frame);
struct XLA_FFI_Error* xentile_causal_conv1d_backward_cuda(struct XLA_FFI_CallFrame* call_frame);

/* xentile_cross_entropy_forward: loss, logps, lse and lse_low of each token. (logits, labels) ->
 * (loss, logps, lse, lse_low). */
struct XLA_FFI_Error* xentile_cross_entropy_forward_host(struct XLA_FFI_CallFrame* call_frame);
struct XLA_FFI_Error* xentile_cross_entropy_forward_cuda_initialize(
    struct XLA_FFI_CallFrame* call_frame);
struct XLA_FFI_Error* xentile_cross_entropy_forward_cuda(struct XLA_FFI_CallFrame* call_frame);

/* xentile_cross_entropy_backward: dlogits, from the lse that forward gave and the cotangents of
 * what it gave. (logits, labels, lse, lse_low, dloss, dlogps, dlse) -> (dlogits). */
struct XLA_FFI_Error* xentile_cross_entropy_backward_host(struct XLA_FFI_CallFrame* call_frame);
struct XLA_FFI_Error* xentile_cross_entropy_backward_cuda_initialize(
    struct XLA_FFI_CallFrame* call_frame);
struct XLA_FFI_Error* xentile_cross_entropy_backward_cuda(struct XLA_FFI_CallFrame* call_frame);

/* xentile_cross_entropy_fused: loss, lse, lse_low and dlogits, from the cotangents of the loss.
 * (logits, labels, dloss) -> (loss, lse, lse_low, dlogits). */
struct XLA_FFI_Error* xentile_cross_entropy_fused_host(struct XLA_FFI_CallFrame* call_frame);
struct XLA_FFI_Error* xentile_cross_entropy_fused_cuda_initialize(
    struct XLA_FFI_CallFrame* call_frame);
struct XLA_FFI_Error* xentile_cross_entropy_fused_cuda(struct XLA_FFI_CallFrame* call_frame);

/* xentile_cross_entropy_distribution: What forward gives, and entropy, highest and argmax of
 * each token. (logits, labels) -> (loss, logps, lse, lse_low, entropy, highest, argmax). */
struct XLA_FFI_Error* xentile_cross_entropy_distribution_host(struct XLA_FFI_CallFrame* call_frame);
struct XLA_FFI_Error* xentile_cross_entropy_distribution_cuda_initialize(
    struct XLA_FFI_CallFrame* call_frame);
struct XLA_FFI_Error* xentile_cross_entropy_distribution_cuda(struct XLA_FFI_CallFrame* call_frame);

/* xentile_cross_entropy_distribution_fused: What distribution gives but logps, and dlogits, from
 * the cotangents of the loss. (logits, labels, dloss) -> (loss, lse, lse_low, entropy, highest,
 * argmax, dlogits). */
struct XLA_FFI_Error* xentile_cross_entropy_distribution_fused_host(
    struct XLA_FFI_CallFrame* call_frame);
struct XLA_FFI_Error* xentile_cross_entropy_distribution_fused_cuda_initialize(
    struct XLA_FFI_CallFrame* call_frame);
struct XLA_FFI_Error* xentile_cross_entropy_distribution_fused_cuda(
    struct XLA_FFI_CallFrame* call_frame);

/* xentile_cross_entropy_distribution_backward: dlogits, from lse and entropy of distribution and
 * the cotangents of what it gave. (logits, labels, lse, lse_low, entropy, dloss, dlogps, dlse,
 * dentropy) -> (dlogits). */
struct XLA_FFI_Error* xentile_cross_entropy_distribution_backward_host(
    struct XLA_FFI_CallFrame* call_frame);
struct XLA_FFI_Error* xentile_cross_entropy_distribution_backward_cuda_initialize(
    struct XLA_FFI_CallFrame* call_frame);
struct XLA_FFI_Error* xentile_cross_entropy_distribution_backward_cuda(
    struct XLA_FFI_CallFrame* call_frame);

/* xentile_decode_step: Logits after one token of each sequence of a decoder, the most probable
 * next token and its log-probability. The cache is updated in place. `state` is zeros before the
 * first call. (packed, embedding, attention_norm, qkv_bias, q_norm, k_norm, mlp_norm, norm,
 * cosines, sines, token, position, keys, values, state) -> (logits, next_token, next_logp,
 * new_keys, new_values, new_state). */
struct XLA_FFI_Error* xentile_decode_step_cuda_initialize(struct XLA_FFI_CallFrame* call_frame);
struct XLA_FFI_Error* xentile_decode_step_cuda(struct XLA_FFI_CallFrame* call_frame);

/* xentile_flash_attention_forward: o and lse of attention over the keys that each query sees.
 * (q, k, v, ranges, q_segments, kv_segments, sinks) -> (o, lse). */
struct XLA_FFI_Error* xentile_flash_attention_forward_host(struct XLA_FFI_CallFrame* call_frame);
struct XLA_FFI_Error* xentile_flash_attention_forward_cuda_initialize(
    struct XLA_FFI_CallFrame* call_frame);
struct XLA_FFI_Error* xentile_flash_attention_forward_cuda(struct XLA_FFI_CallFrame* call_frame);

/* xentile_flash_attention_backward: dq, dk, dv and dsinks, from what forward gave and the
 * cotangents of that. (q, k, v, ranges, q_segments, kv_segments, sinks, o, lse, dout, dlse) ->
 * (dq, dk, dv, dsinks, scratch). */
struct XLA_FFI_Error* xentile_flash_attention_backward_host(struct XLA_FFI_CallFrame* call_frame);
struct XLA_FFI_Error* xentile_flash_attention_backward_cuda_initialize(
    struct XLA_FFI_CallFrame* call_frame);
struct XLA_FFI_Error* xentile_flash_attention_backward_cuda(struct XLA_FFI_CallFrame* call_frame);

/* xentile_flash_attention_decode: What forward gives, for few queries: chunks of keys are shared
 * out over the GPU and merged. (q, k, v, ranges, sinks) -> (o, lse, partials, partial_lse). */
struct XLA_FFI_Error* xentile_flash_attention_decode_cuda_initialize(
    struct XLA_FFI_CallFrame* call_frame);
struct XLA_FFI_Error* xentile_flash_attention_decode_cuda(struct XLA_FFI_CallFrame* call_frame);

/* xentile_flash_attention_paged: What decode gives, of keys and values in pages of a pool, of
 * which block_tables names those of each of B texts. `*batch` is the heads of keys, which lie
 * behind B, P and S in memory. (q, k_pages, v_pages, block_tables, ranges, sinks) -> (o, lse,
 * partials, partial_lse). */
struct XLA_FFI_Error* xentile_flash_attention_paged_cuda_initialize(
    struct XLA_FFI_CallFrame* call_frame);
struct XLA_FFI_Error* xentile_flash_attention_paged_cuda(struct XLA_FFI_CallFrame* call_frame);

/* xentile_fp8_quantize: Values, and the scale of each block. (x) -> (values, scales). */
struct XLA_FFI_Error* xentile_fp8_quantize_host(struct XLA_FFI_CallFrame* call_frame);
struct XLA_FFI_Error* xentile_fp8_quantize_cuda_initialize(struct XLA_FFI_CallFrame* call_frame);
struct XLA_FFI_Error* xentile_fp8_quantize_cuda(struct XLA_FFI_CallFrame* call_frame);

/* xentile_fp8_quantize_transposed: Values and scales, and the transposed copy with its own
 * scales. (x) -> (values, scales, values_t, scales_t). */
struct XLA_FFI_Error* xentile_fp8_quantize_transposed_host(struct XLA_FFI_CallFrame* call_frame);
struct XLA_FFI_Error* xentile_fp8_quantize_transposed_cuda_initialize(
    struct XLA_FFI_CallFrame* call_frame);
struct XLA_FFI_Error* xentile_fp8_quantize_transposed_cuda(struct XLA_FFI_CallFrame* call_frame);

/* xentile_fp8_quantize_scaled: Values by a given scale, and amax of each row. (x, scale) ->
 * (values, amax). */
struct XLA_FFI_Error* xentile_fp8_quantize_scaled_host(struct XLA_FFI_CallFrame* call_frame);
struct XLA_FFI_Error* xentile_fp8_quantize_scaled_cuda_initialize(
    struct XLA_FFI_CallFrame* call_frame);
struct XLA_FFI_Error* xentile_fp8_quantize_scaled_cuda(struct XLA_FFI_CallFrame* call_frame);

/* xentile_fp8_quantize_scaled_transposed: Values by a given scale, amax of each row, and the
 * transposed copy. (x, scale) -> (values, amax, values_t). */
struct XLA_FFI_Error* xentile_fp8_quantize_scaled_transposed_host(
    struct XLA_FFI_CallFrame* call_frame);
struct XLA_FFI_Error* xentile_fp8_quantize_scaled_transposed_cuda_initialize(
    struct XLA_FFI_CallFrame* call_frame);
struct XLA_FFI_Error* xentile_fp8_quantize_scaled_transposed_cuda(
    struct XLA_FFI_CallFrame* call_frame);

/* xentile_fp8_quantize_amax: amax of each row. (x) -> (amax). */
struct XLA_FFI_Error* xentile_fp8_quantize_amax_host(struct XLA_FFI_CallFrame* call_frame);
struct XLA_FFI_Error* xentile_fp8_quantize_amax_cuda_initialize(
    struct XLA_FFI_CallFrame* call_frame);
struct XLA_FFI_Error* xentile_fp8_quantize_amax_cuda(struct XLA_FFI_CallFrame* call_frame);

/* xentile_fp8_quantize_swiglu: Values and scales of SwiGLU, by blocks of 128 columns; what packs
 * gate and up is given twice. (x, up) -> (values, scales). */
struct XLA_FFI_Error* xentile_fp8_quantize_swiglu_cuda_initialize(
    struct XLA_FFI_CallFrame* call_frame);
struct XLA_FFI_Error* xentile_fp8_quantize_swiglu_cuda(struct XLA_FFI_CallFrame* call_frame);

/* xentile_fp8_quantize_swiglu_transposed: The same, and the transposed copy with its own scales.
 * (x, up) -> (values, scales, values_t, scales_t). */
struct XLA_FFI_Error* xentile_fp8_quantize_swiglu_transposed_cuda_initialize(
    struct XLA_FFI_CallFrame* call_frame);
struct XLA_FFI_Error* xentile_fp8_quantize_swiglu_transposed_cuda(
    struct XLA_FFI_CallFrame* call_frame);

/* xentile_fp8_quantize_rms_norm: Values and scales of RMSNorm, by blocks of 128 columns, and the
 * rstd of each row. (x, weight) -> (values, scales, rstd). */
struct XLA_FFI_Error* xentile_fp8_quantize_rms_norm_cuda_initialize(
    struct XLA_FFI_CallFrame* call_frame);
struct XLA_FFI_Error* xentile_fp8_quantize_rms_norm_cuda(struct XLA_FFI_CallFrame* call_frame);

/* xentile_fp8_quantize_rms_norm_add: The same of x + residual, which is a result too. (x,
 * residual, weight) -> (values, scales, sum, rstd). */
struct XLA_FFI_Error* xentile_fp8_quantize_rms_norm_add_cuda_initialize(
    struct XLA_FFI_CallFrame* call_frame);
struct XLA_FFI_Error* xentile_fp8_quantize_rms_norm_add_cuda(struct XLA_FFI_CallFrame* call_frame);

/* xentile_fp8_quantize_rms_norm_transposed: Values and scales of RMSNorm, the transposed copy
 * with its own scales, and the rstd of each row. (x, weight) -> (values, scales, values_t,
 * scales_t, rstd). */
struct XLA_FFI_Error* xentile_fp8_quantize_rms_norm_transposed_cuda_initialize(
    struct XLA_FFI_CallFrame* call_frame);
struct XLA_FFI_Error* xentile_fp8_quantize_rms_norm_transposed_cuda(
    struct XLA_FFI_CallFrame* call_frame);

/* xentile_fp8_quantize_rms_norm_add_transposed: The same of x + residual, which is a result too.
 * (x, residual, weight) -> (values, scales, values_t, scales_t, sum, rstd). */
struct XLA_FFI_Error* xentile_fp8_quantize_rms_norm_add_transposed_cuda_initialize(
    struct XLA_FFI_CallFrame* call_frame);
struct XLA_FFI_Error* xentile_fp8_quantize_rms_norm_add_transposed_cuda(
    struct XLA_FFI_CallFrame* call_frame);

/* xentile_kl_divergence: Each row's divergence of softmax(student / temperature) from
 * softmax(teacher / temperature), and in rows of dlogits from `first` on the gradient of factor
 * * loss for student; 0 where the factor is 0. (student, teacher, factor, first, dlogits_so_far)
 * -> (loss, dlogits). */
struct XLA_FFI_Error* xentile_kl_divergence_cuda_initialize(struct XLA_FFI_CallFrame* call_frame);
struct XLA_FFI_Error* xentile_kl_divergence_cuda(struct XLA_FFI_CallFrame* call_frame);

/* xentile_kv_cache_append: The cache with rows of a layer's keys and values, of each sequence
 * from a position on; rows whose position is not in the cache are dropped. (keys, values,
 * new_keys, new_values, layer, position) -> (all_keys, all_values). */
struct XLA_FFI_Error* xentile_kv_cache_append_host(struct XLA_FFI_CallFrame* call_frame);

/* xentile_kv_cache_attention: Attention of one token of each sequence over the first positions
 * of a layer's cache, of which it sees the last ones in a window; 0 where a length is not in
 * 1..=S. (q, keys, values, layer, length) -> (o). */
struct XLA_FFI_Error* xentile_kv_cache_attention_host(struct XLA_FFI_CallFrame* call_frame);

/* xentile_linear: The products of tokens x and the rows of one layer's weight, summed in f32 and
 * rounded once. (x, weight, layer) -> (y). */
struct XLA_FFI_Error* xentile_linear_host(struct XLA_FFI_CallFrame* call_frame);

/* xentile_linear_attention_forward: Linear attention, or with b the gated delta rule, and the
 * state after each group of chunks. (q, k, v, g, b, initial_state) -> (o, states, decays,
 * inverse, values, chunk_states). */
struct XLA_FFI_Error* xentile_linear_attention_forward_host(struct XLA_FFI_CallFrame* call_frame);
struct XLA_FFI_Error* xentile_linear_attention_forward_cuda_initialize(
    struct XLA_FFI_CallFrame* call_frame);
struct XLA_FFI_Error* xentile_linear_attention_forward_cuda(struct XLA_FFI_CallFrame* call_frame);

/* xentile_linear_attention_backward: The gradients of all arguments, from the states that
 * forward gave and the cotangents of o and of the final state. (q, k, v, g, b, initial_state,
 * states, do, dfinal_state) -> (dq, dk, dv, dg, db, dinitial_state, decays, inverse, values,
 * chunk_states, chunk_dstates, dvalues_local, dsolved, group_dstates, exponents, dq_parts,
 * dk_parts). */
struct XLA_FFI_Error* xentile_linear_attention_backward_host(struct XLA_FFI_CallFrame* call_frame);
struct XLA_FFI_Error* xentile_linear_attention_backward_cuda_initialize(
    struct XLA_FFI_CallFrame* call_frame);
struct XLA_FFI_Error* xentile_linear_attention_backward_cuda(struct XLA_FFI_CallFrame* call_frame);

/* xentile_linear_cross_entropy_forward: loss, logps, lse and lse_low of each token. (hidden,
 * weight, labels, bias) -> (loss, logps, lse, lse_low, scratch). */
struct XLA_FFI_Error* xentile_linear_cross_entropy_forward_host(
    struct XLA_FFI_CallFrame* call_frame);
struct XLA_FFI_Error* xentile_linear_cross_entropy_forward_cuda(
    struct XLA_FFI_CallFrame* call_frame);

/* xentile_linear_cross_entropy_backward: dhidden, dweight and dbias, from the lse that forward
 * gave and the cotangents of what it gave. (hidden, weight, labels, lse, lse_low, dloss, dlogps,
 * dlse, bias) -> (dhidden, dweight, scratch, dbias). */
struct XLA_FFI_Error* xentile_linear_cross_entropy_backward_host(
    struct XLA_FFI_CallFrame* call_frame);
struct XLA_FFI_Error* xentile_linear_cross_entropy_backward_cuda(
    struct XLA_FFI_CallFrame* call_frame);

/* xentile_linear_cross_entropy_fused: loss, lse, lse_low, dhidden, dweight and dbias, from the
 * cotangents of the loss. (hidden, weight, labels, dloss, bias) -> (loss, lse, lse_low, dhidden,
 * dweight, scratch, dbias). */
struct XLA_FFI_Error* xentile_linear_cross_entropy_fused_host(struct XLA_FFI_CallFrame* call_frame);
struct XLA_FFI_Error* xentile_linear_cross_entropy_fused_cuda(struct XLA_FFI_CallFrame* call_frame);

/* xentile_linear_cross_entropy_hidden: dhidden, from what fused with leaves_hidden left in its
 * dhidden, which is hidden here, and in its scratch, held. (hidden, weight, labels, held) ->
 * (dhidden). */
struct XLA_FFI_Error* xentile_linear_cross_entropy_hidden_cuda(
    struct XLA_FFI_CallFrame* call_frame);

/* xentile_linear_cross_entropy_distribution_fused: What fused gives, and entropy and argmax of
 * each token: argmax equals the label where the label has the largest logit, and is any other
 * number elsewhere. (hidden, weight, labels, dloss, bias) -> (loss, lse, lse_low, entropy,
 * argmax, dhidden, dweight, scratch, dbias). */
struct XLA_FFI_Error* xentile_linear_cross_entropy_distribution_fused_cuda(
    struct XLA_FFI_CallFrame* call_frame);

/* xentile_linear_cross_entropy_add: What fused gives, with dweight in f32 added to sums, in
 * whose place it lies. (hidden, weight, labels, dloss, sums, bias) -> (loss, lse, lse_low,
 * dhidden, dweight, scratch, dbias). */
struct XLA_FFI_Error* xentile_linear_cross_entropy_add_cuda(struct XLA_FFI_CallFrame* call_frame);

/* xentile_linear_cross_entropy_keep: What forward gives, and logits, in kept and in the scratch.
 * (hidden, weight, labels, bias) -> (loss, logps, lse, lse_low, kept, scratch). */
struct XLA_FFI_Error* xentile_linear_cross_entropy_keep_host(struct XLA_FFI_CallFrame* call_frame);

/* xentile_linear_cross_entropy_resume: What backward gives, from the logits that keep left in
 * kept and in its scratch, held. (hidden, weight, labels, lse, lse_low, dloss, dlogps, dlse,
 * kept, held, bias) -> (dhidden, dweight, scratch, dbias). */
struct XLA_FFI_Error* xentile_linear_cross_entropy_resume_host(
    struct XLA_FFI_CallFrame* call_frame);

/* xentile_layer_norm_forward: The norm of each row, its mean and its rstd. (x, weight, bias) ->
 * (y, mean, rstd). */
struct XLA_FFI_Error* xentile_layer_norm_forward_host(struct XLA_FFI_CallFrame* call_frame);
struct XLA_FFI_Error* xentile_layer_norm_forward_cuda_initialize(
    struct XLA_FFI_CallFrame* call_frame);
struct XLA_FFI_Error* xentile_layer_norm_forward_cuda(struct XLA_FFI_CallFrame* call_frame);

/* xentile_layer_norm_backward: dx, dweight and dbias, from the statistics that forward gave. (x,
 * weight, mean, rstd, dy) -> (dx, dweight, dbias). */
struct XLA_FFI_Error* xentile_layer_norm_backward_host(struct XLA_FFI_CallFrame* call_frame);
struct XLA_FFI_Error* xentile_layer_norm_backward_cuda_initialize(
    struct XLA_FFI_CallFrame* call_frame);
struct XLA_FFI_Error* xentile_layer_norm_backward_cuda(struct XLA_FFI_CallFrame* call_frame);

/* xentile_rms_norm_forward: The norm of each row, and its rstd. (x, weight) -> (y, rstd). */
struct XLA_FFI_Error* xentile_rms_norm_forward_host(struct XLA_FFI_CallFrame* call_frame);
struct XLA_FFI_Error* xentile_rms_norm_forward_cuda_initialize(
    struct XLA_FFI_CallFrame* call_frame);
struct XLA_FFI_Error* xentile_rms_norm_forward_cuda(struct XLA_FFI_CallFrame* call_frame);

/* xentile_rms_norm_add_forward: The norm of each row of x + residual, that sum, and the rstd of
 * its rows. (x, residual, weight) -> (y, sum, rstd). */
struct XLA_FFI_Error* xentile_rms_norm_add_forward_host(struct XLA_FFI_CallFrame* call_frame);
struct XLA_FFI_Error* xentile_rms_norm_add_forward_cuda_initialize(
    struct XLA_FFI_CallFrame* call_frame);
struct XLA_FFI_Error* xentile_rms_norm_add_forward_cuda(struct XLA_FFI_CallFrame* call_frame);

/* xentile_rms_norm_backward: dx and dweight, from the rstd that forward gave. (x, weight, rstd,
 * dy) -> (dx, dweight). */
struct XLA_FFI_Error* xentile_rms_norm_backward_host(struct XLA_FFI_CallFrame* call_frame);
struct XLA_FFI_Error* xentile_rms_norm_backward_cuda_initialize(
    struct XLA_FFI_CallFrame* call_frame);
struct XLA_FFI_Error* xentile_rms_norm_backward_cuda(struct XLA_FFI_CallFrame* call_frame);

/* xentile_rms_norm_add_backward: dx and dweight of a sum x, whose own cotangent is dsum. (x,
 * weight, rstd, dy, dsum) -> (dx, dweight). */
struct XLA_FFI_Error* xentile_rms_norm_add_backward_host(struct XLA_FFI_CallFrame* call_frame);
struct XLA_FFI_Error* xentile_rms_norm_add_backward_cuda_initialize(
    struct XLA_FFI_CallFrame* call_frame);
struct XLA_FFI_Error* xentile_rms_norm_add_backward_cuda(struct XLA_FFI_CallFrame* call_frame);

/* xentile_adamw: A step of AdamW, in place. Words of `leaves`, arrays after it and results are
 * repeated for each parameter. (scalars, leaves, grads, params, mu, nu) -> (new_params, new_mu,
 * new_nu). */
struct XLA_FFI_Error* xentile_adamw_host(struct XLA_FFI_CallFrame* call_frame);

/* xentile_adamw_8bit: The same with moments in 8 bits and a scale for each block of 256, 128 or
 * 64. (scalars, leaves, grads, params, mu, mu_scales, nu, nu_scales) -> (new_params, new_mu,
 * new_mu_scales, new_nu, new_nu_scales). */
struct XLA_FFI_Error* xentile_adamw_8bit_host(struct XLA_FFI_CallFrame* call_frame);
struct XLA_FFI_Error* xentile_adamw_8bit_cuda_initialize(struct XLA_FFI_CallFrame* call_frame);
struct XLA_FFI_Error* xentile_adamw_8bit_cuda(struct XLA_FFI_CallFrame* call_frame);

/* xentile_lion_8bit: A step of Lion, whose arrays are those of AdamW in 8 bits but for `nu`.
 * (scalars, leaves, grads, params, mu, mu_scales) -> (new_params, new_mu, new_mu_scales). */
struct XLA_FFI_Error* xentile_lion_8bit_host(struct XLA_FFI_CallFrame* call_frame);

/* xentile_newton_schulz: c0 I + c1 A + c2 A A, rounded, of which a step of Muon takes the
 * product with X: A, which is in `gram`, is X X', or with axis 1 X' X. R and C are multiples of
 * 8. (x) -> (matrix, gram, sums). */
struct XLA_FFI_Error* xentile_newton_schulz_cuda_initialize(struct XLA_FFI_CallFrame* call_frame);
struct XLA_FFI_Error* xentile_newton_schulz_cuda(struct XLA_FFI_CallFrame* call_frame);

/* xentile_rope: Rows of x, rotated by the rows of the tables that the indices name; NaN where
 * there is no such row. (x, indices, cos, sin) -> (y). */
struct XLA_FFI_Error* xentile_rope_host(struct XLA_FFI_CallFrame* call_frame);
struct XLA_FFI_Error* xentile_rope_cuda_initialize(struct XLA_FFI_CallFrame* call_frame);
struct XLA_FFI_Error* xentile_rope_cuda(struct XLA_FFI_CallFrame* call_frame);

/* xentile_qk_norm_rope_forward: Heads of q and k, normalised and rotated, and the rstd of each.
 * (q, k, q_weight, k_weight, indices, cos, sin) -> (q_rotated, k_rotated, q_rstd, k_rstd). */
struct XLA_FFI_Error* xentile_qk_norm_rope_forward_cuda_initialize(
    struct XLA_FFI_CallFrame* call_frame);
struct XLA_FFI_Error* xentile_qk_norm_rope_forward_cuda(struct XLA_FFI_CallFrame* call_frame);

/* xentile_qk_norm_rope_backward: dq, dk and the gradients of the weights, from the rstd that
 * forward gave. (q, k, q_weight, k_weight, q_rstd, k_rstd, indices, cos, sin, q_cotangent,
 * k_cotangent) -> (dq, dk, dq_weight, dk_weight). */
struct XLA_FFI_Error* xentile_qk_norm_rope_backward_cuda_initialize(
    struct XLA_FFI_CallFrame* call_frame);
struct XLA_FFI_Error* xentile_qk_norm_rope_backward_cuda(struct XLA_FFI_CallFrame* call_frame);

/* xentile_sample: Tokens drawn from logits by `options`: temperature, top_k (infinite for none),
 * top_p (1 for none) and min_p (0 for none); and their log-probabilities at the temperature.
 * `key` has the bits of a key of threefry2x32, of which each step + start has its own noise.
 * (logits, key, step, start, options) -> (token, logp, bounds). */
struct XLA_FFI_Error* xentile_sample_cuda_initialize(struct XLA_FFI_CallFrame* call_frame);
struct XLA_FFI_Error* xentile_sample_cuda(struct XLA_FFI_CallFrame* call_frame);

/* xentile_scale: x times the factor of each token; nothing is touched in place where every
 * factor is 1. (x, factor) -> (scaled). */
struct XLA_FFI_Error* xentile_scale_host(struct XLA_FFI_CallFrame* call_frame);
struct XLA_FFI_Error* xentile_scale_cuda_initialize(struct XLA_FFI_CallFrame* call_frame);
struct XLA_FFI_Error* xentile_scale_cuda(struct XLA_FFI_CallFrame* call_frame);

/* To here. */

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* XENTILE_XLA_H_ */
