"""The gate of a mixture of experts: logits -> scores -> groups -> experts -> weights.

DeepSeek-V2 section 2.2.1 (eq. 20-22) and 2.2.2 (device-limited routing: groups), DeepSeek-V3 section 2.1.2
(eq. 12-16: sigmoid, normalised weights, a bias that balances the load without a loss).
"""

from dataclasses import dataclass

import numpy as np

from shared_ops.reference.arrays import (
    Grads,
    f64,
    linear,
    linear_backward,
    sigmoid,
    softmax,
    softmax_backward,
)

METHODS = ("greedy", "group_limited_greedy", "noaux_tc")
NORM_EPS = 1e-20  # keeps 0/0 out of the normalisation of the weights


@dataclass(frozen=True)
class Routing:
    """What the gate says of each token."""

    logits: np.ndarray  # [T, E]
    scores: np.ndarray  # [T, E], softmax or sigmoid of the logits
    selected: np.ndarray  # [T, K] experts, best first; equal scores: the lowest index first
    weights: np.ndarray  # [T, K]
    balance_selected: np.ndarray  # [T, K] experts that the sequence-wise auxiliary loss counts

    def dense_weights(self) -> np.ndarray:
        """[T, E], 0 where an expert is not selected: comparable whatever the order of the selected ones."""
        dense = np.zeros_like(self.scores)
        np.put_along_axis(dense, self.selected, self.weights, axis=-1)
        return dense


def contiguous_groups(config) -> np.ndarray:
    """[E] group of each expert in the published models: E/G neighbours form a group."""
    return np.arange(config.n_routed_experts) // (config.n_routed_experts // config.n_group)


def highest(x, k: int) -> np.ndarray:
    """Indices of the k largest entries of the last axis, largest first; of equal ones the lowest first."""
    return np.argsort(-x, axis=-1, kind="stable")[..., :k]


def select(scores, bias, config, group_of_expert=None) -> np.ndarray:
    """Experts of each token, [T, K], from scores [T, E] and the correction bias [E] (noaux_tc only).

    greedy: the K highest scores. group_limited_greedy (V2): only within the topk_group groups with the
    highest maximum. noaux_tc (V3): on scores + bias, groups ranked by the sum of their two highest.
    """
    method = config.topk_method
    if method not in METHODS:
        raise ValueError(f"topk_method={method!r}: expected one of {METHODS}")
    choice = f64(scores)
    if method == "noaux_tc":
        choice = choice + f64(bias)
    if method == "greedy":
        return highest(choice, config.num_experts_per_tok)
    group_of_expert = contiguous_groups(config) if group_of_expert is None else np.asarray(group_of_expert)
    best_of_group = 2 if method == "noaux_tc" else 1
    group_scores = np.stack(
        [
            np.sort(choice[:, group_of_expert == group], axis=-1)[:, ::-1][:, :best_of_group].sum(axis=-1)
            for group in range(config.n_group)
        ],
        axis=-1,
    )  # [T, G]
    open_groups = np.zeros(group_scores.shape, bool)
    np.put_along_axis(open_groups, highest(group_scores, config.topk_group), True, axis=-1)
    # -inf and not 0: score + bias may be negative, and 0 would win against it
    choice = np.where(open_groups[:, group_of_expert], choice, -np.inf)
    return highest(choice, config.num_experts_per_tok)


def combine_weights(scores, selected, config) -> np.ndarray:
    """Weights [T, K] of the selected experts: their scores without the bias, normalised if the config says
    so, then scaled; each exactly once (DeepSeek-V3 eq. 13)."""
    weights = np.take_along_axis(f64(scores), selected, axis=-1)
    if config.norm_topk_prob:
        weights = weights / (weights.sum(axis=-1, keepdims=True) + NORM_EPS)
    return weights * config.routed_scaling_factor


def combine_weights_backward(dweights, scores, selected, config) -> np.ndarray:
    """-> dscores [T, E]. With w_k = c s_k / z, z = sum(s) + eps: ds_k = c/z (dw_k - sum(dw * s) / z)."""
    dweights = dweights * config.routed_scaling_factor
    if config.norm_topk_prob:
        chosen = np.take_along_axis(scores, selected, axis=-1)
        total = chosen.sum(axis=-1, keepdims=True) + NORM_EPS
        dweights = (dweights - (dweights * chosen).sum(axis=-1, keepdims=True) / total) / total
    dscores = np.zeros_like(scores)
    np.put_along_axis(dscores, selected, dweights, axis=-1)
    return dscores


def route(x, gate_weight, bias, config, group_of_expert=None) -> tuple[Routing, tuple]:
    """x [T, D], gate_weight [E, D], bias [E] or None, group_of_expert [E] or None (contiguous groups)."""
    logits, cache = linear(x, gate_weight)
    scores = {"softmax": softmax, "sigmoid": sigmoid}[config.scoring_func](logits)
    selected = select(scores, bias, config, group_of_expert)
    balance_selected = selected
    if config.topk_method == "noaux_tc":  # DeepSeek-V3 eq. 18: the bias and the groups do not enter the loss
        balance_selected = highest(scores, config.num_experts_per_tok)
    weights = combine_weights(scores, selected, config)
    routing = Routing(logits, scores, selected, weights, balance_selected)
    return routing, (cache, routing, bias, config)


def route_backward(dweights, cache, dscores=0.0, dlogits=0.0) -> tuple[np.ndarray, Grads]:
    """dweights [T, K] from the experts; dscores, dlogits [T, E] from the auxiliary losses.

    -> (dx [T, D], {"weight": [E, D], "e_score_correction_bias": zeros [E] where there is one}).
    """
    linear_cache, routing, bias, config = cache
    dscores = dscores + combine_weights_backward(dweights, routing.scores, routing.selected, config)
    if config.scoring_func == "softmax":
        dlogits = dlogits + softmax_backward(dscores, routing.scores)
    else:
        dlogits = dlogits + dscores * routing.scores * (1.0 - routing.scores)
    dx, dweight = linear_backward(dlogits, linear_cache)
    grads = {"weight": dweight}
    if bias is not None:
        grads["e_score_correction_bias"] = np.zeros(np.shape(bias))
    return dx, grads
