"""The configuration: every run file loads, impossible combinations are refused readably, config.json is read and
written in both spellings."""

import json
from pathlib import Path

import pytest
import yaml

from shared_ops.config import (
    CONFIGS,
    DEFAULT_RUN_FILE,
    ModelConfig,
    RunConfig,
    load_model_config,
    load_run_config,
    read_yaml,
)
from shared_ops.errors import UserError

MODELS = sorted(path.stem for path in (CONFIGS / "models").glob("*.yaml"))
PUBLISHED = ["v2", "v2_lite", "v3"]


def refused(call, *fragments: str) -> str:
    """The message of the `UserError` that `call` raises, which must contain every fragment."""
    with pytest.raises(UserError) as error:
        call()
    for fragment in fragments:
        assert fragment in str(error.value)
    return str(error.value)


def run_file(folder: Path, text: str) -> Path:
    path = folder / "run.yaml"
    path.write_text(text, encoding="utf-8")
    return path


# --- files that come with the project ----------------------------------------------------------------------------


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_run_file_loads(path):
    config = load_run_config(path)
    assert config.micro_batches(config.parallel.dp or 1)
    assert load_run_config(path).to_yaml() == config.to_yaml()


@pytest.mark.parametrize("name", MODELS)
def test_every_model_runs_with_the_quickstart_data_and_optimizer(name):
    config = load_run_config(None, [f"model={name}", "train.sequence_length=96"])
    assert config.model == load_model_config(name)
    assert config.model.vocab_size >= 4096


def test_the_default_is_the_quickstart():
    assert load_run_config() == load_run_config(DEFAULT_RUN_FILE)
    assert load_run_config().run.name == "quickstart"


def test_a_written_configuration_reads_back_equal(tmp_path):
    config = load_run_config(None, ["model=tiny_v2", "optim.lr=3e-7", "optim.eps=1e-12", "data.source=[a, ü b]"])
    assert load_run_config(run_file(tmp_path, config.to_yaml())) == config


def test_nothing_can_be_changed_after_validation():
    config = load_run_config()
    with pytest.raises(Exception, match="frozen"):
        config.model.hidden_size = 1


# --- where a model comes from ------------------------------------------------------------------------------------


def test_model_by_name_by_path_inline_and_as_hugging_face_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = {**yaml.safe_load(DEFAULT_RUN_FILE.read_text()), "train": {"steps": 1, "global_batch_size": 2,
                                                                     "sequence_length": 8}}  # fmt: skip
    tiny = load_model_config("tiny_v3")
    plain = tiny.model_copy(update={"router_z_loss_coef": 0.0})  # config.json has no place for it

    def loaded(model, folder: Path = tmp_path) -> ModelConfig:
        return load_run_config(run_file(folder, yaml.safe_dump({**run, "model": model}))).model

    assert loaded("tiny_v3") == loaded("tiny_v3.yaml") == tiny
    assert loaded(str(CONFIGS / "models" / "tiny_v3.yaml")) == tiny
    assert loaded(tiny.model_dump()) == tiny
    hub = tmp_path / "hub"
    hub.mkdir()
    (hub / "config.json").write_text(json.dumps(plain.to_hf()))
    assert loaded("hub") == loaded(str(hub)) == loaded("hub/config.json") == load_model_config(hub) == plain
    # beside the run file comes before the working directory, both before configs/models
    runs = tmp_path / "runs"
    runs.mkdir()
    other = tiny.model_copy(update={"vocab_size": 5000})
    (tmp_path / "tiny_v3").write_text(yaml.safe_dump(other.model_dump()))
    assert loaded("tiny_v3", runs).vocab_size == 5000
    (runs / "tiny_v3").write_text(yaml.safe_dump(other.model_copy(update={"vocab_size": 6000}).model_dump()))
    assert loaded("tiny_v3", runs).vocab_size == 6000


