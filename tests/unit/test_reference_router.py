"""Routing (P7-P10, P16), its gradient, and the auxiliary losses (P13)."""

from types import SimpleNamespace

import numpy as np
import pytest

from shared_ops.reference.finite_difference import worst_error
from shared_ops.reference.loss import balance_loss, balance_loss_backward, z_loss, z_loss_backward
from shared_ops.reference.router import combine_weights, contiguous_groups, route, route_backward, select


def router_config(method, experts, chosen, groups=1, topk_group=1, norm=False, scaling=1.0):
    return SimpleNamespace(
        topk_method=method,
        scoring_func="sigmoid" if method == "noaux_tc" else "softmax",
        n_routed_experts=experts,
        num_experts_per_tok=chosen,
        n_group=groups,
        topk_group=topk_group,
        norm_topk_prob=norm,
        routed_scaling_factor=scaling,
    )


P7_SCORES = np.array([[0.30, 0.20, 0.35, 0.25, 0.10, 0.05, 0.15, 0.12]])
P7_CONFIG = router_config("noaux_tc", 8, 3, groups=4, topk_group=2, norm=True, scaling=2.5)
P8_SCORES = np.array([[0.40, 0.01, 0.25, 0.22, 0.15, 0.10, 0.05, 0.04]])


def test_closed_groups_never_win():
    selected = select(P7_SCORES, np.full(8, -1.0), P7_CONFIG)
    assert set(selected[0]) == {0, 2, 3}
    masked_with_0 = np.where(np.arange(8) < 4, P7_SCORES - 1, 0)
    assert set(np.argsort(-masked_with_0[0], kind="stable")[:3]) == {4, 5, 6}


def test_group_score():
    assert set(select(P8_SCORES, None, router_config("group_limited_greedy", 8, 2, 4))[0]) == {0, 1}
    assert set(select(P8_SCORES, np.zeros(8), router_config("noaux_tc", 8, 2, 4))[0]) == {2, 3}
    assert set(select(P8_SCORES, None, router_config("greedy", 8, 2, 4))[0]) == {0, 2}
    # V3's sum is over the two best: over all three the second group would win
    of_three = np.array([[0.5, 0.4, 0.0, 0.31, 0.31, 0.31]])
    assert set(select(of_three, np.zeros(6), router_config("noaux_tc", 6, 2, 2))[0]) == {0, 1}
    with pytest.raises(ValueError, match="topk_method='gready'"):
        select(P8_SCORES, None, router_config("gready", 8, 2, 4))


def test_groups_come_from_the_placement_table():
    assert contiguous_groups(P7_CONFIG).tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    # experts e and e + 4 together: .40+.15, .01+.10, .25+.05, .22+.04
    config = router_config("noaux_tc", 8, 2, 4)
    assert set(select(P8_SCORES, np.zeros(8), config, np.arange(8) % 4)[0]) == {0, 4}


def test_bias_selects_and_never_weighs():
    bias = np.full(8, -1.0)
    x = np.log(P7_SCORES / (1 - P7_SCORES))  # through the identity the scores are P7_SCORES
    routing, cache = route(x, np.eye(8), bias, P7_CONFIG)
    expected = [0.833333, 0, 0.972222, 0.694444, 0, 0, 0, 0]
    assert routing.dense_weights()[0] == pytest.approx(expected, abs=1e-6)
    biased = combine_weights(P7_SCORES - 1, np.array([[0, 2, 3]]), P7_CONFIG)
    assert biased[0] == pytest.approx([0.8333, 0.7738, 0.8929], abs=5e-5)
    _, grads = route_backward(np.array([[1.0, 2.0, 3.0]]), cache)
    assert np.array_equal(grads["e_score_correction_bias"], np.zeros(8))
    # and the value of the bias changes nothing but the choice
    other, _ = route(x, np.eye(8), bias + 0.5, P7_CONFIG)
    assert np.array_equal(other.weights, routing.weights)


def test_normalise_and_scale_exactly_once():
    scores = np.array([[0.3, 0.2, 0.1, 0.05]])
    v2 = router_config("greedy", 4, 2, norm=False, scaling=16.0)
    v3 = router_config("noaux_tc", 4, 2, norm=True, scaling=2.5)
    assert combine_weights(scores, np.array([[0, 1]]), v2)[0] == pytest.approx([4.8, 3.2])
    assert combine_weights(scores, np.array([[0, 1]]), v3)[0] == pytest.approx([1.5, 1.0])
    scaled_twice = 2.5 * combine_weights(scores, np.array([[0, 1]]), v3)[0]
    assert scaled_twice == pytest.approx([3.75, 2.5])
    v2_with_norm = router_config("greedy", 4, 2, norm=True, scaling=2.0)
    assert combine_weights(scores, np.array([[0, 1]]), v2_with_norm)[0] == pytest.approx([1.2, 0.8])


def test_of_equal_scores_the_lowest_index_wins():
    ties = np.random.default_rng(0).integers(0, 4, (5, 48)) / 4
    for scores, selected in zip(ties, select(ties, None, router_config("greedy", 48, 20)), strict=True):
        assert selected.tolist() == sorted(range(48), key=lambda e: (-scores[e], e))[:20]


