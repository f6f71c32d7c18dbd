"""The whole model: embedding, decoder layers, multi-token prediction, norm, head and the sums of its losses.

Shapes: B rows, S sequence, T = B S tokens, D hidden, V vocabulary, E experts, L layers with routed experts,
K = 1 + multi-token prediction depths (depth 0 is the main model).
"""

import torch
from torch import Tensor, nn

from shared_ops.config import ModelConfig
from shared_ops.expert_table import placement_of
from torch_proto.block import DecoderLayer
from torch_proto.linear import Embedding, Linear
from torch_proto.loss import LossSums
from torch_proto.mtp import MultiTokenPredictor
from torch_proto.norm import RMSNorm
from torch_proto.ops import CrossEntropySum
from torch_proto.rope import RotaryTable


class DeepseekModel(nn.Module):
    """Embedding, decoder layers (multi-token prediction layers last) and the final norm."""

    def __init__(self, config: ModelConfig, length: int, dtype: torch.dtype):
        super().__init__()
        placement = placement_of(config)
        self.n_layers = config.num_hidden_layers
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, dtype)
        self.rotary_table = RotaryTable(config, length)
        self.layers = nn.ModuleList(
            [DecoderLayer(config, placement, i) for i in range(self.n_layers)]
            + [
                MultiTokenPredictor(config, placement, self.n_layers + k)
                for k in range(config.num_nextn_predict_layers)
            ]
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)


class DeepseekForCausalLM(nn.Module):
    """A DeepSeek-V2 or V3 language model for sequences up to `length`, computing in `dtype` (parameters are fp32)."""

    def __init__(self, config: ModelConfig, length: int, dtype: torch.dtype = torch.float32):
        super().__init__()
        self.config = config
        self.tied = config.tie_word_embeddings
        self.model = DeepseekModel(config, length, dtype)
        if not self.tied:
            self.lm_head = Linear(config.hidden_size, config.vocab_size)
        self.cross_entropy = CrossEntropySum()

    def forward(
        self,
        input_ids_KBS: Tensor,
        labels_KBS: Tensor,
        router_mask_KBS: Tensor,
        position_ids_BS: Tensor,
        segment_ids_BS: Tensor,
    ) -> LossSums:
        """The sums of every loss over the given rows (see `shared_ops.batch.Batch` for the inputs)."""
        main = self.model
        context = self.context(position_ids_BS, segment_ids_BS)
        hidden, aux, z, counts = self.hidden_states(input_ids_KBS[0], router_mask_KBS[0], context)
        hidden = main.norm(hidden)
        cross_entropy = [self.cross_entropy(self.logits(hidden), labels_KBS[0].reshape(-1))]
        aux, z = [aux], [z]
        for depth, layer in enumerate(main.layers[main.n_layers :], start=1):
            embedded = main.embed_tokens(input_ids_KBS[depth].reshape(-1))
            hidden, routed = layer.predict(hidden, embedded, *context, router_mask_KBS[depth])
            cross_entropy.append(self.cross_entropy(self.logits(hidden), labels_KBS[depth].reshape(-1)))
            counts.append(routed.counts)
            aux.append(routed.aux)
            z.append(routed.z)
        counts = torch.stack(counts) if counts else hidden.new_zeros(0, self.config.n_routed_experts, dtype=torch.float32)
        return LossSums(torch.stack(cross_entropy), torch.stack(aux), torch.stack(z), counts)

    def context(self, position_ids_BS: Tensor, segment_ids_BS: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What every layer shares: cos and sin of the positions, and which keys are visible."""
        attention = self.model.layers[0].self_attn.attention
        return *self.model.rotary_table(position_ids_BS), attention.visible(segment_ids_BS)

    def hidden_states(
        self, input_ids_BS: Tensor, mask_BS: Tensor, context: tuple[Tensor, ...]
    ) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
        """The main model's hidden states [T, D] before the final norm; its routers' losses, summed over layers; counts of
        each layer."""
        main, counts = self.model, []
        aux = z = torch.zeros((), device=input_ids_BS.device)
        hidden = main.embed_tokens(input_ids_BS.reshape(-1))
        for layer in main.layers[: main.n_layers]:
            hidden, routed = layer(hidden, *context, mask_BS)
            if routed is not None:
                aux, z = aux + routed.aux, z + routed.z
                counts.append(routed.counts)
        return hidden, aux, z, counts

    def logits(self, normed_TD: Tensor) -> Tensor:
        """[T, V] in the compute dtype; a tied head is the embedding."""
        if self.tied:
            return nn.functional.linear(normed_TD, self.model.embed_tokens.weight.to(normed_TD.dtype))
        return self.lm_head(normed_TD)

    def main_logits(self, input_ids_BS: Tensor, position_ids_BS: Tensor, segment_ids_BS: Tensor) -> Tensor:
        """The main model's logits [B, S, V], for validation and comparison."""
        context = self.context(position_ids_BS, segment_ids_BS)
        hidden, *_ = self.hidden_states(input_ids_BS, (segment_ids_BS != 0).float(), context)
        return self.logits(self.model.norm(hidden)).view(*input_ids_BS.shape, -1)
