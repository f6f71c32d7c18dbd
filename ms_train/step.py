"""One training step: forward, backward, clip, AdamW, correction bias, as one compiled graph."""

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn

from ms_train.loss import TotalLoss
from ms_train.model import DeepseekForCausalLM
from ms_train.optim import AdamW, ClipByGlobalNorm, CorrectionBiasUpdate
from ms_train.parallel import Parallel
from shared_ops.config import RunConfig
from shared_ops.params import CORRECTION_BIAS, manifest


class MicroBatchLoss(nn.Cell):
    """One micro-batch -> (total loss, reported parts [3], tokens per expert [L, E])."""

    def __init__(self, model: DeepseekForCausalLM):
        super().__init__(auto_prefix=False)
        self.model = model
        self.total_loss = TotalLoss(model.config)
        self.stack = ms.ops.Stack(0)

    def construct(self, input_ids, labels, router_mask, position_ids, segment_ids, denominators):
        sums = self.model(input_ids, labels, router_mask, position_ids, segment_ids)
        total, loss, aux_loss, mtp_loss = self.total_loss(sums, denominators)
        return total, self.stack((loss, aux_loss, mtp_loss)), sums[3]


class TrainStep(nn.Cell):
    """Call with this rank's rows (the six tensors of `shared_ops.batch.Batch`), the scalars of `AdamW.rates` and whether
    this rank asks to stop; parameters, moments and bias change in place.

    Returns, of the whole global batch: loss, aux_loss, mtp_loss, stop (ranks that ask to), as [4]; the gradient norm;
    and the tokens of each expert [L, E].
    """

    def __init__(self, model: DeepseekForCausalLM, config: RunConfig, parallel: Parallel):
        super().__init__(auto_prefix=False)
        self.micro_rows, self.micro_batches = config.micro_batches(parallel.world_size)
        self.optimizer = AdamW(model, manifest(config.model), config.optim)
        self.clip = ClipByGlobalNorm(config.optim.clip_grad_norm)
        biases = [p for p in model.get_parameters() if p.name.endswith(CORRECTION_BIAS)]
        self.has_bias = config.model.has_correction_bias
        self.update_bias = CorrectionBiasUpdate(biases, config.optim.bias_update_rate)
        self.gradient = ms.value_and_grad(MicroBatchLoss(model), None, self.optimizer.parameters, has_aux=True)
        self.sum, self.sum_all = parallel.sum(), parallel.sum_all()
        self.concat = ms.ops.Concat(0)
        self.gather = ms.ops.Gather()
        self.map, self.add = ms.ops.HyperMap(), ms.ops.Add()
        self.row_numbers = Tensor(np.arange(self.micro_rows, dtype=np.int32))
        self.shapes = tuple(p.shape for p in self.optimizer.parameters)
        self.counts_shape = (len(config.model.moe_layers), config.model.n_routed_experts)

    @ms.jit
    def construct(
        self, input_ids, labels, router_mask, position_ids, segment_ids, denominators, keep, lr, eps, stop
    ):  # fmt: skip
        denominators = self.sum(denominators)
        reported, counts, gradients = self.accumulate(
            (input_ids, labels, router_mask, position_ids, segment_ids), denominators
        )
        reported = self.concat((reported, stop.reshape(1)))
        summed = self.sum_all(gradients + (reported, counts))
        gradients, reported, counts = summed[:-2], summed[-2], summed[-1]
        gradients, norm = self.clip(gradients)
        norm = ms.ops.depend(norm, self.optimizer(gradients, keep, lr, eps))
        if self.has_bias:
            norm = ms.ops.depend(norm, self.update_bias(counts))
        return reported, norm, counts

    def accumulate(self, rows, denominators):
        """Sums over the micro-batches: reported parts, tokens per expert, gradients.

        The loop is one of the graph, over a tensor: compiled once, whatever the number of micro-batches.
        """
        if self.micro_batches == 1:
            (_, reported, counts), gradients = self.gradient(*rows, denominators)
            return reported, counts, gradients
        ids, labels, mask, positions, segments = rows
        reported = ms.ops.zeros((3,), ms.float32)
        counts = ms.ops.zeros(self.counts_shape, ms.float32)
        gradients = ()
        for shape in self.shapes:
            gradients = gradients + (ms.ops.zeros(shape, ms.float32),)
        row = Tensor(0, ms.int32)
        while row < self.micro_rows * self.micro_batches:
            index = row + self.row_numbers
            part = (
                self.gather(ids, index, 1), self.gather(labels, index, 1), self.gather(mask, index, 1),
                self.gather(positions, index, 0), self.gather(segments, index, 0),
            )  # fmt: skip
            (_, more_reported, more_counts), more = self.gradient(*part, denominators)
            reported, counts = reported + more_reported, counts + more_counts
            gradients = self.map(self.add, gradients, more)
            row = row + self.micro_rows
        return reported, counts, gradients


class ValidationStep(nn.Cell):
    """Cross entropy sum and number of labels of the given rows, over all ranks, as [2]."""

    def __init__(self, model: DeepseekForCausalLM, parallel: Parallel):
        super().__init__(auto_prefix=False)
        self.model = model
        self.sum = parallel.sum()
        self.stack = ms.ops.Stack(0)

    @ms.jit
    def construct(self, input_ids, labels, position_ids, segment_ids, denominators):
        logits = self.model.main_logits(input_ids[0], position_ids, segment_ids)
        total = self.model.cross_entropy(logits.reshape(-1, logits.shape[-1]), labels[0].reshape(-1))
        return self.sum(self.stack((total, denominators[0, 0])))
