"""Scores -> chosen experts and their weights: V2 (arXiv 2405.04434, 2.2) and V3 (arXiv 2412.19437, 2.1.2)."""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from shared_ops.config import ModelConfig
from shared_ops.expert_table import ExpertPlacement
from torch_proto import ops


class RouterStatistics(NamedTuple):
    """counts fp32 [E]: tokens per expert; aux, z: sums over rows and tokens, before coefficient and denominator."""

    counts: Tensor
    aux: Tensor
    z: Tensor


class Router(nn.Module):
    """x [T, D], mask [B, S] -> (slots int [T, K], weights fp32 [T, K], statistics); fp32 throughout."""

    def __init__(self, config: ModelConfig, placement: ExpertPlacement):
        super().__init__()
        c = config
        self.n_experts, self.top_k, self.n_group = c.n_routed_experts, c.num_experts_per_tok, c.n_group
        self.sigmoid = c.scoring_func == "sigmoid"
        self.norm_topk_prob, self.scaling = c.norm_topk_prob, c.routed_scaling_factor
        self.has_bias = c.has_correction_bias
        self.limited = c.topk_method != "greedy" and c.n_group > 1
        self.with_aux, self.with_z = c.aux_loss_alpha > 0, c.router_z_loss_coef > 0
        self.weight = nn.Parameter(torch.empty(c.n_routed_experts, c.hidden_size))
        if self.has_bias:
            self.e_score_correction_bias = nn.Parameter(torch.empty(c.n_routed_experts), requires_grad=False)
        self.experts_of_group = nn.Buffer(torch.tensor(placement.experts_of_group.reshape(-1)), persistent=False)
        self.group_of_expert = nn.Buffer(torch.tensor(placement.group_of_expert), persistent=False)
        self.slot_of_expert = nn.Buffer(torch.tensor(placement.slot_of_expert), persistent=False)
        self.linear = ops.Linear()
        self.top_experts = ops.TopK(c.num_experts_per_tok)
        self.top_groups = ops.TopK(c.topk_group)
        self.best_two = ops.TopK(2)
        self.chosen_experts = ops.ChosenMask(c.n_routed_experts)
        self.chosen_groups = ops.ChosenMask(c.n_group)

    def forward(self, x_TD: Tensor, mask_BS: Tensor) -> tuple[Tensor, Tensor, RouterStatistics]:
        logits = self.linear(x_TD.float(), self.weight)
        scores = logits.sigmoid() if self.sigmoid else logits.softmax(-1)
        experts = self.top_experts(self.selection_scores(scores))
        weights = scores.gather(1, experts)
        if self.norm_topk_prob:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        chosen = self.chosen_experts(experts) * mask_BS.reshape(-1, 1)
        statistics = RouterStatistics(chosen.sum(0), self.aux(scores, chosen, mask_BS), self.z(logits, mask_BS))
        return self.slot_of_expert[experts], weights * self.scaling, statistics

    def selection_scores(self, scores: Tensor) -> Tensor:
        """The scores that choose: with the correction bias, -inf outside the best groups. No gradient."""
        scores = scores.detach()
        if self.has_bias:
            scores = scores + self.e_score_correction_bias
        if not self.limited:
            return scores
        grouped = scores[:, self.experts_of_group].view(-1, self.n_experts // self.n_group)
        if self.has_bias:
            group_scores = grouped.gather(1, self.best_two(grouped)).sum(-1)
        else:
            group_scores = grouped.amax(-1)
        groups = self.chosen_groups(self.top_groups(group_scores.view(-1, self.n_group)))
        return scores.masked_fill(groups[:, self.group_of_expert] == 0, float("-inf"))

    def aux(self, scores: Tensor, chosen: Tensor, mask_BS: Tensor) -> Tensor:
        """Sequence-wise balance loss (V3 eq. 17-20), summed over rows: sum_i f_i P_i of each row.

        With a correction bias f counts the top-k of the unbiased scores, as eq. 18 says.
        """
        if not self.with_aux:
            return scores.new_zeros(())
        mask = mask_BS.reshape(-1, 1)
        if self.sigmoid:
            scores = scores / scores.sum(-1, keepdim=True)
        if self.has_bias:
            chosen = self.chosen_experts(self.top_experts(scores)) * mask
        rows = (len(mask_BS), -1, self.n_experts)
        frequency = chosen.view(rows).sum(1)
        probability = (scores * mask).view(rows).sum(1)
        tokens = mask_BS.sum(1).clamp(min=1)
        return ((frequency * probability).sum(1) / tokens.square()).sum() * (self.n_experts / self.top_k)

    def z(self, logits: Tensor, mask_BS: Tensor) -> Tensor:
        """Router z-loss (arXiv 2202.08906, eq. 5), summed over tokens."""
        if not self.with_z:
            return logits.new_zeros(())
        return (logits.logsumexp(-1).square() * mask_BS.reshape(-1)).sum()
