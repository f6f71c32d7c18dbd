"""How jobs end: a rank fails, Ctrl-C, bad input. Each job starts a launcher and two ranks: 10 to 30 s."""

import os
import signal
import subprocess
import time

import jobs
import pytest

from shared_ops.training_state import read_step

TWINS = ("torch_proto", "ms_train")
SECONDS = 60  # from a rank's failure to the launcher's exit (what users are promised)


def start(twin, folder, name, *arguments, ranks=2, script=()):
    """A job in a process group of its own, as a shell starts it."""
    line = jobs.command(twin, ranks, folder / name, *script[:1]) + list(script[1:])
    line += [f"run.dir={folder / name}", f"run.name={name}", *jobs.SMALL, *arguments]
    (folder / name).mkdir()
    return subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=folder,
                            env=jobs.environment(ranks), start_new_session=True)  # fmt: skip


@pytest.mark.parametrize("how, message", [("raise", "planted failure in rank 1"), ("kill", "SIGKILL")])
@pytest.mark.parametrize("twin", TWINS)
def test_a_failing_rank_ends_the_job_with_its_message(folder, text, twin, how, message):
    name = f"fail_{how}_{twin}"
    script = (str(jobs.ROOT / "tests" / "support" / "failing_main.py"), twin, how)
    process = start(twin, folder, name, "model=tiny_v2", text, "train.steps=500", script=script)
    console, _ = process.communicate(timeout=300)
    ended = time.time() - (folder / name / "failed_at").stat().st_mtime
    assert process.returncode not in (0, None)
    assert message in console, console
    assert ended < SECONDS


@pytest.mark.parametrize(
    "twin, ranks, number",
    [("torch_proto", 1, signal.SIGTERM), ("torch_proto", 2, signal.SIGINT), ("torch_proto", 2, signal.SIGTERM),
     ("ms_train", 1, signal.SIGTERM), ("ms_train", 2, signal.SIGINT)],
)  # fmt: skip
def test_ctrl_c_saves_and_the_run_goes_on(folder, text, twin, ranks, number):
    name = f"interrupted_{twin}_{ranks}_{number}"
    process = start(twin, folder, name, "model=tiny_v2", text, "train.steps=5000", ranks=ranks)
    lines = []
    for line in process.stdout:
        lines.append(line)
        if " 3/5000 " in line:
            if number == signal.SIGINT:
                os.killpg(process.pid, number)  # what a terminal does
            else:
                process.send_signal(number)  # what a scheduler of jobs does: to the launcher alone
            break
    rest = process.stdout.read()  # until the last rank has closed the console, which may be after the launcher
    process.wait(timeout=60)
    console = "".join(lines) + rest
    assert "--resume auto" in rest and "stopped after step" in rest, console
    job = jobs.Job(twin, folder / name, name, subprocess.CompletedProcess([], process.returncode, console))
    last = job.rows[-1]["step"]
    meta, state = read_step(job.state(last))  # whole, with right checksums
    state.close()
    shards = ["state.h5"] if ranks == 1 else [f"state-{rank:05}-of-{ranks:05}.h5" for rank in range(ranks)]
    assert sorted(path.name for path in job.state(last).glob("*.h5")) == shards
    assert meta["consumed_samples"] == 4 * last
    resumed = jobs.finish(twin, folder / name, name, "model=tiny_v2", text, "train.steps=5000",
                          f"train.stop_after={last + 2}", "--resume", "auto")  # fmt: skip
    assert [row["step"] for row in resumed.rows] == list(range(1, last + 3))
    assert f"going on after step {last}" in resumed.console


@pytest.mark.parametrize("twin", TWINS)
@pytest.mark.parametrize(
    "arguments, message",
    [
        (["train.stepz=3"], "did you mean train.steps?"),
        (["--config", "nowhere.yaml"], "nowhere.yaml: no such file"),
        (["parallel.dp=2"], "parallel.dp=2 does not match"),
        (["train.micro_batch_size=3"], "micro_batch_size=3"),
        (["model.vocab_size=1000"], "the tokenizer of"),
        (["--resume", "nowhere"], "nowhere"),
    ],
)
def test_bad_input_is_one_message_and_exit_code_2(folder, text, twin, arguments, message):
    job = jobs.run(twin, folder, "bad_input", "model=tiny_v2", text, "train.steps=3", *arguments)
    assert job.code == 2, job.console
    error = [line for line in job.console.splitlines() if line.startswith("error:")]
    assert len(error) == 1 and message in error[0], job.console
    assert "Traceback" not in job.console


def test_bf16_without_bf16_arithmetic_is_refused(folder, text):
    job = jobs.run("ms_train", folder, "bf16", "model=tiny_v2", text, "train.steps=3", "train.precision=bf16")
    assert job.code == 2 and "MindSpore has no bf16 arithmetic on CPU" in job.console


@pytest.mark.parametrize("twin", TWINS)
def test_bad_input_under_the_launcher(folder, text, twin):
    process = start(twin, folder, f"bad_{twin}", "model=tiny_v2", text, "train.steps=3", "train.stepz=3")
    console, _ = process.communicate(timeout=120)
    assert process.returncode not in (0, None) and "did you mean train.steps?" in console


def test_a_resume_lists_what_differs(folder, text, long_run):
    state = str(long_run("torch_proto", "tiny_v3").state(25))
    job = jobs.run("torch_proto", folder, "other", "model=tiny_v3", text, "train.steps=50", "optim.eps=1e-6",
                   "train.global_batch_size=8", "--resume", state)  # fmt: skip
    assert job.code == 2 and "optim.eps" in job.console and "train.global_batch_size" in job.console
    forced = jobs.finish("torch_proto", folder, "other", "model=tiny_v3", text, "train.steps=27", "optim.eps=1e-6",
                         "train.global_batch_size=8", "--resume", state, "--force")  # fmt: skip
    # a changed batch size goes on by samples (P27): 25 steps of 4, then 2 of 8
    assert [row["tokens"] for row in forced.rows] == [(100 + 8) * 72, (100 + 16) * 72]


def test_a_run_folder_takes_one_job_at_a_time(folder, text):
    name = "twice"
    first = start("torch_proto", folder, name, "model=tiny_v2", text, "train.steps=5000", ranks=1)
    for line in first.stdout:
        if " 2/5000 " in line:
            break
    second = jobs.run("torch_proto", folder / name, name, "model=tiny_v2", text, "train.steps=3")
    os.killpg(first.pid, signal.SIGINT)
    rest = first.stdout.read()
    assert second.code == 2 and "another job is training" in second.console
    assert first.wait(timeout=60) == 0 and "stopped after step" in rest


def test_resume_auto_never_starts_over_because_of_damage(folder, text):
    job = jobs.finish("torch_proto", folder, "damaged", "model=tiny_v2", text, "train.steps=2")
    state = job.state(2) / "state.h5"
    state.write_bytes(state.read_bytes()[:1000])
    again = jobs.run("torch_proto", folder, "damaged", "model=tiny_v2", text, "train.steps=4", "--resume", "auto")
    assert again.code == 2 and "no checkpoint" in again.console and "state.h5" in again.console
    assert state.exists() and len(job.rows) == 2
