"""Unknown keyword arguments: names that other libraries have are answered with ours."""

import difflib
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

Function = TypeVar("Function", bound=Callable[..., Any])

# The names of other libraries for an argument, by our names. jax.nn, Flax, Equinox, optax, PyTorch,
# FlashAttention, Hugging Face Transformers, Liger Kernel, MaxText and Transformer Engine.
OTHERS = {
    "eps": "epsilon variance_epsilon norm_eps rms_norm_eps layer_norm_eps",
    "epsilon": "eps variance_epsilon norm_eps rms_norm_eps layer_norm_eps",
    "weight": "scale gamma kernel w lin_weight lm_head lm_head_weight head classifier embedding",
    "bias": "beta b attn_bias ab",
    "zero_centred": "zero_centered zero_centered_gamma",
    "x": "input inputs hidden_states gate a",
    "up": "b value",
    "q": "query queries",
    "k": "key keys",
    "v": "value values",
    "query": "q queries",
    "key": "k keys",
    "value": "v values",
    "causal": "is_causal",
    "is_causal": "causal",
    "scale": "softmax_scale sm_scale scaling",
    "softcap": "soft_cap logit_cap logits_soft_cap logit_softcap attn_logits_soft_cap cap "
    "attn_logit_softcapping final_logit_softcap final_logit_softcapping",
    "segment_ids": "segment_id sequence_id document_ids",
    "q_lengths": "query_seq_lengths q_seqlen q_seqlens",
    "kv_lengths": "key_value_seq_lengths kv_seqlen kv_seqlens cache_seqlens seqused_k",
    "query_seq_lengths": "q_lengths q_seqlen q_seqlens",
    "key_value_seq_lengths": "kv_lengths kv_seqlen kv_seqlens cache_seqlens seqused_k",
    "q_cumulative": "cu_seqlens cu_seqlens_q cu_seq_q",
    "kv_cumulative": "cu_seqlens_k cu_seqlens_kv cu_seq_k",
    "g": "gk log_decay decay gate",
    "b": "beta betas",
    "qk_l2_norm": "use_qk_l2norm_in_kernel qk_l2norm l2_norm",
    "initial_state": "initial_states recurrent_state",
    "return_final_state": "output_final_state return_final_states",
    "sinks": "sink s_aux attention_sinks learnable_sink",
    "dropout_rate": "dropout dropout_p attention_dropout",
    "return_lse": "return_residual return_residuals save_residuals return_softmax_lse "
    "return_attn_probs return_z_loss",
    "return_residual": "return_lse return_residuals save_residuals return_softmax_lse",
    "local_window_size": "window window_size",
    "base": "theta rope_theta rope_base freq_base max_wavelength",
    "rotary_dim": "rope_dim head_dim dim",
    "positions": "position_ids position pos input_pos",
    "scaling": "rope_scaling scaling_config",
    "interleaved": "interleave traditional",
    "logits": "input inputs x pred preds predictions",
    "labels": "target targets label",
    "weights": "mask loss_mask where sample_weight sample_weights token_weights",
    "where": "mask weights loss_mask",
    "label_smoothing": "smoothing",
    "z_loss": "z_loss_weight z_loss_multiplier z_loss_coef lse_square_scale logsumexp_weight",
    "ignore_index": "ignore_idx ignored_index ignore_id padding_idx",
    "temperature": "temp tau",
    "reduction": "reduce size_average",
    "hidden": "x input inputs _input hidden_states embeddings e",
    "vocab_axis": "axis vocab_dim",
    "return_correct": "return_accuracy return_token_accuracy",
    "max_scratch_bytes": "chunk_size num_chunks token_chunk_size vocab_chunk_size",
    "chosen": "chosen_logps policy_chosen_logps",
    "rejected": "rejected_logps policy_rejected_logps",
    "ref_chosen": "ref_chosen_logps reference_chosen_logps",
    "ref_rejected": "ref_rejected_logps reference_rejected_logps",
    "logps": "log_probs logprobs per_token_logps",
    "old_logps": "old_log_probs old_logprobs old_per_token_logps",
    "ref_logps": "ref_log_probs reference_logps ref_per_token_logps",
    "mask": "loss_mask completion_mask response_mask",
    "clip": "epsilon clip_eps eps_clip clip_range cliprange",
    "beta": "kl_coef kl_coeff kl_beta",
    "entropy_weight": "ent_coef entropy_coef entropy_coeff",
    "dtype": "fp8_dtype fp8_format q_dtype quant_dtype format",
    "power_of_two": "pow_2_scales force_pow_2_scales round_scale use_ue8m0",
    "transposed": "columnwise return_transpose",
    "block_size": "block group_size",
    "prompts": "input_ids prompt prompt_token_ids",
    "max_new_tokens": "max_tokens max_length max_decode_len",
    "seeds": "seed rng generator",
    "stop_tokens": "eos_token_id stop_token_ids eos_id",
    "on_tokens": "streamer callback",
    "tokens": "input_ids token_ids",
    "learning_rate": "lr alpha step_size",
    "b1": "beta1 betas",
    "b2": "beta2",
    "weight_decay": "wd decoupled_weight_decay",
    "max_norm": "max_grad_norm clip_norm grad_clip_norm gradient_clip_val",
    "ns_steps": "backend_steps newton_schulz_steps",
}
_MASK_OBJECTS = {
    **dict.fromkeys(("attn_mask", "attention_mask"), "did you mean mask?"),
    "sliding_window": "write local_window_size=(sliding_window - 1, 0)",
    "segment_ids": "write mask=nn.SegmentMask(segment_ids)",
    "softcap": "pallas_bridge.flash_attention has softcap",
}
_ANY_MASK = (
    "a mask is causal, window, segment_ids, q_lengths or kv_lengths here, and "
    "pallas_bridge.nn.dot_product_attention takes mask"
)
_FLASH = {
    **dict.fromkeys(("mask", "attn_mask", "attention_mask"), _ANY_MASK),
    **dict.fromkeys(
        ("window_size", "local_window_size"),
        "did you mean window? It is (left, right) as well, and None, not -1, is all of a side",
    ),
    "sliding_window": "write window=(sliding_window - 1, 0): a query's own key is none of left",
    "enable_gqa": "leave it out: heads that share keys follow from the shapes of q and k",
    "deterministic": "leave it out: sums always have a fixed order",
}
# What to write where no argument of ours stands for the name, by functions.
ADVICE = {
    "flash_attention": _FLASH,
    "ring_attention": _FLASH,
    "dot_product_attention": _MASK_OBJECTS,
    "explain_attention": _MASK_OBJECTS,
    "rope": dict.fromkeys(("cos", "sin"), "write tables=(cos, sin)"),
    "qk_norm_rope": dict.fromkeys(("cos", "sin"), "write tables=(cos, sin)"),
}


