"""A second opinion: transformers' DeepseekV2/V3ForCausalLM on the same weights, forward and backward.

Where transformers 5.24 is not the model, and so not compared (each checked against the papers' formulas):

- V2 with norm_topk_prob: it ignores the flag; here weights are normalised and scaled once (P10). No published model.
- rms_norm_eps other than 1e-6: its q_a and kv_a norms keep 1e-6.
- YaRN with mscale_all_dim 0 and mscale != 1: its amplitude is m(f, 1) and not m(f, mscale) / m(f, mscale_all_dim) (P2).
- sliding_window: neither model reads it (a mask is passed here); router losses and prediction depths: it has none.
- V2 opens closed groups to a score of exactly 0 (masked with 0, not -inf): no effect on softmax scores above 0.
"""

import numpy as np
import pytest
import torch
import transformers
from cases import parameters, rows, tiny, worst
from twin_torch import build_model

from shared_ops.batch import training_batch
from shared_ops.config import ModelConfig
from torch_proto.data import to_device

# two implementations in fp32 of one function: each is within 5e-6 of float64 (test_modules, test_whole_model)
TOLERANCE = 1e-5
PLAIN = {"num_nextn_predict_layers": 0, "aux_loss_alpha": 0.0, "router_z_loss_coef": 0.0, "sliding_window": None,
         "tie_word_embeddings": False, "hidden_size": 48}  # fmt: skip
CASES = {
    "v3": ("tiny_v3", {}),
    "v3_without_query_latent": ("tiny_v3", {"q_lora_rank": None}),
    "v2_group_limited": ("tiny_v2", {}),
    "v2_greedy": ("tiny_v2", {"topk_method": "greedy", "n_group": 1, "topk_group": 1, "q_lora_rank": 28}),
}


def config_of(case: str) -> ModelConfig:
    name, changes = CASES[case]
    return ModelConfig.model_validate(tiny(name).model_dump() | PLAIN | changes)


def to_transformers(values: dict[str, np.ndarray]) -> dict[str, torch.Tensor]:
    """transformers 5 holds a layer's experts stacked, under our names."""
    return {name: torch.from_numpy(np.ascontiguousarray(value)) for name, value in values.items()}


@pytest.mark.parametrize("case", CASES)
def test_same_model(case):
    config = config_of(case)
    values, batch = parameters(config), rows(config)
    theirs = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model(**config.to_hf()), attn_implementation="eager", dtype=torch.float32
    )
    theirs.load_state_dict(to_transformers(values), strict=True)
    ours = build_model(config, batch["input_ids"].shape[1], values)
    ids, positions, segments = (
        torch.from_numpy(batch[key]).long() for key in ("input_ids", "position_ids", "segment_ids")
    )
    length = ids.shape[1]
    visible = (segments[:, :, None] == segments[:, None, :]) & torch.ones(length, length).tril().bool()
    mask = torch.zeros(visible.shape).masked_fill(~visible, torch.finfo(torch.float32).min)[:, None]
    logits = theirs(input_ids=ids, position_ids=positions, attention_mask=mask, use_cache=False).logits
    labels = torch.from_numpy(batch["labels"]).long()
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()).backward()

    prepared = to_device(training_batch(batch, 0), torch.device("cpu"))
    sums = ours(*prepared[:5])
    (sums.cross_entropy[0] / prepared.denominators[0, 0]).backward()
    our_logits = ours.main_logits(ids, positions, segments)
    assert worst(our_logits.detach().numpy(), logits.detach().numpy()) <= TOLERANCE
    their_parameters = dict(theirs.named_parameters())
    for name, p in ours.named_parameters():
        if p.requires_grad:
            assert worst(p.grad.numpy(), their_parameters[name].grad.numpy()) <= TOLERANCE, name