def test_overrides_apply_in_order():
    def model(*overrides):
        return load_run_config(None, ["train.sequence_length=64", *overrides]).model

    assert model("model=tiny_v2", "model.hidden_size=48").hidden_size == 48
    assert model("model.hidden_size=48", "model=tiny_v2").hidden_size == 40
    assert model("model=tiny_v2", "model=tiny_v3").q_lora_rank == 28
    assert model("model.vocab_size=5000", "model.vocab_size=6000").vocab_size == 6000
    assert model("model=tiny_v2", "model.rope_scaling.factor=8").rope_scaling.factor == 8.0
    assert model("model=tiny_v2", "model.rope_scaling=null").rope_scaling is None
    assert model("model=tiny_v3", "model.q_lora_rank=").q_lora_rank is None


def test_overrides_of_sections_that_the_file_leaves_out():
    config = load_run_config(None, ["parallel.dp=2", "monitor.report=false", "optim.betas=[0.8, 0.99]"])
    assert config.parallel.dp == 2 and config.monitor.report is False and config.optim.betas == [0.8, 0.99]


@pytest.mark.parametrize(
    ("text", "value"),
    [("1e-3", 1e-3), ("1E-3", 1e-3), ("1.e-3", 1e-3), (".5e-2", 5e-3), ("2.0e-3", 2e-3), ("+1e3", 1e3), ("1", 1.0)],
)
def test_numbers_are_written_as_everywhere(tmp_path, text, value):
    assert load_run_config(None, [f"optim.lr={text}"]).optim.lr == value
    assert read_yaml(run_file(tmp_path, f"lr: {text}\n"))["lr"] == value


def test_what_looks_like_an_exponent_and_is_none_stays_a_word(tmp_path):
    assert read_yaml(run_file(tmp_path, "a: e3\nb: 1e\nc: 1e-3x\nd: '1e-3'\n")) == {
        "a": "e3", "b": "1e", "c": "1e-3x", "d": "1e-3",
    }  # fmt: skip


# --- what is refused ---------------------------------------------------------------------------------------------

