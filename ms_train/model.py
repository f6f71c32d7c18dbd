"""The whole model: embedding, decoder layers, multi-token prediction, norm, head and the sums of its losses.

Shapes: B rows, S sequence, T = B S tokens, D hidden, V vocabulary, E experts, L layers with routed experts,
K = 1 + multi-token prediction depths (depth 0 is the main model).
"""

import mindspore as ms
from mindspore import Tensor, nn

from ms_train import ops
from ms_train.block import DecoderLayer
from ms_train.linear import Embedding, Linear
from ms_train.mtp import MultiTokenPredictor
from ms_train.norm import RMSNorm
from ms_train.rope import RotaryTable
from shared_ops.config import ModelConfig
from shared_ops.expert_table import placement_of


class DeepseekModel(nn.Cell):
    """Embedding, decoder layers (multi-token prediction layers last) and the final norm."""

    def __init__(self, config: ModelConfig, length: int, dtype):
        super().__init__()
        placement = placement_of(config)
        self.n_layers = config.num_hidden_layers
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, dtype)
        self.rotary_table = RotaryTable(config, length)
        self.layers = nn.CellList(
            [DecoderLayer(config, placement, i) for i in range(self.n_layers)]
            + [
                MultiTokenPredictor(config, placement, self.n_layers + k)
                for k in range(config.num_nextn_predict_layers)
            ]
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)


class DeepseekForCausalLM(nn.Cell):
    """A DeepSeek-V2 or V3 language model for sequences up to `length`, computing in `dtype` (parameters are fp32)."""

    def __init__(self, config: ModelConfig, length: int, dtype=ms.float32):
        super().__init__()
        self.config = config
        self.tied = config.tie_word_embeddings
        self.n_experts = config.n_routed_experts
        self.depths = config.num_nextn_predict_layers
        self.model = DeepseekModel(config, length, dtype)
        if not self.tied:
            self.lm_head = Linear(config.hidden_size, config.vocab_size)
        self.cross_entropy = ops.CrossEntropySum()
        self.linear = ops.Linear()
        self.stack = ms.ops.Stack(0)

    def construct(self, input_ids_KBS, labels_KBS, router_mask_KBS, position_ids_BS, segment_ids_BS):
        """The sums of every loss over the given rows (see `shared_ops.batch.Batch` for the inputs)."""
        main = self.model
        context = self.context(position_ids_BS, segment_ids_BS)
        hidden, aux, z, counts = self.hidden_states(input_ids_KBS[0], router_mask_KBS[0], context)
        hidden = main.norm(hidden)
        cross_entropy = [self.cross_entropy(self.logits(hidden), labels_KBS[0].reshape(-1))]
        aux, z = [aux], [z]
        for depth in range(1, self.depths + 1):
            layer = main.layers[main.n_layers + depth - 1]
            embedded = main.embed_tokens(input_ids_KBS[depth].reshape(-1))
            hidden, routed = layer.predict(hidden, embedded, *context, router_mask_KBS[depth])
            cross_entropy.append(self.cross_entropy(self.logits(hidden), labels_KBS[depth].reshape(-1)))
            counts.append(ms.ops.stop_gradient(routed[0]))
            aux.append(routed[1])
            z.append(routed[2])
        counts = self.stack(counts) if counts else ms.ops.zeros((0, self.n_experts), ms.float32)
        return self.stack(cross_entropy), self.stack(aux), self.stack(z), counts

    def context(self, position_ids_BS, segment_ids_BS):
        """What every layer shares: cos and sin of the positions, and which keys are visible."""
        attention = self.model.layers[0].self_attn.attention
        return *self.model.rotary_table(position_ids_BS), attention.visible(segment_ids_BS)

    def hidden_states(self, input_ids_BS, mask_BS, context):
        """The main model's hidden states [T, D] before the final norm; its routers' losses, summed over layers; counts of
        each layer."""
        main, counts = self.model, []
        aux, z = Tensor(0.0, ms.float32), Tensor(0.0, ms.float32)
        hidden = main.embed_tokens(input_ids_BS.reshape(-1))
        for i in range(main.n_layers):
            hidden, routed = main.layers[i](hidden, *context, mask_BS)
            if routed is not None:
                # what needs a gradient is summed and not listed: a list that grows costs quadratic compile time
                aux, z = aux + routed[1], z + routed[2]
                counts.append(ms.ops.stop_gradient(routed[0]))
        return hidden, aux, z, counts

    def logits(self, normed_TD):
        """[T, V] in the compute dtype; a tied head is the embedding."""
        if self.tied:
            return self.linear(normed_TD, self.model.embed_tokens.weight)
        return self.lm_head(normed_TD)

    def main_logits(self, input_ids_BS, position_ids_BS, segment_ids_BS):
        """The main model's logits [B, S, V], for validation and comparison."""
        context = self.context(position_ids_BS, segment_ids_BS)
        hidden, _, _, _ = self.hidden_states(input_ids_BS, (segment_ids_BS != 0).astype(ms.float32), context)
        return self.logits(self.model.norm(hidden)).reshape(input_ids_BS.shape + (-1,))
