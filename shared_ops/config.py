"""Typed, strict configuration: one YAML file describes a run for both twins.

`load_run_config(path, overrides)` reads YAML, applies `key=value` overrides and validates; a `model` that names a
file (configs/models/NAME.yaml, a path, or a Hugging Face config.json) is read in place. Every problem is a
`UserError` that names the key, its value and the rule.
"""

import difflib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from shared_ops.errors import UserError

CONFIGS = Path(__file__).resolve().parent.parent / "configs"
DEFAULT_RUN_FILE = CONFIGS / "quickstart.yaml"

Positive = Annotated[int, Field(gt=0)]
NonNegative = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegativeFloat = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


AnySection = TypeVar("AnySection", bound=Section)


# --- the model ---------------------------------------------------------------------------------------------------


class RopeScaling(Section):
    """YaRN (arXiv 2309.00071) as DeepSeek uses it; `mscale_all_dim` also enters the softmax scale."""

    type: Literal["yarn"] = "yarn"
    factor: Annotated[float, Field(ge=1, allow_inf_nan=False)]
    original_max_position_embeddings: Positive
    beta_fast: PositiveFloat = 32.0
    beta_slow: PositiveFloat = 1.0
    mscale: NonNegativeFloat = 1.0
    mscale_all_dim: NonNegativeFloat = 0.0


