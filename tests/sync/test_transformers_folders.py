"""What transformers saves converts to every format and back to the bit, and what is exported loads in transformers."""

import json

import numpy as np
import pytest
import torch
import transformers
from cases import tiny
from checkpoints import read_hub, small

from shared_ops.config import ModelConfig
from torch_proto.checkpoint import StateMap
from torch_proto.model import DeepseekForCausalLM
from weight_sync.canonical import open_weights
from weight_sync.conversion import convert
from weight_sync.plan import Options

FORMATS = ("torch", "mindspore", "hdf5", "onnx")
# transformers has no prediction depths, loads its V2 only where heads divide the hidden size, and reads no window
CHANGES = {"num_nextn_predict_layers": 0, "hidden_size": 48, "sliding_window": None, "num_hidden_layers": 11,
           "aux_loss_alpha": 0.0, "router_z_loss_coef": 0.0}  # fmt: skip


def run(source, destination, to, **options):
    return convert(source, destination, Options(to=to, quiet=True, sync=False, **options))


@pytest.fixture(scope="module", params=["tiny_v2", "tiny_v3"])
def saved(request, tmp_path_factory):
    """A random model with non-zero biases, saved by transformers in shards of 50 MB: hence the large vocabulary."""
    config = small(
        request.param, **(CHANGES | {"vocab_size": 260_000, "tie_word_embeddings": request.param == "tiny_v2"})
    )
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model(**config.to_hf()), attn_implementation="eager", dtype=torch.float32
    )
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if name.endswith("e_score_correction_bias"):
                tensor.copy_(torch.randn_like(tensor) - 0.5)
            elif "norm" in name:
                tensor.add_(0.3 * torch.randn_like(tensor))
            elif tensor.ndim > 1:
                tensor.copy_(0.1 * torch.randn_like(tensor))
    folder = tmp_path_factory.mktemp("saved") / request.param
    model.save_pretrained(folder, max_shard_size="50MB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    return config, model, folder


@pytest.mark.parametrize("to", FORMATS)
def test_every_format_and_back(saved, tmp_path, to):
    _, _, folder = saved
    run(folder, tmp_path / "x", to)
    run(tmp_path / "x", tmp_path / "back", "hf")
    assert read_hub(tmp_path / "back") == read_hub(folder)
    assert (tmp_path / "back" / "config.json").read_bytes() == (folder / "config.json").read_bytes()


def test_hf_to_onnx_to_mindspore(saved, tmp_path):
    """The import path that teams use."""
    import mindspore

    _, _, folder = saved
    run(folder, tmp_path / "onnx", "onnx")
    run(tmp_path / "onnx", tmp_path / "ms", "mindspore")
    state = {}
    for path in (tmp_path / "ms").glob("*.ckpt"):
        state |= mindspore.load_checkpoint(str(path))
    with open_weights(folder) as weights:
        assert state.keys() == weights.tensors.keys()
        for name, tensor in weights.tensors.items():
            np.testing.assert_array_equal(state[name].asnumpy(), tensor.array())


def test_what_is_exported_loads_and_computes_the_same(saved, tmp_path):
    config, model, folder = saved
    run(folder, tmp_path / "h5", "hdf5")
    run(tmp_path / "h5", tmp_path / "hf", "hf", max_file=20_000_000)
    loaded, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "hf", output_loading_info=True, attn_implementation="eager", dtype=torch.float32
    )
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"], info
    ours = our_model(tmp_path / "h5", 64)
    ids = torch.from_numpy(np.random.default_rng(1).integers(0, config.vocab_size, (2, 64)))
    positions = torch.arange(64).expand(2, -1)
    with torch.no_grad():
        expected = ours.main_logits(ids, positions, torch.ones_like(ids))
        for theirs in (model, loaded):
            logits = theirs(input_ids=ids, position_ids=positions, use_cache=False).logits
            assert (logits - expected).abs().max() <= 1e-5 * expected.abs().max()


def our_model(folder, length) -> DeepseekForCausalLM:
    """torch_proto's model with the weights of any store."""
    with open_weights(folder) as weights:
        model = DeepseekForCausalLM(weights.config, length, torch.float32)
        states = StateMap(model)
        for name, tensor in weights.tensors.items():
            with torch.no_grad():
                states.put(states.named[name], tensor.array(), tensor.entry.parameter.stacked_experts)
    return model


def test_the_prediction_layer_is_the_only_thing_unexpected(tmp_path):
    """A hub folder with its prediction layer: transformers leaves that, and only that, aside."""
    from checkpoints import canonical_values, hub_folder, hub_values

    config = ModelConfig.model_validate(tiny("tiny_v3").model_dump() | {"num_nextn_predict_layers": 1})
    values = canonical_values(config, dtype=np.float32)
    folder = hub_folder(tmp_path / "in", config, hub_values(config, values), 2)
    run(folder, tmp_path / "ms", "mindspore")
    run(tmp_path / "ms", tmp_path / "out", "hf")
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", output_loading_info=True, dtype=torch.float32
    )
    assert not info["missing_keys"] and not info["mismatched_keys"]
    layer = f"model.layers.{config.num_hidden_layers}."
    assert all(name.startswith(layer) for name in info["unexpected_keys"])
    for name, parameter in model.named_parameters():
        np.testing.assert_array_equal(parameter.detach().float().numpy(), values[name], err_msg=name)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["num_nextn_predict_layers"] == 1
