"""Multi-head latent attention (arXiv 2405.04434, section 2.1)."""

import mindspore as ms
from mindspore import nn

from ms_train import ops
from ms_train.linear import Linear
from ms_train.norm import RMSNorm
from shared_ops import rope
from shared_ops.config import ModelConfig


class MultiHeadLatentAttention(nn.Cell):
    """x [T, D] -> [T, D]. Keys and values come from one latent of kv_lora_rank and one shared rotary head."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        c = config
        self.n_heads, self.kv_lora_rank = c.num_attention_heads, c.kv_lora_rank
        self.nope, self.rope, self.value = c.qk_nope_head_dim, c.qk_rope_head_dim, c.v_head_dim
        self.has_query_latent = c.q_lora_rank is not None
        if self.has_query_latent:
            self.q_a_proj = Linear(c.hidden_size, c.q_lora_rank)
            self.q_a_layernorm = RMSNorm(c.q_lora_rank, c.rms_norm_eps)
            self.q_b_proj = Linear(c.q_lora_rank, self.n_heads * c.qk_head_dim)
        else:
            self.q_proj = Linear(c.hidden_size, self.n_heads * c.qk_head_dim)
        self.kv_a_proj_with_mqa = Linear(c.hidden_size, c.kv_lora_rank + self.rope)
        self.kv_a_layernorm = RMSNorm(c.kv_lora_rank, c.rms_norm_eps)
        self.kv_b_proj = Linear(c.kv_lora_rank, self.n_heads * (self.nope + self.value))
        self.o_proj = Linear(self.n_heads * self.value, c.hidden_size)
        self.rotary = ops.Rotary()
        self.attention = ops.Attention(rope.softmax_scale(c), c.sliding_window)
        self.concat = ms.ops.Concat(-1)
        self.broadcast = ms.ops.BroadcastTo((-1, -1, self.n_heads, -1))

    def construct(self, x_TD, cos, sin, visible):
        batch, length = cos.shape[:2]
        if self.has_query_latent:
            q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x_TD)))
        else:
            q = self.q_proj(x_TD)
        q = q.reshape(batch, length, self.n_heads, self.nope + self.rope)
        q_nope, q_rope = q[..., : self.nope], q[..., self.nope :]
        latent_rope = self.kv_a_proj_with_mqa(x_TD)
        latent, k_rope = latent_rope[:, : self.kv_lora_rank], latent_rope[:, self.kv_lora_rank :]
        kv = self.kv_b_proj(self.kv_a_layernorm(latent))
        kv = kv.reshape(batch, length, self.n_heads, self.nope + self.value)
        k_nope, v = kv[..., : self.nope], kv[..., self.nope :]
        k_rope = self.rotary(k_rope.reshape(batch, length, 1, self.rope), cos, sin)
        q = self.concat((q_nope, self.rotary(q_rope, cos, sin)))
        k = self.concat((k_nope, self.broadcast(k_rope)))
        out = self.attention(q, k, v, visible)
        return self.o_proj(out.reshape(batch * length, self.n_heads * self.value))