class ModelConfig(Section):
    """The architecture of a DeepSeek-V2 or V3 model, with Hugging Face's names."""

    model_type: Literal["deepseek_v2", "deepseek_v3"]
    vocab_size: Positive
    hidden_size: Positive
    intermediate_size: Positive
    moe_intermediate_size: Positive
    num_hidden_layers: Positive
    first_k_dense_replace: NonNegative
    max_position_embeddings: Positive

    num_attention_heads: Positive
    q_lora_rank: Positive | None = None
    kv_lora_rank: Positive
    qk_nope_head_dim: Positive
    qk_rope_head_dim: Positive
    v_head_dim: Positive
    sliding_window: Positive | None = None
    rope_theta: Annotated[float, Field(gt=1, allow_inf_nan=False)] = 10000.0
    rope_scaling: RopeScaling | None = None

    n_routed_experts: Positive
    n_shared_experts: NonNegative = 0
    num_experts_per_tok: Positive
    n_group: Positive = 1
    topk_group: Positive = 1
    topk_method: Literal["greedy", "group_limited_greedy", "noaux_tc"]
    scoring_func: Literal["softmax", "sigmoid"]
    norm_topk_prob: bool
    routed_scaling_factor: PositiveFloat = 1.0
    aux_loss_alpha: NonNegativeFloat = 0.0
    router_z_loss_coef: NonNegativeFloat = 0.0
    expert_placement: str = "contiguous"

    num_nextn_predict_layers: NonNegative = 0
    mtp_loss_weight: NonNegativeFloat = 0.3

    rms_norm_eps: PositiveFloat = 1e-6
    initializer_range: PositiveFloat = 0.02
    tie_word_embeddings: bool = False

    @model_validator(mode="after")
    def _possible(self) -> Self:
        rules = [
            (self.qk_rope_head_dim % 2 == 0, "qk_rope_head_dim", "must be even: rotary dimensions come in pairs"),
            (
                self.first_k_dense_replace <= self.num_hidden_layers,
                "first_k_dense_replace",
                f"must not exceed num_hidden_layers={self.num_hidden_layers}",
            ),
            (
                self.n_routed_experts % self.n_group == 0,
                "n_routed_experts",
                f"must be divisible by n_group={self.n_group}",
            ),
            (self.topk_group <= self.n_group, "topk_group", f"must not exceed n_group={self.n_group}"),
        ]
        left = self.n_routed_experts
        if self.topk_method != "greedy":
            left = self.n_routed_experts // self.n_group * self.topk_group
        rules.append((
            self.num_experts_per_tok <= left,
            "num_experts_per_tok",
            f"must not exceed the {left} experts left after grouping (n_routed_experts={self.n_routed_experts}, "
            f"n_group={self.n_group}, topk_group={self.topk_group})",
        ))
        if self.topk_method == "noaux_tc":
            rules.append((
                self.n_routed_experts // self.n_group >= 2,
                "n_group",
                "must leave at least 2 experts per group: noaux_tc scores a group by its two best",
            ))
        for holds, key, rule in rules:
            if not holds:
                raise ValueError(f"{key}={getattr(self, key)}: {rule}")
        return self

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def has_correction_bias(self) -> bool:
        return self.topk_method == "noaux_tc"

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """Indices of the layers with routed experts, multi-token prediction layers included."""
        return tuple(range(self.first_k_dense_replace, self.num_hidden_layers + self.num_nextn_predict_layers))

    def is_moe_layer(self, layer: int) -> bool:
        return layer >= self.first_k_dense_replace

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], where: str = "config.json") -> "ModelConfig":
        """Read a Hugging Face config.json; keys that never change the model are left out.

        Both spellings of the rotary settings are read (`rope_scaling` + `rope_theta` as on the hub,
        `rope_parameters` as transformers 5 writes). Raises `UserError` for a key that could change the model and is
        not known, or for a value that this project does not implement.
        """
        if not isinstance(config, Mapping):
            raise UserError(f"{where}: expected a JSON object, got {type(config).__name__}")
        values = {key: value for key, value in config.items() if key not in _HF_IGNORED}
        for key, only in _HF_FIXED.items():
            if key in values and values.pop(key) not in only:
                raise UserError(f"{where}: {key}={config[key]!r} is not supported, expected {only[0]!r}")
        heads = values.pop("num_key_value_heads", None)
        if heads not in (None, values.get("num_attention_heads")):
            raise UserError(f"{where}: num_key_value_heads={heads} must equal num_attention_heads in MLA")
        values.pop("qk_head_dim", None)
        values.update(_read_rope(values, where))
        model_type = values.get("model_type")
        if not isinstance(model_type, str) or model_type not in _HF_ROUTING:
            raise UserError(f"{where}: model_type={model_type!r} is not supported, expected {sorted(_HF_ROUTING)}")
        values = {**_HF_ABSENT[model_type], **values}
        for key, default in _HF_ROUTING[model_type].items():
            if values.get(key) is None:
                values[key] = default
        for key in ("n_group", "topk_group", "aux_loss_alpha", "n_shared_experts", "num_nextn_predict_layers"):
            if values.get(key, 0) is None:
                values.pop(key)
        return validate(cls, values, where)

    def to_hf(self) -> dict[str, Any]:
        """The fields as the hub spells them (what this project adds to them is left out)."""
        values = self.model_dump(exclude={"expert_placement", "mtp_loss_weight", "router_z_loss_coef"})
        if self.sliding_window is None:
            del values["sliding_window"]
        name = {"deepseek_v2": "DeepseekV2ForCausalLM", "deepseek_v3": "DeepseekV3ForCausalLM"}[self.model_type]
        fixed = {"hidden_act": "silu", "attention_bias": False, "attention_dropout": 0.0, "moe_layer_freq": 1,
                 "seq_aux": True, "num_key_value_heads": self.num_attention_heads}
        return {"architectures": [name], **values, **fixed}


_HF_ROUTING = {
    "deepseek_v2": {"topk_method": "greedy", "scoring_func": "softmax", "norm_topk_prob": False},
    "deepseek_v3": {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "norm_topk_prob": True},
}
# what transformers takes for a key that is not there (null, where it may be null, means none)
_HF_ABSENT = {
    "deepseek_v2": {"n_shared_experts": 2, "routed_scaling_factor": 1.0},
    "deepseek_v3": {"n_shared_experts": 1, "routed_scaling_factor": 2.5, "n_group": 8, "topk_group": 4},
}
# what is absent, or has the first value, is what this project implements
_HF_FIXED = {
    "hidden_act": ("silu",),
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "attention_dropout": (0.0, None),
    "moe_layer_freq": (1,),
    "seq_aux": (True,),
    "rope_interleave": (True,),
    "use_sliding_window": (False, None),
}
# tokens, generation, exports, training of others, quantisation of the stored file: never the computation
_HF_IGNORED = {
    "architectures", "auto_map", "bos_token_id", "eos_token_id", "pad_token_id", "dtype", "torch_dtype", "ep_size",
    "pretraining_tp", "transformers_version", "use_cache", "quantization_config", "_name_or_path", "head_dim",
    "output_router_logits", "return_dict", "is_encoder_decoder", "output_hidden_states", "output_attentions",
    "chunk_size_feed_forward", "id2label", "label2id", "problem_type", "mlp_layer_types", "layer_types",
    "base_model_tp_plan", "base_model_pp_plan", "num_local_experts", "keys_to_ignore_at_inference",
}  # fmt: skip