REFUSED = [
    # unknown keys
    (["train.stepz=3"], ["unknown key train.stepz", "did you mean train.steps?"]),
    (["trian.steps=3"], ["unknown key trian", "did you mean train?"]),
    (["model.n_rooted_experts=3"], ["unknown key model.n_rooted_experts", "n_routed_experts?"]),
    (["model=tiny_v3", "model.rope_scaling.facter=2"], ["unknown key model.rope_scaling.facter", "rope_scaling.factor?"]),
    (["monitor.zzz=1"], ["unknown key monitor.zzz", "expected one of report, tensorboard"]),
    # values of the wrong kind
    (["train.steps=true"], ["train.steps=True", "valid integer"]),
    (["optim.lr=true"], ["optim.lr=True", "valid number"]),
    (["optim.lr='1e-3'"], ["optim.lr='1e-3'", "valid number"]),
    (["optim.lr=.nan"], ["optim.lr=nan", "finite"]),
    (["optim.lr=0"], ["optim.lr=0", "greater than 0"]),
    (["train.steps=2.5"], ["train.steps=2.5", "integer"]),
    (["train.steps=-1"], ["train.steps=-1", "greater than 0"]),
    (["train.steps="], ["train.steps=None"]),
    (["model.norm_topk_prob=1"], ["model.norm_topk_prob=1", "boolean"]),
    (["optim.betas=[0.9, 1.0]"], ["optim.betas.1=1.0", "less than 1"]),
    (["optim.betas=[0.9]"], ["optim.betas=[0.9]", "2 items"]),
    (["optim.schedule=cosinus"], ["optim.schedule='cosinus'", "'cosine'"]),
    (["model.topk_method=greddy"], ["model.topk_method='greddy'", "'greedy', 'group_limited_greedy' or 'noaux_tc'"]),
    (["run.name=a/b"], ["run.name='a/b'", "pattern"]),
    (["run.name=.."], ["run.name='..'"]),
    (["train.precision=fp16"], ["train.precision='fp16'", "'fp32' or 'bf16'"]),
    (["train=3"], ["train=3"]),
    (["model=3"], ["model=3"]),
    (["data.source=5"], ["data.source=5: input should be a valid string"]),
    # overrides that are none
    (["train.steps"], ["'train.steps'", "section.key=value"]),
    (["=3"], ["'=3'", "section.key=value"]),
    (["train.steps={"], ["'train.steps={'", "not valid YAML"]),
    (["train.steps={[1]: 2}"], ["'train.steps={[1]: 2}'", "not valid YAML"]),
    (["train.steps.more=3"], ["'train.steps.more=3'", "steps is a value, not a section"]),
    # combinations that cannot be
    (["model.n_group=3"], ["model.n_routed_experts=16", "divisible by n_group=3"]),
    (["model.topk_group=5"], ["model.topk_group=5", "must not exceed n_group=4"]),
    (["model.num_experts_per_tok=9"], ["model.num_experts_per_tok=9", "8 experts left after grouping", "topk_group=2"]),
    (["model.topk_method=greedy", "model.num_experts_per_tok=17"], ["num_experts_per_tok=17", "the 16 experts"]),
    (["model.n_group=16", "model.topk_group=8"], ["model.n_group=16", "at least 2 experts per group", "noaux_tc"]),
    (["model.qk_rope_head_dim=7"], ["model.qk_rope_head_dim=7", "even"]),
    (["model.first_k_dense_replace=5"], ["model.first_k_dense_replace=5", "num_hidden_layers=4"]),
    (["model.rope_theta=1"], ["model.rope_theta=1", "greater than 1"]),
    (["model.rope_scaling={factor: 0.5, original_max_position_embeddings: 32}"], ["model.rope_scaling.factor=0.5"]),
    (["model.rope_scaling.factor=2"], ["model.rope_scaling.original_max_position_embeddings is required"]),
    (["train.sequence_length=513"], ["train.sequence_length=513", "model.max_position_embeddings=512"]),
    (["train.sequence_length=2", "model.num_nextn_predict_layers=2"], ["train.sequence_length=2", "layers=2"]),
    (["train.micro_batch_size=3"], ["train.micro_batch_size=3", "divide global_batch_size=8"]),
    (["data.split=[0.5, 0.6]"], ["data.split=[0.5, 0.6]", "add up to 1"]),
    (["data.split=[1.5, -0.5]"], ["data.split.0=1.5"]),
    (["data.source="], ["data.source=None", "data.path"]),
    (["data.source=[]"], ["data.source=[]", "data.path"]),
    # models that are not there
    (["model=tiny_v9"], ["model 'tiny_v9'", "no such file", "tiny_v2, tiny_v3"]),
]  # fmt: skip


@pytest.mark.parametrize(("overrides", "fragments"), REFUSED, ids=lambda value: " ".join(value)[:50])
def test_refusals_name_key_value_and_rule(overrides, fragments):
    message = refused(lambda: load_run_config(None, overrides), *fragments)
    assert "\n" not in message and "pydantic" not in message


def test_all_findings_are_in_one_message():
    message = refused(lambda: load_run_config(None, ["train.stepz=3", "optim.lr=-1", "run.seed=x"]))
    assert "train.stepz" in message and "optim.lr=-1" in message and "run.seed='x'" in message
    assert str(DEFAULT_RUN_FILE) in message


def test_the_last_possible_value_is_taken():
    """What is refused one further on is not refused too early."""
    config = load_run_config(None, ["model.num_experts_per_tok=8", "model.topk_group=2", "train.sequence_length=512",
                                    "model.first_k_dense_replace=4", "train.micro_batch_size=8"])  # fmt: skip
    assert config.model.moe_layers == (4,)
    load_run_config(None, ["model.n_group=8", "model.topk_group=4"])
    load_run_config(None, ["model.topk_method=group_limited_greedy", "model.n_group=16", "model.topk_group=4"])
    load_run_config(None, ["train.sequence_length=2", "train.global_batch_size=1"])


