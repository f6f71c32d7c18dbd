"""transformers' own DeepseekV2/V3ForCausalLM as a side of the comparison: its calls in the form of the twins'.

It has no prediction depths, no router losses and no sliding window; `comparable` leaves the first two out of the
configuration (the window is in the mask that it is given). Where its 5.24 is another model (it ignores norm_topk_prob
in V2, keeps an eps of 1e-6 in the norms of the latents, and reads an mscale_all_dim of 0 as none), the comparison says
so.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor, nn

from shared_ops.batch import IGNORED, Batch
from shared_ops.config import ModelConfig, RunConfig
from shared_ops.errors import UserError
from shared_ops.params import manifest
from weight_sync.agreement.capture import Call, Capture, Forced, Key, Leaf, Recorder
from weight_sync.agreement.side_torch_proto import tap, with_rows

LEFT_OUT = {"num_nextn_predict_layers": 0, "aux_loss_alpha": 0.0, "router_z_loss_coef": 0.0}


def comparable(model: ModelConfig) -> tuple[ModelConfig, list[str]]:
    """The configuration without what transformers lacks, and what was left out in words.

    `UserError` where nothing comparable remains.
    """
    left_out = [f"{key}={getattr(model, key)}" for key, without in LEFT_OUT.items() if getattr(model, key) != without]
    impossible = [
        (model.n_shared_experts == 0, "n_shared_experts=0", "at least one shared expert"),
        (model.topk_method != "noaux_tc" and model.model_type == "deepseek_v3", f"topk_method={model.topk_method}",
         "noaux_tc in a deepseek_v3"),
        (model.topk_method == "noaux_tc" and model.model_type == "deepseek_v2", "topk_method=noaux_tc",
         "greedy or group_limited_greedy in a deepseek_v2"),
        (model.expert_placement != "contiguous", f"expert_placement={model.expert_placement}", "contiguous"),
        (model.scoring_func != {"deepseek_v2": "softmax", "deepseek_v3": "sigmoid"}[model.model_type],
         f"scoring_func={model.scoring_func}", "softmax in a deepseek_v2, sigmoid in a deepseek_v3"),
    ]  # fmt: skip
    for wrong, value, needed in impossible:
        if wrong:
            raise UserError(f"--pair with transformers: its model cannot have {value}, it needs {needed}; choose "
                            "another configuration, or compare ms_train,torch_proto")  # fmt: skip
    return ModelConfig.model_validate(model.model_dump() | LEFT_OUT), left_out


class Side:
    """transformers' model in eager attention, with the given parameters."""

    name = "transformers"

    def __init__(self, config: RunConfig, state: Mapping[str, np.ndarray]):
        self.config = config
        self.model = _build(config.model)
        self.trained = [p for p in manifest(config.model) if p.trainable]
        self.named = {**dict(self.model.named_parameters()), **dict(self.model.named_buffers())}
        with torch.no_grad():
            for p in manifest(config.model):
                self.named[p.name].copy_(torch.from_numpy(state[f"params/{p.name}"]))

    def source(self, path: str) -> str:
        """Where the code of a module is."""
        module = dict(self.model.named_modules()).get(path, self.model)
        return f"{type(module).__module__}.{type(module).__name__}.forward"

    def capture(self, batch: Batch, forced: Forced) -> Capture:
        """One pass over the batch, forward and backward. It makes its own choices: the twin follows them."""
        recorder = Recorder(tap, with_rows, {})
        modules = {path: m for path, m in self.model.named_modules() if _kind(path)}
        for path, module in modules.items():
            module.forward = partial(_recorded, recorder, path, module.forward)
        try:
            ids, positions, segments = (
                torch.from_numpy(a).long() for a in (batch.input_ids[0], batch.position_ids, batch.segment_ids)
            )
            logits = self.model(
                input_ids=ids, position_ids=positions, attention_mask=self._mask(segments), use_cache=False
            ).logits
            labels = torch.from_numpy(batch.labels[0].reshape(-1)).long()
            total = recorder.call("cross_entropy", "CrossEntropySum", _cross_entropy_sum, logits.flatten(0, 1), labels)
            denominators = torch.from_numpy(batch.denominators)
            loss = recorder.call("total_loss", "TotalLoss", _mean, total[None], None, None, None, denominators)
            loss.backward()
        finally:
            for module in modules.values():
                del module.forward
        calls = {}
        for key, call in recorder.calls.items():
            if call.kind == "Router":
                calls.update(self._choices(call))
            calls[key] = _as_twin(call)
        gradients = {p.name: self.named[p.name].grad.numpy() for p in self.trained}
        self.model.zero_grad()
        return Capture(calls, gradients)

    def _mask(self, segments: Tensor) -> Tensor:
        """What is added to the scores, [B, 1, S, S]: own document, not ahead, inside the window."""
        position = torch.arange(segments.shape[1])
        distance = position[:, None] - position[None, :]
        seen = distance >= 0
        if self.config.model.sliding_window is not None:
            seen = seen & (distance < self.config.model.sliding_window)
        visible = (segments[:, :, None] == segments[:, None, :]) & seen
        return torch.zeros(visible.shape).masked_fill(~visible, torch.finfo(torch.float32).min)[:, None]

    def _choices(self, call: Call) -> dict[Key, Call]:
        """The calls of TopK inside a twin's router: transformers' own choices of experts and, made again from the same
        logits, of groups."""
        c, path = self.config.model, call.key.path
        logits, _, experts = call.outputs
        chosen = {"top_experts": experts.value}
        if c.topk_method != "greedy" and c.n_group > 1:
            logits = torch.from_numpy(logits.value)
            scores = logits.sigmoid() if c.scoring_func == "sigmoid" else logits.softmax(-1, dtype=torch.float32)
            if c.has_correction_bias:
                scores = scores + self.named[f"{path}.e_score_correction_bias"]
            grouped = scores.view(len(scores), c.n_group, -1)
            best = grouped.topk(2, dim=-1)[0].sum(-1) if c.has_correction_bias else grouped.max(-1).values
            chosen["top_groups"] = torch.topk(best, c.topk_group, dim=-1, sorted=False)[1].numpy()
        keys = {Key(f"{path}.{name}", 0): indices for name, indices in chosen.items()}
        return {key: Call(key, "TopK", call.began, (), [], [Leaf(indices)]) for key, indices in keys.items()}


