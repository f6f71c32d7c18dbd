"""One training step: forward, backward, clip, AdamW, correction bias."""

from typing import NamedTuple

import torch
from torch import Tensor

from shared_ops.batch import Batch, micro_batch
from shared_ops.config import RunConfig
from shared_ops.params import CORRECTION_BIAS, manifest
from torch_proto.loss import TotalLoss
from torch_proto.model import DeepseekForCausalLM
from torch_proto.optim import AdamW, ClipByGlobalNorm, CorrectionBiasUpdate
from torch_proto.parallel import Parallel


class StepResult(NamedTuple):
    """Of the whole global batch: scalars loss, aux_loss, mtp_loss, grad_norm, stop (ranks that ask to stop), and
    counts [L, E], the tokens of each expert."""

    loss: Tensor
    aux_loss: Tensor
    mtp_loss: Tensor
    grad_norm: Tensor
    stop: Tensor
    counts: Tensor


class TrainStep:
    """Call with this rank's rows and the learning rate; parameters, moments and bias change in place."""

    def __init__(self, model: DeepseekForCausalLM, config: RunConfig, parallel: Parallel):
        self.model, self.config, self.parallel = model, config, parallel
        self.micro_rows, self.micro_batches = config.micro_batches(parallel.world_size)
        parameters = manifest(config.model)
        self.total_loss = TotalLoss(config.model).to(parallel.device)
        self.optimizer = AdamW(model, parameters, config.optim)
        self.clip = ClipByGlobalNorm(config.optim.clip_grad_norm)
        biases = [p for name, p in model.named_parameters() if name.endswith(CORRECTION_BIAS)]
        self.update_bias = CorrectionBiasUpdate(biases, config.optim.bias_update_rate)
        if config.train.compile:  # layer by layer: layers of one kind share their code
            for part in (*model.model.layers, model.cross_entropy):
                part.compile()

    def __call__(self, batch: Batch, lr: float, stop: bool = False) -> StepResult:
        denominators = self.parallel.sum(batch.denominators.clone())
        reported, counts = torch.zeros(4, device=denominators.device), 0
        for micro in range(self.micro_batches):
            part = micro_batch(batch, micro * self.micro_rows, self.micro_rows)
            sums = self.model(*part[:5])
            total, *parts = self.total_loss(sums, denominators)
            total.backward()
            reported[:3] += torch.stack(parts).detach()
            counts = counts + sums.counts.detach()
        reported[3] = float(stop)
        gradients = [p.grad for p in self.optimizer.trained.values()]
        self.parallel.sum_all([*gradients, reported, counts])
        norm = self.clip(gradients)
        self.optimizer.update(lr)
        for p in self.optimizer.trained.values():
            p.grad = None
        if self.config.model.has_correction_bias:
            self.update_bias(counts)
        loss, aux_loss, mtp_loss, stops = reported.unbind()
        return StepResult(loss, aux_loss, mtp_loss, norm, stops, counts)


class ValidationStep:
    """Cross entropy sum and number of labels of the given rows, over all ranks."""

    def __init__(self, model: DeepseekForCausalLM, parallel: Parallel):
        self.model, self.parallel = model, parallel

    @torch.no_grad()
    def __call__(self, batch: Batch) -> tuple[Tensor, Tensor]:
        logits = self.model.main_logits(batch.input_ids[0], batch.position_ids, batch.segment_ids)
        labels = batch.labels[0].reshape(-1)
        total = self.model.cross_entropy(logits.view(len(labels), -1), labels)
        both = self.parallel.sum(torch.stack((total, batch.denominators[0, 0])))
        return both[0], both[1]