@pytest.mark.parametrize(
    ("text", "fragments"),
    [
        ("run: {name: a}\nrun: {name: b}\n", ["key 'run' is given twice", "line 2"]),
        ("train:\n  steps: 1\n  steps: 2\n", ["key 'steps' is given twice", "line 3"]),
        ("run: [1\n", ["not valid YAML", "line"]),
        ("run:\n\tname: a\n", ["not valid YAML", "line 2"]),
        ("{{run}}: 1\n", ["not valid YAML", "a key must be a name"]),
        ("? [1, 2]\n: 3\n", ["not valid YAML", "a key must be a name"]),
        ("run: !!python/object:os.system {}\n", ["not valid YAML"]),
        ("- run\n", ["expected a mapping"]),
        ("", ["expected a mapping"]),
        ("1: 2\n", ["model is required", "train is required", "1=1: keys should be strings"]),
    ],
)
def test_broken_files(tmp_path, text, fragments):
    path = run_file(tmp_path, text)
    refused(lambda: load_run_config(path), str(path), *fragments)


def test_files_that_cannot_be_read(tmp_path):
    refused(lambda: load_run_config(tmp_path / "none.yaml"), str(tmp_path / "none.yaml"), "no such file")
    refused(lambda: load_run_config(tmp_path), str(tmp_path), "cannot be read")
    (tmp_path / "run.yaml").write_bytes(b"run: \xff\n")
    refused(lambda: load_run_config(tmp_path / "run.yaml"), "run.yaml", "cannot be read")
    refused(lambda: load_model_config(tmp_path / "none"), "none", "no such file")


# --- batches over ranks ------------------------------------------------------------------------------------------


def test_micro_batches():
    def split(world_size, *overrides):
        return load_run_config(None, ["train.global_batch_size=12", *overrides]).micro_batches(world_size)

    assert split(1) == (12, 1)
    assert split(3) == (4, 1)
    assert split(3, "train.micro_batch_size=2") == (2, 2)
    assert split(1, "train.micro_batch_size=1") == (1, 12)
    assert split(2, "parallel.dp=2", "train.micro_batch_size=6") == (6, 1)
    refused(lambda: split(5), "train.global_batch_size=12", "5 processes")
    refused(lambda: split(2, "train.micro_batch_size=4"), "train.micro_batch_size=4", "the 6 rows", "2 process(es)")
    refused(lambda: split(1, "parallel.dp=2"), "parallel.dp=2", "1 process(es) started", "start 2")


# --- Hugging Face's config.json ----------------------------------------------------------------------------------

