"""The manifest: every parameter of a model, by canonical name.

Both twins hold exactly these parameters, the trainers initialise, decay and save by it. Canonical names are Hugging
Face's, with a layer's routed experts stacked in canonical order; multi-token prediction depth k is layer
`num_hidden_layers + k` and shares embedding and head with the main model.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Literal

from shared_ops.config import ModelConfig

CORRECTION_BIAS = "e_score_correction_bias"


@dataclass(frozen=True)
class Parameter:
    """One parameter. `axes` names each dimension for sharding; `dtype` "float32" survives every cast."""

    name: str
    shape: tuple[int, ...]
    axes: tuple[str, ...]
    init: Literal["normal", "ones", "zeros"] = "normal"
    dtype: Literal["weights", "float32"] = "weights"
    trainable: bool = True

    @property
    def size(self) -> int:
        return prod(self.shape)

    @property
    def decay(self) -> bool:
        """Weight decay applies to trained matrices only, never to norms and biases."""
        return self.trainable and len(self.shape) > 1

    @property
    def stacked_experts(self) -> bool:
        """Whether dimension 0 runs over routed experts, held in slot order by a twin and canonical on disk."""
        return self.axes[0] == "experts"


def manifest(config: ModelConfig) -> tuple[Parameter, ...]:
    """All parameters of `config`, in the order of the data."""
    return tuple(_parameters(config))


def parameter_count(config: ModelConfig, with_mtp: bool = True) -> int:
    """Number of trained values; without MTP it is the count that papers publish."""
    first_mtp = config.num_hidden_layers
    return sum(
        p.size for p in manifest(config) if p.trainable and (with_mtp or (layer_of(p.name) or 0) < first_mtp)
    )


def layer_of(name: str) -> int | None:
    """The layer index in a canonical name, None outside the layers."""
    parts = name.split(".")
    return int(parts[2]) if parts[:2] == ["model", "layers"] else None


def _parameters(c: ModelConfig) -> Iterator[Parameter]:
    yield Parameter("model.embed_tokens.weight", (c.vocab_size, c.hidden_size), ("vocab", "hidden"))
    for layer in range(c.num_hidden_layers + c.num_nextn_predict_layers):
        prefix = f"model.layers.{layer}."
        if layer >= c.num_hidden_layers:
            yield _norm(prefix + "enorm", c.hidden_size)
            yield _norm(prefix + "hnorm", c.hidden_size)
            yield _linear(prefix + "eh_proj", (c.hidden_size, "hidden"), (2 * c.hidden_size, "hidden_pair"))
        yield _norm(prefix + "input_layernorm", c.hidden_size)
        yield from _attention(c, prefix + "self_attn.")
        yield _norm(prefix + "post_attention_layernorm", c.hidden_size)
        if c.is_moe_layer(layer):
            yield from _moe(c, prefix + "mlp.")
        else:
            yield from _mlp(prefix + "mlp.", c.hidden_size, c.intermediate_size)
        if layer >= c.num_hidden_layers:
            yield _norm(prefix + "shared_head.norm", c.hidden_size)
    yield _norm("model.norm", c.hidden_size)
    if not c.tie_word_embeddings:
        yield _linear("lm_head", (c.vocab_size, "vocab"), (c.hidden_size, "hidden"))


def _attention(c: ModelConfig, prefix: str) -> Iterator[Parameter]:
    hidden, queries = (c.hidden_size, "hidden"), (c.num_attention_heads * c.qk_head_dim, "heads")
    if c.q_lora_rank is None:
        yield _linear(prefix + "q_proj", queries, hidden)
    else:
        yield _linear(prefix + "q_a_proj", (c.q_lora_rank, "q_lora"), hidden)
        yield _norm(prefix + "q_a_layernorm", c.q_lora_rank, "q_lora")
        yield _linear(prefix + "q_b_proj", queries, (c.q_lora_rank, "q_lora"))
    yield _linear(prefix + "kv_a_proj_with_mqa", (c.kv_lora_rank + c.qk_rope_head_dim, "kv_lora_rope"), hidden)
    yield _norm(prefix + "kv_a_layernorm", c.kv_lora_rank, "kv_lora")
    keys_values = (c.num_attention_heads * (c.qk_nope_head_dim + c.v_head_dim), "heads")
    yield _linear(prefix + "kv_b_proj", keys_values, (c.kv_lora_rank, "kv_lora"))
    yield _linear(prefix + "o_proj", hidden, (c.num_attention_heads * c.v_head_dim, "heads"))


def _moe(c: ModelConfig, prefix: str) -> Iterator[Parameter]:
    experts, hidden, width = c.n_routed_experts, c.hidden_size, c.moe_intermediate_size
    yield _linear(prefix + "gate", (experts, "router"), (hidden, "hidden"))
    if c.has_correction_bias:
        name = prefix + "gate." + CORRECTION_BIAS
        yield Parameter(name, (experts,), ("router",), init="zeros", dtype="float32", trainable=False)
    axes = ("experts", "gate_up", "hidden")
    yield Parameter(prefix + "experts.gate_up_proj", (experts, 2 * width, hidden), axes)
    yield Parameter(prefix + "experts.down_proj", (experts, hidden, width), ("experts", "hidden", "expert_width"))
    if c.n_shared_experts:
        yield from _mlp(prefix + "shared_experts.", hidden, c.n_shared_experts * width)


def _mlp(prefix: str, hidden: int, width: int) -> Iterator[Parameter]:
    yield _linear(prefix + "gate_proj", (width, "width"), (hidden, "hidden"))
    yield _linear(prefix + "up_proj", (width, "width"), (hidden, "hidden"))
    yield _linear(prefix + "down_proj", (hidden, "hidden"), (width, "width"))


def _linear(name: str, rows: tuple[int, str], columns: tuple[int, str]) -> Parameter:
    return Parameter(name + ".weight", (rows[0], columns[0]), (rows[1], columns[1]))


def _norm(name: str, size: int, axis: str = "hidden") -> Parameter:
    return Parameter(name + ".weight", (size,), (axis,), init="ones")
