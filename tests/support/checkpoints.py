"""Hub checkpoints by hand: names written here once more, independently of weight_sync's table."""

import json
from pathlib import Path

import ml_dtypes
import numpy as np

from shared_ops.config import ModelConfig, load_model_config
from shared_ops.params import CORRECTION_BIAS, manifest

SAFETENSORS = {"bfloat16": "BF16", "float16": "F16", "float32": "F32", "float64": "F64", "float8_e4m3fn": "F8_E4M3",
               "float8_e8m0fnu": "F8_E8M0", "int8": "I8", "uint8": "U8", "int32": "I32", "int64": "I64"}  # fmt: skip
BF16 = np.dtype(ml_dtypes.bfloat16)


def small(name: str = "tiny_v3", **changes) -> ModelConfig:
    """Thirteen layers and twelve experts, as narrow as they can be."""
    base = {"num_hidden_layers": 13, "vocab_size": 300, "first_k_dense_replace": 2}
    if name == "tiny_v3":
        base["num_nextn_predict_layers"] = 1
    return ModelConfig.model_validate(load_model_config(name).model_dump() | base | changes)


def canonical_values(config: ModelConfig, seed: int = 5, dtype: np.dtype = BF16) -> dict[str, np.ndarray]:
    """Random values, all different from each other; correction biases fp32 with negative sums."""
    generator, values = np.random.default_rng(seed), {}
    for p in manifest(config):
        value = generator.standard_normal(p.shape).astype(np.float32) * np.float32(0.05)
        if p.init == "ones":
            value += 1
        if p.name.endswith(CORRECTION_BIAS):
            values[p.name] = value - np.float32(0.3)
        else:
            values[p.name] = value.astype(dtype)
    return values


def hub_values(config: ModelConfig, canonical: dict[str, np.ndarray], copies: bool = True) -> dict[str, np.ndarray]:
    """The same weights under the hub's names: experts one by one, the prediction layer with its copies."""
    hub = {}
    for name, value in canonical.items():
        head, _, last = name.rpartition(".")
        if last == "gate_up_proj":
            for expert, both in enumerate(value):
                hub[f"{head}.{expert}.gate_proj.weight"] = both[: len(both) // 2]
                hub[f"{head}.{expert}.up_proj.weight"] = both[len(both) // 2 :]
        elif last == "down_proj":
            for expert, down in enumerate(value):
                hub[f"{head}.{expert}.down_proj.weight"] = down
        else:
            hub[name] = value
    for depth in range(config.num_nextn_predict_layers if copies else 0):
        prefix = f"model.layers.{config.num_hidden_layers + depth}."
        if prefix + "enorm.weight" in hub:
            hub[prefix + "embed_tokens.weight"] = canonical["model.embed_tokens.weight"]
            head = "model.embed_tokens.weight" if config.tie_word_embeddings else "lm_head.weight"
            hub[prefix + "shared_head.head.weight"] = canonical[head]
    return hub


def write_safetensors(path: Path, tensors: dict[str, np.ndarray], metadata: dict | None = None) -> None:
    """One file, written from the format's description."""
    header, position = {"__metadata__": metadata or {"format": "pt"}}, 0
    for name, value in tensors.items():
        header[name] = {"dtype": SAFETENSORS[value.dtype.name], "shape": list(value.shape),
                        "data_offsets": [position, position + value.nbytes]}  # fmt: skip
        position += value.nbytes
    text = json.dumps(header).encode()
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for value in tensors.values():
            file.write(np.ascontiguousarray(value).tobytes())


def hub_folder(folder: Path, config: ModelConfig, hub: dict[str, np.ndarray], shards: int = 1, **more) -> Path:
    """A folder as the hub ships it; `more` goes into config.json. Names are dealt to the shards in turn."""
    folder.mkdir(parents=True)
    text = {**config.to_hf(), "torch_dtype": "bfloat16", "bos_token_id": 0, "transformers_version": "4.33.1", **more}
    (folder / "config.json").write_text(json.dumps(text, indent=3) + "\n\n")
    if shards == 1:
        write_safetensors(folder / "model.safetensors", hub)
        return folder
    weight_map, names = {}, list(hub)
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        part = {name: hub[name] for name in names[shard::shards]}
        write_safetensors(folder / file, part)
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {"total_size": sum(v.nbytes for v in hub.values())}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def read_hub(folder: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """name -> (dtype, shape, bytes) of all safetensors files in a folder, by the library's raw interface."""
    import safetensors

    tensors = {}
    for path in sorted(folder.glob("*.safetensors")):
        for name, facts in safetensors.deserialize(path.read_bytes()):
            assert name not in tensors
            tensors[name] = (facts["dtype"], tuple(facts["shape"]), bytes(facts["data"]))
    return tensors


class Stop(Exception):
    """What ends a conversion that is cut short."""


def cut_short(monkeypatch, after: int) -> None:
    """The conversion is over, as if killed, when it has recorded `after` tensors: nothing is tidied up."""
    from weight_sync.stores import atomic

    count, record = [0], atomic.Partial.record_tensor

    def failing(self, name, facts):
        count[0] += 1
        if count[0] > after:
            raise Stop
        record(self, name, facts)

    monkeypatch.setattr(atomic.Partial, "record_tensor", failing)