def _read_rope(values: dict[str, Any], where: str) -> dict[str, Any]:
    """Move either spelling of the rotary settings to (rope_theta, rope_scaling)."""
    for key in ("rope_parameters", "rope_scaling"):
        if not isinstance(values.get(key), Mapping | None):
            raise UserError(f"{where}: {key}={values[key]!r}: expected an object or null")
    new = dict(values.pop("rope_parameters", None) or {})
    scaling = dict(values.pop("rope_scaling", None) or new)
    thetas = [values.pop("rope_theta", None), scaling.pop("rope_theta", None), new.get("rope_theta")]
    given = [theta for theta in thetas if theta is not None]
    out = {"rope_theta": given[0]} if given else {}
    kinds = {str(scaling.pop(key)) for key in ("rope_type", "type") if key in scaling}
    for key in ("partial_rotary_factor", "attention_factor", "truncate", "rope_interleave"):
        if scaling.pop(key, None) not in (None, 1.0, True):
            raise UserError(f"{where}: {key} in the rotary settings is not supported: remove it")
    if kinds <= {"default"} and not scaling:
        return out
    if kinds != {"yarn"}:
        raise UserError(f"{where}: rope type {sorted(kinds)} is not supported, expected 'yarn' or 'default'")
    out["rope_scaling"] = {"type": "yarn", **scaling}
    return out


# --- the run -----------------------------------------------------------------------------------------------------


class Run(Section):
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")] = "run"
    dir: str = "runs"
    seed: NonNegative = 0


class Data(Section):
    """`path` is a prepared folder; without it `source` (text) is prepared on first use into `cache_dir`."""

    source: str | list[str] | None = None
    path: str | None = None
    tokenizer: str = "train:4096"
    split: Annotated[list[Fraction], Field(min_length=2, max_length=2)] = [0.95, 0.05]
    cache_dir: str = "runs/data"

    @model_validator(mode="after")
    def _origin(self) -> Self:
        if not self.sources and self.path is None:
            raise ValueError(
                f"source={self.source!r}: must name text (stdlib, or files and folders) where no data.path names a "
                "prepared folder"
            )
        if abs(sum(self.split) - 1) > 1e-9:
            raise ValueError(f"split={self.split}: the fractions must add up to 1")
        return self

    @property
    def sources(self) -> list[str]:
        return [self.source] if isinstance(self.source, str) else list(self.source or [])


class Train(Section):
    steps: Positive
    stop_after: Positive | None = None
    global_batch_size: Positive
    micro_batch_size: Positive | None = None
    sequence_length: Annotated[int, Field(ge=2)]
    precision: Literal["fp32", "bf16"] = "fp32"
    validate_steps: NonNegative = 0
    validation_sequences: Positive = 64
    log_steps: Positive = 10
    kernels: Literal["auto", "composite"] = "auto"
    compile: bool = False

    @property
    def last_step(self) -> int:
        return min(self.steps, self.stop_after or self.steps)


class Optim(Section):
    lr: PositiveFloat
    warmup_steps: NonNegative = 0
    schedule: Literal["constant", "cosine", "linear", "wsd"] = "cosine"
    min_lr_ratio: Fraction = 0.1
    decay_fraction: Fraction = 0.2
    betas: Annotated[list[Annotated[float, Field(ge=0, lt=1)]], Field(min_length=2, max_length=2)] = [0.9, 0.95]
    eps: PositiveFloat = 1e-8
    weight_decay: NonNegativeFloat = 0.1
    clip_grad_norm: PositiveFloat = 1.0
    bias_update_rate: NonNegativeFloat = 0.001


