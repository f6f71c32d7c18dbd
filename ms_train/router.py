"""Scores -> chosen experts and their weights: V2 (arXiv 2405.04434, 2.2) and V3 (arXiv 2412.19437, 2.1.2)."""

import mindspore as ms
from mindspore import Parameter, Tensor, nn
from mindspore.common.initializer import initializer

from ms_train import ops
from shared_ops.config import ModelConfig
from shared_ops.expert_table import ExpertPlacement


class Router(nn.Cell):
    """x [T, D], mask [B, S] -> (slots int [T, K], weights fp32 [T, K], statistics); fp32 throughout.

    Statistics: counts fp32 [E], tokens per expert; aux and z, sums before coefficient and denominator.
    """

    def __init__(self, config: ModelConfig, placement: ExpertPlacement):
        super().__init__()
        c = config
        self.n_experts, self.top_k, self.n_group = c.n_routed_experts, c.num_experts_per_tok, c.n_group
        self.sigmoid = c.scoring_func == "sigmoid"
        self.norm_topk_prob, self.scaling = c.norm_topk_prob, c.routed_scaling_factor
        self.has_bias = c.has_correction_bias
        self.limited = c.topk_method != "greedy" and c.n_group > 1
        self.with_aux, self.with_z = c.aux_loss_alpha > 0, c.router_z_loss_coef > 0
        self.weight = Parameter(initializer("zeros", (c.n_routed_experts, c.hidden_size), ms.float32), name="weight")
        if self.has_bias:
            zeros = initializer("zeros", (c.n_routed_experts,), ms.float32)
            self.e_score_correction_bias = Parameter(zeros, name="e_score_correction_bias", requires_grad=False)
        self.experts_of_group = Tensor(placement.experts_of_group.reshape(-1))
        self.group_of_expert = Tensor(placement.group_of_expert)
        self.slot_of_expert = Tensor(placement.slot_of_expert)
        self.linear = ops.Linear()
        self.top_experts = ops.TopK(c.num_experts_per_tok)
        self.top_groups = ops.TopK(c.topk_group)
        self.best_two = ops.TopK(2)
        self.chosen_experts = ops.ChosenMask(c.n_routed_experts)
        self.chosen_groups = ops.ChosenMask(c.n_group)
        self.gather = ms.ops.Gather()

    def construct(self, x_TD, mask_BS):
        logits = self.linear(x_TD.astype(ms.float32), self.weight)
        scores = ms.ops.sigmoid(logits) if self.sigmoid else ms.ops.softmax(logits, -1)
        experts = self.top_experts(self.selection_scores(scores))
        weights = ms.ops.gather_elements(scores, 1, experts)
        if self.norm_topk_prob:
            weights = weights / (weights.sum(-1, keepdims=True) + 1e-20)
        chosen = self.chosen_experts(experts) * mask_BS.reshape(-1, 1)
        aux, z = self.aux(scores, chosen, mask_BS), self.z(logits, mask_BS)
        slots = self.gather(self.slot_of_expert, experts, 0)
        return slots, weights * self.scaling, (chosen.sum(0), aux, z)

    def selection_scores(self, scores):
        """The scores that choose: with the correction bias, -inf outside the best groups. No gradient."""
        scores = ms.ops.stop_gradient(scores)
        if self.has_bias:
            scores = scores + self.e_score_correction_bias
        if not self.limited:
            return scores
        grouped = self.gather(scores, self.experts_of_group, 1).reshape(-1, self.n_experts // self.n_group)
        if self.has_bias:
            group_scores = ms.ops.gather_elements(grouped, 1, self.best_two(grouped)).sum(-1)
        else:
            group_scores = ms.ops.amax(grouped, -1)
        groups = self.chosen_groups(self.top_groups(group_scores.reshape(-1, self.n_group)))
        return scores.masked_fill(self.gather(groups, self.group_of_expert, 1) == 0, float("-inf"))

    def aux(self, scores, chosen, mask_BS):
        """Sequence-wise balance loss (V3 eq. 17-20), summed over rows: sum_i f_i P_i of each row.

        With a correction bias f counts the top-k of the unbiased scores, as eq. 18 says.
        """
        if not self.with_aux:
            return Tensor(0.0, ms.float32)
        mask = mask_BS.reshape(-1, 1)
        if self.sigmoid:
            scores = scores / scores.sum(-1, keepdims=True)
        if self.has_bias:
            chosen = self.chosen_experts(self.top_experts(scores)) * mask
        rows = mask_BS.shape + (self.n_experts,)
        frequency = chosen.reshape(rows).sum(1)
        probability = (scores * mask).reshape(rows).sum(1)
        tokens = ms.ops.maximum(mask_BS.sum(1), 1.0)
        return ((frequency * probability).sum(1) / (tokens * tokens)).sum() * (self.n_experts / self.top_k)

    def z(self, logits, mask_BS):
        """Router z-loss (arXiv 2202.08906, eq. 5), summed over tokens."""
        if not self.with_z:
            return Tensor(0.0, ms.float32)
        return (ms.ops.square(ms.ops.logsumexp(logits, -1)) * mask_BS.reshape(-1)).sum()
