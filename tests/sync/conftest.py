"""Small hub folders that several modules read; nobody writes into them."""

import pytest
from checkpoints import canonical_values, hub_folder, hub_values, small


@pytest.fixture(scope="session")
def v3(tmp_path_factory):
    """Thirteen layers, twelve experts and a prediction layer, in three shards."""
    config = small("tiny_v3")
    return hub_folder(tmp_path_factory.mktemp("hub") / "v3", config, hub_values(config, canonical_values(config)), 3)


@pytest.fixture(scope="session")
def v2(tmp_path_factory):
    """V2 with tied embeddings, one file, fp32 with one part in fp16."""
    config = small("tiny_v2")
    values = canonical_values(config, dtype="float32")
    values = {name: v.astype("float16") if "self_attn" in name else v for name, v in values.items()}
    return hub_folder(tmp_path_factory.mktemp("hub") / "v2", config, hub_values(config, values))
