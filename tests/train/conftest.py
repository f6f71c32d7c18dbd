import jobs
import pytest


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """Where all jobs of the session run; run folders differ by name."""
    return tmp_path_factory.mktemp("jobs")


@pytest.fixture(scope="session")
def text(folder):
    """The override that names the prepared text."""
    return f"data.path={jobs.prepare_text(folder / 'text')}"


@pytest.fixture(scope="session")
def long_run(folder, text):
    """50 steps of a tiny model in one process: (twin, model) -> Job, each run once."""
    done = {}

    def get(twin, model):
        if (twin, model) not in done:
            done[twin, model] = jobs.finish(
                twin, folder, f"long_{model}", f"model={model}", text, "train.steps=50", "checkpoint.save_steps=25",
                "train.validate_steps=10",
            )  # fmt: skip
        return done[twin, model]

    return get


@pytest.fixture(scope="session")
def two_ranks(folder, text):
    """The first 20 of the same 50 steps of tiny_v3 on two ranks, in micro-batches of one row: twin -> Job."""
    done = {}

    def get(twin):
        if twin not in done:
            done[twin] = jobs.finish(
                twin, folder, "two_ranks", "model=tiny_v3", text, "train.steps=50", "train.stop_after=20",
                "train.micro_batch_size=1", "train.validate_steps=10", ranks=2,
            )  # fmt: skip
        return done[twin]

    return get
