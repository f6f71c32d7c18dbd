"""The PyTorch twin behind the tests' common interface."""

from types import SimpleNamespace

import numpy as np
import torch

from shared_ops.batch import training_batch
from torch_proto import attention, block, experts, mtp, norm, router
from torch_proto.checkpoint import StateMap
from torch_proto.data import to_device
from torch_proto.loss import TotalLoss
from torch_proto.model import DeepseekForCausalLM

TOLERANCE = 5e-6
modules = SimpleNamespace(
    RMSNorm=norm.RMSNorm, MultiHeadLatentAttention=attention.MultiHeadLatentAttention, Router=router.Router,
    MLP=experts.MLP, MixtureOfExperts=experts.MixtureOfExperts, DecoderLayer=block.DecoderLayer,
    MultiTokenPredictor=mtp.MultiTokenPredictor,
)  # fmt: skip


def prepare():
    """Nothing to choose."""


def build_model(config, length, values):
    """The whole model with the given canonical parameters."""
    model = DeepseekForCausalLM(config, length)
    states = StateMap(model)
    with torch.no_grad():
        for name, value in values.items():
            states.put(states.named[name], value, ".experts." in name)
    return model


def run_model(config, values, rows):
    """Logits [B, S, V], (total, loss, aux_loss, mtp_loss), counts [L, E] and canonical gradients."""
    model = build_model(config, rows["input_ids"].shape[1], values)
    batch = to_device(training_batch(rows, config.num_nextn_predict_layers), torch.device("cpu"))
    sums = model(*batch[:5])
    losses = TotalLoss(config)(sums, batch.denominators)
    losses[0].backward()
    states = StateMap(model)
    gradients = {
        name: states.take(p.grad, ".experts." in name) for name, p in model.named_parameters() if p.grad is not None
    }
    logits = model.main_logits(batch.input_ids[0], batch.position_ids, batch.segment_ids)
    return logits.detach().numpy(), [float(x) for x in losses], sums.counts.numpy(), gradients


def run_module(module, values, outputs, inputs, cotangents):
    """Outputs, gradient of <outputs, cotangents> to the first input, and to the parameters by name."""
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.copy_(torch.from_numpy(np.ascontiguousarray(values[name])))
    tensors = [torch.from_numpy(x).long() if x.dtype == np.int32 else torch.from_numpy(x) for x in inputs]
    tensors[0].requires_grad_()
    results = outputs(module, *tensors)
    sum((r * torch.from_numpy(c)).sum() for r, c in zip(results, cotangents, strict=True)).backward()
    gradients = {name: p.grad.numpy() for name, p in module.named_parameters() if p.grad is not None}
    return [r.detach().numpy() for r in results], tensors[0].grad.numpy(), gradients