class Parallel(Section):
    """`dp` counts the data-parallel ranks; left out, it is the number of processes."""

    dp: Positive | None = None


class Checkpoint(Section):
    save_steps: NonNegative = 0
    save_total_limit: Positive = 3


class Monitor(Section):
    tensorboard: bool = True
    report: bool = True


class RunConfig(Section):
    run: Run = Run()
    model: ModelConfig
    data: Data
    train: Train
    optim: Optim
    parallel: Parallel = Parallel()
    checkpoint: Checkpoint = Checkpoint()
    monitor: Monitor = Monitor()

    @field_validator("train")
    @classmethod
    def _batch(cls, train: Train) -> Train:
        if train.micro_batch_size and train.global_batch_size % train.micro_batch_size:
            raise ValueError(
                f"micro_batch_size={train.micro_batch_size}: must divide global_batch_size={train.global_batch_size}"
            )
        return train

    @model_validator(mode="after")
    def _lengths(self) -> Self:
        if self.train.sequence_length > self.model.max_position_embeddings:
            raise ValueError(
                f"train.sequence_length={self.train.sequence_length}: must not exceed "
                f"model.max_position_embeddings={self.model.max_position_embeddings}"
            )
        if self.train.sequence_length <= self.model.num_nextn_predict_layers:
            raise ValueError(
                f"train.sequence_length={self.train.sequence_length}: must exceed "
                f"model.num_nextn_predict_layers={self.model.num_nextn_predict_layers}"
            )
        return self

    def to_yaml(self) -> str:
        return yaml.safe_dump(self.model_dump(), sort_keys=False, allow_unicode=True)

    def micro_batches(self, world_size: int) -> tuple[int, int]:
        """(rows of one rank in one micro-batch, micro-batches per step) on `world_size` data-parallel ranks."""
        dp = self.parallel.dp or world_size
        if dp != world_size:
            raise UserError(
                f"parallel.dp={dp} does not match the {world_size} process(es) started: start {dp}, or leave "
                "parallel.dp out to use what is there"
            )
        total = self.train.global_batch_size
        if total % world_size:
            raise UserError(f"train.global_batch_size={total} must be divisible by the {world_size} processes")
        rows = total // world_size
        micro = self.train.micro_batch_size or rows
        if rows % micro:
            raise UserError(
                f"train.micro_batch_size={micro} must divide the {rows} rows that each of {world_size} process(es) "
                f"gets of train.global_batch_size={total}"
            )
        return micro, rows // micro


# --- reading -----------------------------------------------------------------------------------------------------