YARN = {"beta_fast": 32, "beta_slow": 1, "factor": 40, "original_max_position_embeddings": 4096, "type": "yarn"}
V2_HUB = {
    "architectures": ["DeepseekV2ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV2Config"}, "aux_loss_alpha": 0.001,
    "bos_token_id": 100000, "eos_token_id": 100001, "ep_size": 1, "first_k_dense_replace": 1, "hidden_act": "silu",
    "hidden_size": 5120, "initializer_range": 0.02, "intermediate_size": 12288, "kv_lora_rank": 512,
    "max_position_embeddings": 163840, "model_type": "deepseek_v2", "moe_intermediate_size": 1536, "moe_layer_freq": 1,
    "n_group": 8, "n_routed_experts": 160, "n_shared_experts": 2, "norm_topk_prob": False, "num_attention_heads": 128,
    "num_experts_per_tok": 6, "num_hidden_layers": 60, "num_key_value_heads": 128, "pretraining_tp": 1,
    "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-06,
    "rope_scaling": {**YARN, "mscale": 0.707, "mscale_all_dim": 0.707}, "rope_theta": 10000,
    "routed_scaling_factor": 16.0, "scoring_func": "softmax", "seq_aux": True, "tie_word_embeddings": False,
    "topk_group": 3, "topk_method": "group_limited_greedy", "torch_dtype": "bfloat16", "transformers_version": "4.39.3",
    "use_cache": True, "v_head_dim": 128, "vocab_size": 102400,
}  # fmt: skip
HUB = {
    "v2": V2_HUB,
    "v2_lite": V2_HUB | {
        "hidden_size": 2048, "intermediate_size": 10944, "moe_intermediate_size": 1408, "n_group": 1,
        "n_routed_experts": 64, "num_attention_heads": 16, "num_hidden_layers": 27, "num_key_value_heads": 16,
        "q_lora_rank": None, "routed_scaling_factor": 1.0, "topk_group": 1, "topk_method": "greedy",
    },
    "v3": V2_HUB | {
        "architectures": ["DeepseekV3ForCausalLM"], "bos_token_id": 0, "eos_token_id": 1, "first_k_dense_replace": 3,
        "hidden_size": 7168, "intermediate_size": 18432, "model_type": "deepseek_v3", "moe_intermediate_size": 2048,
        "n_routed_experts": 256, "n_shared_experts": 1, "norm_topk_prob": True, "num_experts_per_tok": 8,
        "num_hidden_layers": 61, "num_nextn_predict_layers": 1,
        "quantization_config": {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8",
                                "weight_block_size": [128, 128]},
        "rope_scaling": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}, "routed_scaling_factor": 2.5,
        "scoring_func": "sigmoid", "topk_group": 4, "topk_method": "noaux_tc", "vocab_size": 129280,
    },
}  # fmt: skip
# the hub's files keep the class defaults here, configs/models has the papers' values of the training
OF_THE_TRAINING = {"initializer_range", "aux_loss_alpha"}
OURS_ALONE = {"router_z_loss_coef", "mtp_loss_weight", "expert_placement"}


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_published_config_json_is_our_model_file(name):
    hub = ModelConfig.from_hf(HUB[name]).model_dump(exclude=OF_THE_TRAINING)
    assert hub == load_model_config(name).model_dump(exclude=OF_THE_TRAINING)


@pytest.mark.parametrize("name", MODELS)
def test_to_hf_and_back(name):
    model = load_model_config(name)
    back = ModelConfig.from_hf(json.loads(json.dumps(model.to_hf())))
    assert back.model_dump(exclude=OURS_ALONE) == model.model_dump(exclude=OURS_ALONE)


def transformers_config(values: dict):
    from transformers.models.deepseek_v2.configuration_deepseek_v2 import DeepseekV2Config
    from transformers.models.deepseek_v3.configuration_deepseek_v3 import DeepseekV3Config

    kind = {"deepseek_v2": DeepseekV2Config, "deepseek_v3": DeepseekV3Config}[values["model_type"]]
    return kind(**{key: value for key, value in values.items() if key not in ("auto_map", "quantization_config")})


@pytest.mark.parametrize("name", [*PUBLISHED, "tiny_v3", "no_yarn"])
def test_what_transformers_writes_reads_as_what_the_hub_has(name):
    hub = {**HUB, "tiny_v3": load_model_config("tiny_v3").to_hf(), "no_yarn": V2_HUB | {"rope_scaling": None}}[name]
    expected = ModelConfig.from_hf(hub)
    config = transformers_config(hub)
    written = config.to_dict()
    assert "rope_scaling" not in written and written["rope_parameters"]["rope_theta"] == hub["rope_theta"]
    assert ModelConfig.from_hf(written) == expected
    assert ModelConfig.from_hf(json.loads(config.to_json_string())) == expected


def test_transformers_reads_what_we_write():
    model = load_model_config("tiny_v3")
    config = transformers_config(model.to_hf())
    for key in ("hidden_size", "n_group", "q_lora_rank", "routed_scaling_factor", "num_nextn_predict_layers"):
        assert getattr(config, key) == getattr(model, key)
    assert config.rope_parameters["mscale_all_dim"] == 0.707 and config.rope_parameters["rope_theta"] == 1000.0


@pytest.mark.parametrize("absent", [{}, {"topk_method": None, "scoring_func": None}])
def test_absent_routing_follows_the_model_type(absent):
    kinds = {"v2": ("greedy", "softmax", False), "v3": ("noaux_tc", "sigmoid", True)}
    for name, expected in kinds.items():
        values = {key: value for key, value in HUB[name].items()
                  if key not in ("topk_method", "scoring_func", "norm_topk_prob")}  # fmt: skip
        model = ModelConfig.from_hf(values | absent)
        assert (model.topk_method, model.scoring_func, model.norm_topk_prob) == expected