def _as_twin(call: Call) -> Call:
    """Inputs and outputs as a twin's module has them: tokens in one axis, choices before weights."""
    inputs, outputs = call.inputs, call.outputs
    if call.kind == "Router":  # it gives (logits, weights, experts)
        outputs = [outputs[2], outputs[1]]
    elif call.kind == "Embedding":
        inputs = [Leaf(inputs[0].value.reshape(-1))]
    elif call.kind in ("DecoderLayer", "MultiHeadLatentAttention"):
        inputs, outputs = inputs[:1], outputs[:1]
    inputs, outputs = [_flat(leaf) for leaf in inputs], [_flat(leaf) for leaf in outputs]
    return Call(call.key, call.kind, call.began, (), inputs, outputs)


def _build(model: ModelConfig) -> nn.Module:
    """The model; `UserError` where transformers refuses the configuration."""
    loud = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()  # it warns of made-up YaRN factors
    try:
        config = transformers.AutoConfig.for_model(**model.to_hf())
        return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
    except Exception as error:  # of whatever class its checks are
        reason = str(error).strip().splitlines()[-1].strip()
        raise UserError(f"--pair with transformers: it refuses this configuration: {reason}") from error
    finally:
        transformers.logging.set_verbosity(loud)


_KINDS = {
    "embed_tokens": "Embedding", "self_attn": "MultiHeadLatentAttention", "mlp": "MLP", "gate": "Router",
    "experts": "RoutedExperts", "shared_experts": "MLP", "norm": "RMSNorm",
}  # fmt: skip


def _kind(path: str) -> str | None:
    """The class that the twins have at a path, None for what they have not."""
    last = path.rpartition(".")[2]
    if path.startswith("model.layers.") and last.isdigit():
        return "DecoderLayer"
    if last.endswith("layernorm"):
        return "RMSNorm"
    if last.endswith("_proj") or "_proj_" in last or last == "lm_head":
        return "Linear"
    return _KINDS.get(last)


def _recorded(recorder: Recorder, path: str, run: Callable, *arguments: Any, **named: Any) -> Any:
    """A module's call; of what comes by name only the hidden states go through the recorder."""
    hidden = [named.pop("hidden_states")] if "hidden_states" in named else arguments
    return recorder.call(path, _kind(path), lambda *given: run(*given, **named), *hidden)


def _flat(leaf: Leaf) -> Leaf:
    """[B, S, D] to [T, D]."""
    if leaf.value is None or leaf.value.ndim < 3:
        return leaf
    shape = (-1, leaf.value.shape[-1])
    gradient = None if leaf.gradient is None else leaf.gradient.reshape(shape)
    return Leaf(leaf.value.reshape(shape), gradient, leaf.tracked)


def _cross_entropy_sum(logits: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum")


def _mean(total: Tensor, _aux: None, _z: None, _counts: None, denominators: Tensor) -> Tensor:
    return (total / denominators[:, 0].clamp(min=1)).sum()
