"""One training step: forward, backward, clip, AdamW, correction bias, as one compiled graph."""

import mindspore as ms
from mindspore import nn

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
    """Call with this rank's rows (the six tensors of `shared_ops.batch.Batch`), the learning rate, the powers of both
    betas and whether this rank asks to stop; parameters, moments and bias change in place.

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

    @ms.jit
    def construct(
        self, input_ids, labels, router_mask, position_ids, segment_ids, denominators, lr, beta1_power, beta2_power, stop
    ):  # fmt: skip
        denominators = self.sum(denominators)
        reported, counts, gradients = self.accumulate(
            (input_ids, labels, router_mask, position_ids, segment_ids), denominators
        )
        reported = self.concat((reported, stop.reshape(1)))
        summed = self.sum_all(gradients + (reported, counts))
        gradients, reported, counts = summed[:-2], summed[-2], summed[-1]
        gradients, norm = self.clip(gradients)
        norm = ms.ops.depend(norm, self.optimizer(gradients, lr, beta1_power, beta2_power))
        if self.has_bias:
            norm = ms.ops.depend(norm, self.update_bias(counts))
        return reported, norm, counts

    def accumulate(self, rows, denominators):
        """Sums over the micro-batches: reported parts, tokens per expert, gradients."""
        (_, reported, counts), gradients = self.gradient(*self.micro_batch(rows, 0), denominators)
        for micro in range(1, self.micro_batches):
            (_, more_reported, more_counts), more = self.gradient(*self.micro_batch(rows, micro), denominators)
            reported, counts = reported + more_reported, counts + more_counts
            added = ()
            for i in range(len(gradients)):
                added = added + (gradients[i] + more[i],)
            gradients = added
        return reported, counts, gradients

    def micro_batch(self, rows, micro):
        """Rows `micro * micro_rows` … of the rank's rows."""
        if self.micro_batches == 1:
            return rows
        first, last = micro * self.micro_rows, (micro + 1) * self.micro_rows
        input_ids, labels, router_mask, position_ids, segment_ids = rows
        return (
            input_ids[:, first:last],
            labels[:, first:last],
            router_mask[:, first:last],
            position_ids[first:last],
            segment_ids[first:last],
        )


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