def test_other_absent_keys_have_transformers_values():
    keys = ("n_shared_experts", "routed_scaling_factor", "n_group", "topk_group")
    for name in ("v2", "v3"):
        values = {key: value for key, value in HUB[name].items() if key not in keys}
        if name == "v2":
            values["topk_method"] = "greedy"  # what transformers takes with its n_group of None
        model, config = ModelConfig.from_hf(values), transformers_config(values)
        for key in keys:
            assert getattr(model, key) == (getattr(config, key) or 1)
    assert ModelConfig.from_hf(HUB["v2"] | {"n_shared_experts": None}).n_shared_experts == 0
    assert ModelConfig.from_hf(HUB["v2_lite"] | {"n_group": None, "topk_group": None}).n_group == 1


@pytest.mark.parametrize(
    ("change", "fragments"),
    [
        ({"n_rooted_experts": 4}, ["unknown key n_rooted_experts", "n_routed_experts?"]),
        ({"index_topk": 2048}, ["unknown key index_topk"]),
        ({"model_type": "llama"}, ["model_type='llama'", "deepseek_v2"]),
        ({"model_type": ["deepseek_v3"]}, ["model_type="]),
        ({"hidden_act": "gelu"}, ["hidden_act='gelu'", "'silu'"]),
        ({"attention_bias": True}, ["attention_bias=True"]),
        ({"moe_layer_freq": 2}, ["moe_layer_freq=2"]),
        ({"rope_interleave": False}, ["rope_interleave=False"]),
        ({"seq_aux": False}, ["seq_aux=False"]),
        ({"num_key_value_heads": 8}, ["num_key_value_heads=8", "num_attention_heads"]),
        ({"num_experts_per_tok": None}, ["num_experts_per_tok=None"]),
        ({"vocab_size": "129280"}, ["vocab_size='129280'"]),
        ({"rope_theta": "1e4"}, ["rope_theta='1e4'"]),
        ({"rope_theta": 0}, ["rope_theta=0"]),
        ({"rope_scaling": "yarn"}, ["rope_scaling='yarn'", "object"]),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, ["'linear'", "yarn"]),
        ({"rope_scaling": {"factor": 2}}, ["rope type"]),
        ({"rope_scaling": {**YARN, "factor": True}}, ["rope_scaling.factor=True"]),
        ({"rope_scaling": {**YARN, "long_factor": [1]}}, ["unknown key rope_scaling.long_factor"]),
        ({"rope_scaling": {**YARN, "truncate": False}}, ["truncate", "not supported"]),
        ({"rope_scaling": {**YARN, "attention_factor": 2.0}}, ["attention_factor", "not supported"]),
    ],
    ids=lambda value: "-".join(value)[:40],
)
def test_config_json_that_is_refused(change, fragments):
    refused(lambda: ModelConfig.from_hf(HUB["v3"] | change, "here/config.json"), "here/config.json", *fragments)


@pytest.mark.parametrize("text", ["{", "[]", "3", "null", "\xff"])
def test_config_json_that_is_none(tmp_path, text):
    (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
    refused(lambda: load_model_config(tmp_path), str(tmp_path / "config.json"))


def test_sections_and_keys_that_scripts_rely_on():
    keys = {
        "run": "name dir seed",
        "data": "source path tokenizer split",
        "train": "steps stop_after global_batch_size micro_batch_size sequence_length precision validate_steps "
                 "log_steps",
        "optim": "lr warmup_steps schedule betas eps weight_decay clip_grad_norm bias_update_rate",
        "parallel": "dp",
        "checkpoint": "save_steps save_total_limit",
        "monitor": "",
    }  # fmt: skip
    assert set(keys) | {"model"} == set(RunConfig.model_fields)
    for section, names in keys.items():
        assert set(names.split()) <= set(RunConfig.model_fields[section].annotation.model_fields)
