"""The whole model: logits, losses, expert counts and every gradient, between the twins and against float64."""

import importlib
from functools import cache

import numpy as np
import pytest
from cases import parameters, rows, tiny, worst

from shared_ops.expert_table import placement_of
from shared_ops.params import manifest
from shared_ops.reference import model as reference

NAMES = ("tiny_v3", "tiny_v2", "tiny_greedy")
# Rounding accumulates over the layers, so the whole model gets the bound that holds between the twins; what exceeds a
# single module's bound is found by test_modules.
TOLERANCE = 1e-5


@cache
def run(twin_name: str, name: str):
    """Logits, losses, counts, gradients of a twin; a compiled graph is shared by the tests below."""
    twin, config = importlib.import_module(twin_name), tiny(name)
    twin.prepare()
    return twin.run_model(config, parameters(config), rows(config))


@cache
def run_reference(name: str):
    config = tiny(name)
    output, state = reference.forward(
        parameters(config), rows(config), config, group_of_expert=placement_of(config).group_of_expert
    )
    losses = [output.total, output.loss, output.aux_loss, output.mtp_loss]
    counts = np.stack([output.counts[layer] for layer in config.moe_layers])
    gradients = {n: g for n, g in reference.backward(state).items() if not n.endswith("e_score_correction_bias")}
    return output.logits, losses, counts, gradients


def check(actual, expected):
    logits, losses, counts, gradients = actual
    expected_logits, expected_losses, expected_counts, expected_gradients = expected
    assert np.array_equal(counts, expected_counts)
    assert worst(logits, expected_logits) <= TOLERANCE
    for value, expected_value in zip(losses, expected_losses, strict=True):
        assert value == pytest.approx(expected_value, rel=TOLERANCE)
    assert set(gradients) == set(expected_gradients)
    differences = {name: worst(gradients[name], expected_gradients[name]) for name in gradients}
    assert max(differences.values()) <= TOLERANCE, max(differences.items(), key=lambda item: item[1])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("twin", ["twin_torch", "twin_ms"])
def test_twin_is_the_float64_model(twin, name):
    """MindSpore compiles three whole graphs here: 10 s each."""
    check(run(twin, name), run_reference(name))


@pytest.mark.parametrize("name", NAMES)
def test_twins_are_one_model(name):
    check(run("twin_ms", name), run("twin_torch", name))


@pytest.mark.parametrize("name", NAMES)
def test_every_gradient_is_exercised(name):
    """A gradient of zeros would agree with anything."""
    config, gradients = tiny(name), run_reference(name)[3]
    assert set(gradients) == {p.name for p in manifest(config) if p.trainable}
    for parameter, gradient in gradients.items():
        assert np.abs(gradient).max() > 1e-6, parameter