class _Loader(yaml.SafeLoader):
    """YAML in which 1e-3 is a number and a key given twice is an error."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        seen = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            problem = None
            if isinstance(key, (list, dict)):
                problem = f"a key must be a name, not {key!r}"
            elif key in seen:
                problem = f"key {key!r} is given twice"
            if problem:
                raise yaml.constructor.ConstructorError(None, None, problem, key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)[eE][-+]?[0-9]+$"),
    list("-+0123456789."),
)


def read_yaml(path: Path) -> dict[str, Any]:
    """A YAML mapping; raises `UserError` naming the file and line."""
    try:
        values = yaml.load(path.read_text(encoding="utf-8"), Loader=_Loader)
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read: {error}") from None
    except yaml.YAMLError as error:
        raise UserError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(values, dict):
        raise UserError(f"{path}: expected a mapping of keys to values")
    return values


def load_model_config(where: str | Path, near: Path | None = None) -> ModelConfig:
    """A model by file (YAML, or Hugging Face's config.json or its folder) or by name under configs/models/."""
    return validate(ModelConfig, _read_model(where, near), str(where))


def load_run_config(path: Path | None = None, overrides: Iterable[str] = ()) -> RunConfig:
    """Read the run file (default: quickstart) and apply `section.key=value` overrides in order."""
    path, overrides = Path(path) if path is not None else DEFAULT_RUN_FILE, list(overrides)
    values = read_yaml(path)
    _expand_model(values, path.parent)
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals or not key.strip():
            raise UserError(f"{override!r}: an override is written section.key=value")
        try:
            value = yaml.load(text, Loader=_Loader) if text.strip() else None
        except yaml.YAMLError:
            raise UserError(f"{override!r}: the value is not valid YAML") from None
        _set(values, key.strip().split("."), value, override)
        _expand_model(values, Path.cwd())
    where = f"{path} with {' '.join(overrides)}" if overrides else str(path)
    return validate(RunConfig, values, where)


def validate(section: type[AnySection], values: Mapping[str, Any], where: str) -> AnySection:
    """Build a section; pydantic's findings become one `UserError` that lists them all."""
    try:
        return section.model_validate(values)
    except ValidationError as error:
        lines = [_explain(section, finding) for finding in error.errors()]
        raise UserError(f"{where}: " + "; ".join(lines)) from None


def _read_model(where: str | Path, near: Path | None) -> dict[str, Any]:
    name = Path(where)
    places = [*([near / name] if near else []), name, CONFIGS / "models" / f"{name}.yaml", CONFIGS / "models" / name]
    for place in places:
        if place.is_dir():
            place = place / "config.json"
            if not place.is_file():
                raise UserError(f"{place}: no such file; a model folder needs Hugging Face's config.json")
        if place.is_file():
            break
    else:
        known = ", ".join(sorted(p.stem for p in (CONFIGS / "models").glob("*.yaml")))
        raise UserError(f"model {str(where)!r}: no such file, and no such name under configs/models ({known})")
    if place.suffix == ".json":
        try:
            return ModelConfig.from_hf(json.loads(place.read_text(encoding="utf-8")), str(place)).model_dump()
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise UserError(f"{place}: not valid JSON: {error}") from None
    return read_yaml(place)


def _expand_model(values: dict[str, Any], near: Path) -> None:
    if isinstance(values.get("model"), str):
        values["model"] = _read_model(values["model"], near)


def _set(values: dict[str, Any], path: Sequence[str], value: Any, override: str) -> None:
    *parents, last = path
    for parent in parents:
        if values.get(parent) is None:
            values[parent] = {}
        values = values[parent]
        if not isinstance(values, dict):
            raise UserError(f"{override!r}: {parent} is a value, not a section")
    values[last] = value


def _explain(section: type[BaseModel], finding: Mapping[str, Any]) -> str:
    path = list(_written(section, finding["loc"]))
    key = ".".join(path)
    if finding["type"] == "extra_forbidden":
        for part in path[:-1]:
            section = _below(section, part)
        known = list(section.model_fields)
        close = difflib.get_close_matches(path[-1], known, n=1)
        hint = f", did you mean {'.'.join([*path[:-1], close[0]])}?" if close else f", expected one of {', '.join(sorted(known))}"
        return f"unknown key {key}{hint}"
    if finding["type"] == "missing":
        return f"{key} is required"
    if finding["type"] == "model_type":
        return f"{key}={finding['input']!r}: {key} is a section, give its values as {key}.name=value"
    message = finding["msg"].removeprefix("Value error, ")
    if finding["type"] == "value_error":
        return f"{key}.{message}" if key and re.match(r"[a-z_]+=", message) else message
    return f"{key}={finding['input']!r}: {message[0].lower()}{message[1:]}"


def _written(section: type[BaseModel] | None, location: Iterable[str | int]) -> Iterator[str]:
    """The parts of a finding's location that stand in the file: pydantic adds a union's branch ("str") to it."""
    for part in location:
        if section is not None or isinstance(part, int):
            yield str(part)
        section = _below(section, part) if section is not None else None


def _below(section: type[BaseModel], key: str | int) -> type[BaseModel] | None:
    """The section under `key`, None where a plain value is."""
    field = section.model_fields.get(key)
    options = getattr(field.annotation, "__args__", (field.annotation,)) if field else ()
    return next((option for option in options if isinstance(option, type) and issubclass(option, BaseModel)), None)