def hint(function: str, name: str, ours: list[str]) -> str:
    """Returns what to write for a keyword `name` that `function`, with arguments `ours`, lacks."""
    advice = ADVICE.get(function, {}).get(name)
    if advice is not None:
        return advice
    for one in ours:
        if name in OTHERS.get(one, "").split():
            return f"did you mean {one}?"
    near = difflib.get_close_matches(name, ours, n=1)
    return f"did you mean {near[0]}?" if near else f"it takes {', '.join(ours)}"


def hinted(function: Function) -> Function:
    """Has a function answer an unknown keyword with the name that it has for it.

    `help` and `inspect.signature` show the function's own signature.
    """
    return hinted_with()(function)


def hinted_with(*others: Callable[..., Any]) -> Callable[[Function], Function]:
    """Returns `hinted` of a function whose `**keywords` are the keyword arguments of `others`.

    `help` and `inspect.signature` show these in the place of `**keywords`.
    """

    def decorate(function: Function) -> Function:
        signature = _with_keywords_of(inspect.signature(function), others)
        kinds = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
        ours = [name for name, one in signature.parameters.items() if one.kind in kinds]
        known = frozenset(ours)

        @functools.wraps(function)
        def call(*arguments: Any, **keywords: Any) -> Any:
            if not known.issuperset(keywords):
                unknown = next(name for name in keywords if name not in known)
                raise TypeError(
                    f"{function.__name__}() got an unexpected keyword argument {unknown!r}; "
                    f"{hint(function.__name__, unknown, ours)}"
                )
            return function(*arguments, **keywords)

        vars(call)["__signature__"] = signature
        return cast("Function", call)

    return decorate


def _with_keywords_of(
    signature: inspect.Signature, others: Sequence[Callable[..., Any]]
) -> inspect.Signature:
    """Returns a signature with the keyword arguments of `others` in the place of `**keywords`.

    Where two have one of a name, it is that of the last.
    """
    ours = [one for one in signature.parameters.values() if one.kind is not one.VAR_KEYWORD]
    more = {
        name: one
        for other in others
        for name, one in inspect.signature(other).parameters.items()
        if one.kind is one.KEYWORD_ONLY and name not in signature.parameters
    }
    return signature.replace(parameters=[*ours, *more.values()])