@pytest.mark.parametrize("method", ["greedy", "group_limited_greedy", "noaux_tc"])
def test_selection_against_a_loop_over_tokens(method):
    rng = np.random.default_rng(3)
    config = router_config(method, 12, 5, groups=4, topk_group=2)
    scores, bias, group_of_expert = rng.random((50, 12)), rng.uniform(-1.0, 0.4, 12), rng.permutation(12) % 4
    for s, selected in zip(scores, select(scores, bias, config, group_of_expert), strict=True):
        choice = s + bias if method == "noaux_tc" else s
        members = [sorted(choice[group_of_expert == g], reverse=True) for g in range(4)]
        best = 2 if method == "noaux_tc" else 1
        groups = sorted(range(4), key=lambda g: -sum(members[g][:best]))[:2]
        left = [e for e in range(12) if method == "greedy" or group_of_expert[e] in groups]
        assert selected.tolist() == sorted(left, key=lambda e: -choice[e])[:5]


def sequences(scores):
    """A [B, S, E] of rows of equal tokens, and their mask."""
    scores = np.repeat(np.array(scores)[:, None, :], 5, axis=1)
    return scores, np.ones(scores.shape[:2], bool)


def test_balance_loss():
    first, second = [0.4, 0.3, 0.2, 0.1], [0.1, 0.2, 0.3, 0.4]
    top = np.tile([0, 1], (1, 5, 1))
    scores, mask = sequences([first])
    assert balance_loss(scores, top, mask, 1.0)[0] == pytest.approx(1.4)
    assert balance_loss(scores, top, mask, 0.25)[0] == pytest.approx(0.35)
    # sigmoid scores are normalised first [2.8 without]
    scores, mask = sequences([[0.8, 0.6, 0.4, 0.2]])
    assert balance_loss(scores, top, mask, 1.0)[0] == pytest.approx(1.4)
    # two opposite sequences are 1.4 each; pooled into one they would look balanced
    scores, mask = sequences([first, second])
    chosen = np.concatenate([top, top + 2])
    assert balance_loss(scores, chosen, mask, 1.0)[0] == pytest.approx(1.4)
    pooled = balance_loss(scores.reshape(1, 10, 4), chosen.reshape(1, 10, 2), mask.reshape(1, 10), 1.0)[0]
    assert pooled == pytest.approx(1.0)


def test_balance_loss_counts_the_unbiased_choice():
    config = router_config("noaux_tc", 4, 2)
    scores = np.array([[0.4, 0.3, 0.2, 0.1]])
    x = np.log(scores / (1 - scores))
    routing, _ = route(np.tile(x, (5, 1)), np.eye(4), np.array([-0.3, 0, 0, 0.3]), config)
    scores, mask = routing.scores[None], np.ones((1, 5), bool)
    assert set(routing.selected[0]) == {1, 3}
    assert balance_loss(scores, routing.balance_selected[None], mask, 1.0)[0] == pytest.approx(1.4)
    assert balance_loss(scores, routing.selected[None], mask, 1.0)[0] == pytest.approx(0.8)


def test_balance_loss_without_tokens_or_alpha_is_0():
    scores, mask = sequences([[0.4, 0.3, 0.2, 0.1], [0.4, 0.3, 0.2, 0.1]])
    chosen = np.tile([0, 1], (2, 5, 1))
    for alpha, keep in ((0.0, mask), (1.0, np.zeros_like(mask))):
        loss, cache = balance_loss(scores, chosen, keep, alpha)
        assert loss == 0
        assert np.array_equal(balance_loss_backward(1.0, cache), np.zeros_like(scores))
    mask[1] = False  # an empty row is not averaged in
    assert balance_loss(scores, chosen, mask, 1.0)[0] == pytest.approx(1.4)
    assert balance_loss(scores, chosen, mask, 1.0, rows=2)[0] == pytest.approx(0.7)


def test_z_loss():
    logits = np.log(np.array([[1.0, 2, 3, 4], [1, 1, 1, 1], [5, 5, 5, 5]]))
    mask = np.array([True, True, False])
    expected = (np.log(10) ** 2 + np.log(4) ** 2) / 2
    assert z_loss(logits, mask, 1.0)[0] == pytest.approx(expected)
    assert z_loss(logits, mask, 1.0, tokens=4)[0] == pytest.approx(expected / 2)
    loss, cache = z_loss(logits, np.zeros(3, bool), 1.0)
    assert loss == 0
    assert np.array_equal(z_loss_backward(1.0, cache), np.zeros((3, 4)))


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("method", ["greedy", "group_limited_greedy", "noaux_tc"])
def test_gradient(method, norm):
    """Of the weights and of both auxiliary losses at once."""
    rng = np.random.default_rng(2)
    config = router_config(method, 12, 3, groups=4, topk_group=2, norm=norm, scaling=1.7)
    arrays = {"x": rng.standard_normal((14, 5)), "weight": rng.standard_normal((12, 5))}
    bias = rng.uniform(-1.0, 0.4, 12) if method == "noaux_tc" else None
    groups = rng.permutation(12) % 4
    mask = rng.random((2, 7)) < 0.8
    direction = rng.standard_normal((14, 12))

    def forward():
        routing, cache = route(arrays["x"], arrays["weight"], bias, config, groups)
        shape = (2, 7, -1)
        balance, balance_cache = balance_loss(
            routing.scores.reshape(shape), routing.balance_selected.reshape(shape), mask, 0.6
        )
        z, z_cache = z_loss(routing.logits, mask.ravel(), 0.3)
        value = (routing.dense_weights() * direction).sum() + balance + z
        return value, routing, cache, balance_cache, z_cache

    _, routing, cache, balance_cache, z_cache = forward()
    dx, grads = route_backward(
        np.take_along_axis(direction, routing.selected, axis=-1),
        cache,
        balance_loss_backward(1.0, balance_cache).reshape(14, 12),
        z_loss_backward(1.0, z_cache),
    )
    grads = {"x": dx, "weight": grads["weight"]}
    error, where = worst_error(lambda: forward()[0], arrays, grads, rng, directions=4, entries=8)
    assert error < 1e-7, where
