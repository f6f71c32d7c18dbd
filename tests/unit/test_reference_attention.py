"""Multi-head latent attention (P5), its mask and its gradient."""

from types import SimpleNamespace

import numpy as np
import pytest

from shared_ops.reference import rope
from shared_ops.reference.attention import attention, attention_backward, split_heads, visible
from shared_ops.reference.finite_difference import worst_error

SEGMENTS = np.array([[1, 1, 1, 1, 1, 1], [1, 1, 2, 2, 2, 0]])
POSITIONS = np.array([[0, 1, 2, 3, 4, 5], [0, 1, 0, 1, 2, 0]])


def make(q_lora_rank, sliding_window=None, seed=0):
    """A config with unequal dimensions, its parameters, and `attention`'s arguments after x and params."""
    config = SimpleNamespace(
        num_attention_heads=3,
        qk_nope_head_dim=6,
        qk_rope_head_dim=8,
        v_head_dim=5,
        kv_lora_rank=7,
        q_lora_rank=q_lora_rank,
        rms_norm_eps=1e-3,
        sliding_window=sliding_window,
    )
    rng = np.random.default_rng(seed)
    shapes = {
        "kv_a_proj_with_mqa": (15, 10),
        "kv_a_layernorm": (7,),
        "kv_b_proj": (33, 7),
        "o_proj": (10, 15),
    }
    if q_lora_rank is None:
        shapes["q_proj"] = (42, 10)
    else:
        shapes["q_a_proj"], shapes["q_a_layernorm"] = (q_lora_rank, 10), (q_lora_rank,)
        shapes["q_b_proj"] = (42, q_lora_rank)
    params = {f"{name}.weight": rng.standard_normal(shape) * 0.5 for name, shape in shapes.items()}
    cos, sin = rope.tables(POSITIONS, rope.inverse_frequencies(8, 100.0), 1.2)
    return rng, params, (config, cos, sin, SEGMENTS, 0.4)


def test_kv_b_rows_are_per_head_keys_then_values():
    k_nope, value = split_heads(np.arange(6), heads=2, first=2, second=1)
    assert k_nope.ravel().tolist() == [0, 1, 3, 4]
    assert value.ravel().tolist() == [2, 5]


def test_mask():
    seen = visible(SEGMENTS)
    assert seen[0].astype(int).tolist() == np.tril(np.ones((6, 6), int)).tolist()
    assert seen[1].astype(int).tolist() == [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [0, 0, 1, 0, 0, 0],
        [0, 0, 1, 1, 0, 0],
        [0, 0, 1, 1, 1, 0],
        [0, 0, 0, 0, 0, 1],
    ]
    windowed = visible(SEGMENTS, sliding_window=2)
    assert windowed[0].sum(axis=1).tolist() == [1, 2, 2, 2, 2, 2]
    assert not (windowed & ~seen).any()


@pytest.mark.parametrize("q_lora_rank", [None, 9])
def test_against_a_loop_over_tokens_and_heads(q_lora_rank):
    rng, params, arguments = make(q_lora_rank, sliding_window=4)
    config, cos, sin, segments, scale = arguments
    x = rng.standard_normal((2, 6, 10))
    out, _ = attention(x, params, *arguments)

    def norm(y, name):
        return y / np.sqrt((y @ y) / len(y) + config.rms_norm_eps) * params[name + ".weight"]

    def project(name, y):
        return params[name + ".weight"] @ y

    def turn(y, b, t):
        return rope.rotate(y, cos[b, t], sin[b, t])[0]

    for b, t in np.ndindex(2, 6):
        answer = []
        for head in range(3):
            logits, values = [], []
            for other in range(t + 1):
                if segments[b, other] != segments[b, t] or t - other >= 4:
                    continue
                compressed = project("kv_a_proj_with_mqa", x[b, other])
                kv = project("kv_b_proj", norm(compressed[:7], "kv_a_layernorm"))[head * 11 : head * 11 + 11]
                if q_lora_rank is None:
                    q = project("q_proj", x[b, t])[head * 14 : head * 14 + 14]
                else:
                    q = project("q_b_proj", norm(project("q_a_proj", x[b, t]), "q_a_layernorm"))
                    q = q[head * 14 : head * 14 + 14]
                rotary = turn(q[6:], b, t) @ turn(compressed[7:], b, other)
                logits.append((q[:6] @ kv[:6] + rotary) * scale)
                values.append(kv[6:])
            weights = np.exp(logits) / np.exp(logits).sum()
            answer.append(weights @ np.array(values))
        expected = project("o_proj", np.concatenate(answer))
        assert out[b, t] == pytest.approx(expected, rel=1e-12, abs=1e-12)


def test_documents_do_not_see_each_other():
    rng, params, arguments = make(9)
    x = rng.standard_normal((2, 6, 10))
    other = x.copy()
    other[1, :2] = rng.standard_normal((2, 10))
    before, after = attention(x, params, *arguments)[0], attention(other, params, *arguments)[0]
    assert np.array_equal(before[1, 2:], after[1, 2:])
    assert not np.array_equal(before[1, :2], after[1, :2])


@pytest.mark.parametrize(("q_lora_rank", "sliding_window"), [(None, None), (9, None), (9, 2)])
def test_gradient(q_lora_rank, sliding_window):
    rng, params, arguments = make(q_lora_rank, sliding_window)
    x, direction = rng.standard_normal((2, 6, 10)), rng.standard_normal((2, 6, 10))
    _, cache = attention(x, params, *arguments)
    dx, grads = attention_backward(direction, cache)
    assert grads.keys() == params.keys()
    error, where = worst_error(
        lambda: (attention(x, params, *arguments)[0] * direction).sum(),
        {"x": x, **params},
        {"x": dx, **grads},
        rng,
        directions=4,
        entries=8,
    )
    assert error < 1e-7, where
