"""The dimensions and options of a decoder."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..checks import check_flag, check_float32, check_integer
from ..rope.options import check_base, check_scaling
from ..rope.scaling import LinearScaling, Llama3Scaling, Scaling, YarnScaling

# Values of `model_type` in config.json.
MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")


@dataclass(frozen=True)
class DecoderConfig:
    """A decoder-only transformer: RMSNorm, RoPE, grouped-query attention, SwiGLU, pre-norm.

    Args:
      layers: the number of layers, L.
      hidden_size: columns of hidden states, D.
      heads: query heads of a layer, H.
      kv_heads: heads of keys and values of a layer, K, a divisor of `heads`.
      head_dim: columns of a head, a multiple of 8 up to 256.
      mlp_size: columns inside the MLP, F.
      vocab_size: rows of the embedding, V.
      qk_norm: whether each head of queries and keys is normalised before RoPE (Qwen 3).
      qkv_bias: whether queries, keys and values have biases (Qwen 2.5).
      tied_head: whether the embedding is the output matrix too.
      rope_base: RoPE's base, `rope_theta` of Hugging Face.
      rope_scaling: `LinearScaling`, `Llama3Scaling`, `YarnScaling`, `NtkScaling`, or None.
      eps: epsilon of every norm.
      window: the most keys that a query sees, its own included, as Hugging Face's
        `sliding_window`; None for all.

    Raises:
      TypeError: a field of the wrong type.
      ValueError: a field outside its range.
    """

    layers: int
    hidden_size: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp_size: int
    vocab_size: int
    qk_norm: bool = False
    qkv_bias: bool = False
    tied_head: bool = False
    rope_base: float = 10000.0
    rope_scaling: Scaling | None = None
    eps: float = 1e-6
    window: int | None = None

    def __post_init__(self) -> None:
        """Checks the fields."""
        for name in ("layers", "hidden_size", "kv_heads", "mlp_size", "vocab_size"):
            check_integer(name, getattr(self, name), 1)
        check_integer("heads", self.heads, self.kv_heads)
        check_integer("head_dim", self.head_dim, 8)
        if self.window is not None:
            check_integer("window", self.window, 1)
        for name, divisor in (("heads", self.kv_heads), ("head_dim", 8)):
            if getattr(self, name) % divisor:
                raise ValueError(
                    f"{name} is {getattr(self, name)}; it must be a multiple of {divisor}"
                )
        if self.head_dim > 256:
            raise ValueError(f"head_dim is {self.head_dim}; it must be at most 256")
        for name in ("qk_norm", "qkv_bias", "tied_head"):
            check_flag(name, getattr(self, name))
        check_float32("eps", self.eps, is_positive=True)
        check_base(self.rope_base)
        check_scaling(self.rope_scaling)

    @classmethod
    def from_hugging_face(cls, config: Mapping[str, Any]) -> "DecoderConfig":
        """Returns the config of a checkpoint of Llama, Mistral, Qwen 2, Qwen 2.5 or Qwen 3.

        Args:
          config: the object in the checkpoint's config.json.

        Raises:
          ValueError: an architecture, an activation or another option that is not covered, or a
            key that is missing.
        """
        kind = config.get("model_type")
        if kind not in MODEL_TYPES:
            raise ValueError(f"model_type is {kind!r}; it must be one of {', '.join(MODEL_TYPES)}")
        for name, right in (
            ("hidden_act", "silu"),
            ("attention_bias", False),
            ("mlp_bias", False),
            ("partial_rotary_factor", 1.0),
            ("quantization_config", None),
        ):
            if config.get(name, right) != right:
                raise ValueError(f"{name} is {config[name]!r}; no value but {right!r} is supported")
        heads, hidden_size = (
            check_integer(name, _required(config, name), 1)
            for name in ("num_attention_heads", "hidden_size")
        )
        head_dim = config.get("head_dim") or (128 if kind == "qwen3" else hidden_size // heads)
        rope = _rope_parameters(config)
        return cls(
            layers=_required(config, "num_hidden_layers"),
            hidden_size=hidden_size,
            heads=heads,
            kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=head_dim,
            mlp_size=_required(config, "intermediate_size"),
            vocab_size=_required(config, "vocab_size"),
            qk_norm=kind == "qwen3",
            qkv_bias=kind == "qwen2",
            tied_head=config.get("tie_word_embeddings", False),
            rope_base=rope.get("rope_theta", 10000.0),
            rope_scaling=_scaling(rope, config),
            eps=config.get("rms_norm_eps", 1e-6),
            window=_window(kind, config),
        )


def check_config(config: Any) -> None:
    """Checks that there is a config.

    Raises:
        TypeError: it is something else.
    """
    if not isinstance(config, DecoderConfig):
        raise TypeError(f"config is of type {type(config).__name__}; it must be a DecoderConfig")


def _required(config: Mapping[str, Any], name: str) -> Any:
    if config.get(name) is None:
        raise ValueError(f"config lacks {name}; config.json of {config['model_type']} must have it")
    return config[name]


def _rope_parameters(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns `rope_theta`, `rope_type` and its parameters, from either form of config.json.

    Transformers 5 writes `rope_parameters`; earlier releases `rope_theta` and `rope_scaling`.
    """
    found = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    if "rope_theta" in config:
        found.setdefault("rope_theta", config["rope_theta"])
    # The name until release 4.43.
    found.setdefault("rope_type", found.pop("type", "default"))
    return found


def _scaling(rope: Mapping[str, Any], config: Mapping[str, Any]) -> Scaling | None:
    kind = rope["rope_type"]
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError(
            f"partial_rotary_factor is {rope['partial_rotary_factor']!r}; no value but 1.0 is "
            "supported"
        )
    if kind == "default":
        return None
    original = rope.get("original_max_position_embeddings", config.get("max_position_embeddings"))
    try:
        if kind == "linear":
            return LinearScaling(rope["factor"])
        if kind == "llama3":
            return Llama3Scaling(
                rope["factor"], rope["low_freq_factor"], rope["high_freq_factor"], original
            )
        if kind == "yarn" and not {"mscale", "mscale_all_dim"} & rope.keys():
            given = ("beta_fast", "beta_slow", "attention_factor", "truncate")
            options = {name: rope[name] for name in given if rope.get(name) is not None}
            return YarnScaling(rope["factor"], original, **options)
    except KeyError as error:
        raise ValueError(f"RoPE's parameters lack {error.args[0]}; {kind} must have it") from None
    raise ValueError(
        f"rope_type is {kind!r}; it must be default, linear, llama3 or yarn without mscale"
    )


def _window(kind: str, config: Mapping[str, Any]) -> int | None:
    """Returns the sliding window, which all layers must have in common."""
    if kind == "llama":
        return None
    layers = config["num_hidden_layers"]
    size: int | None = config.get("sliding_window", 4096)
    if kind == "mistral" or size is None:
        return size
    if not config.get("use_sliding_window", False):
        return None
    types = config.get("layer_types")
    if types is None:
        full = min(config.get("max_window_layers", 28), layers)
    else:
        full = list(types).count("full_attention")
    if 0 < full < layers:
        raise ValueError(
            f"{full} of {layers} layers have full attention and the others a window of {size}; "
            "all layers must have the same"
        )
    return size if full == 0 else None
