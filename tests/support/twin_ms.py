"""The MindSpore twin behind the tests' common interface: everything runs as a compiled static graph."""

from types import SimpleNamespace

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn

from ms_train import attention, block, experts, mtp, norm, ops, router
from ms_train.checkpoint import StateMap
from ms_train.data import to_device
from ms_train.model import DeepseekForCausalLM
from ms_train.step import MicroBatchLoss
from shared_ops.batch import training_batch

TOLERANCE = 1e-5
modules = SimpleNamespace(
    RMSNorm=norm.RMSNorm, MultiHeadLatentAttention=attention.MultiHeadLatentAttention, Router=router.Router,
    MLP=experts.MLP, MixtureOfExperts=experts.MixtureOfExperts, DecoderLayer=block.DecoderLayer,
    MultiTokenPredictor=mtp.MultiTokenPredictor,
)  # fmt: skip

ms.set_context(mode=ms.GRAPH_MODE)
ms.set_device("CPU")


def prepare():
    """Build with the implementations that training takes on this device."""
    ops.select("auto")


def build_model(config, length, values):
    """The whole model with the given canonical parameters."""
    model = DeepseekForCausalLM(config, length)
    states = StateMap(model)
    for name, value in values.items():
        states.put(states.named[name], value, ".experts." in name)
    return model


class ModelProbe(nn.Cell):
    """Logits, losses, counts and gradients of a model, as one graph."""

    def __init__(self, model):
        super().__init__(auto_prefix=False)
        self.loss = MicroBatchLoss(model)
        self.gradient = ms.value_and_grad(self.loss, None, model.trainable_params(), has_aux=True)

    @ms.jit
    def construct(self, input_ids, labels, mask, position_ids, segment_ids, denominators):
        (total, reported, counts), gradients = self.gradient(
            input_ids, labels, mask, position_ids, segment_ids, denominators
        )
        logits = self.loss.model.main_logits(input_ids[0], position_ids, segment_ids)
        return logits, total, reported, counts, gradients


def run_model(config, values, rows):
    """Logits [B, S, V], (total, loss, aux_loss, mtp_loss), counts [L, E] and canonical gradients."""
    model = build_model(config, rows["input_ids"].shape[1], values)
    batch = to_device(training_batch(rows, config.num_nextn_predict_layers))
    logits, total, reported, counts, gradients = ModelProbe(model)(*batch)
    states = StateMap(model)
    by_name = {
        p.name: _canonical(states, g, p.name) for p, g in zip(model.trainable_params(), gradients, strict=True)
    }
    return logits.asnumpy(), [float(total.asnumpy()), *reported.asnumpy().tolist()], counts.asnumpy(), by_name


def _canonical(states, gradient, name):
    array = gradient.asnumpy()
    return array[states.placement.slot_of_expert] if ".experts." in name else array


class ModuleProbe(nn.Cell):
    """<outputs, cotangents> of a module."""

    def __init__(self, module, outputs):
        super().__init__(auto_prefix=False)
        self.module = module
        self.outputs = outputs

    def construct(self, x, rest, cotangents):
        results = self.outputs(self.module, x, *rest)
        total = 0.0
        for i in range(len(cotangents)):
            total = total + (results[i] * cotangents[i]).sum()
        return total, results


class GradientProbe(nn.Cell):
    """Outputs and gradients of a module, as one graph."""

    def __init__(self, probe, weights):
        super().__init__(auto_prefix=False)
        self.gradient = ms.value_and_grad(probe, 0, weights, has_aux=True)

    @ms.jit
    def construct(self, x, rest, cotangents):
        (_, results), gradients = self.gradient(x, rest, cotangents)
        return results, gradients


def run_module(module, values, outputs, inputs, cotangents):
    """Outputs, gradient of <outputs, cotangents> to the first input, and to the parameters by name."""
    for p in module.get_parameters():
        p.set_data(Tensor(np.array(values[p.name])))
    trained = module.trainable_params()
    probe = GradientProbe(ModuleProbe(module, outputs), ms.ParameterTuple(trained))
    x, *rest = map(Tensor, inputs)
    results, (input_gradient, gradients) = probe(x, tuple(rest), tuple(map(Tensor, cotangents)))
    by_name = {p.name: g.asnumpy() for p, g in zip(trained, gradients, strict=True)}
    return [r.asnumpy() for r in results], input_gradient.asnumpy(), by_name
