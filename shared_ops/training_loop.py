"""The training loop of both twins: data, steps, validation, record, checkpoints, a clean stop.

A twin brings its model as a `Twin`; nothing here knows its framework.
"""

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np

from shared_ops.batch import Batch, training_batch
from shared_ops.config import RunConfig
from shared_ops.data.manifest import Manifest, load_manifest
from shared_ops.data.packing import PackedDataset
from shared_ops.data.prepare import prepare
from shared_ops.data.sampler import Batches, Sampler, validation_batches
from shared_ops.errors import UserError
from shared_ops.monitor.interrupt import Interrupt
from shared_ops.monitor.recorder import Recorder
from shared_ops.monitor.report import write_report
from shared_ops.monitor.run_folder import RunFolder
from shared_ops.params import parameter_count
from shared_ops.resume import check_resumable, expected_arrays, state_meta
from shared_ops.schedule import learning_rate
from shared_ops.shares import Part, share_out
from shared_ops.training_state import StepReader, latest_step, read_step, rotate, write_step
from shared_ops.weights import Weights, open_weights


class StepValues(NamedTuple):
    """What a step reports of the whole global batch; `stop` counts the ranks that asked to stop."""

    loss: float
    aux_loss: float
    mtp_loss: float
    grad_norm: float
    stop: float
    counts: np.ndarray


class Twin(Protocol):
    """One framework's side of the training."""

    device: str
    first_step_notice: str | None  # why the first step takes long

    def step(self, batch: Batch, lr: float, update: int, stop: bool) -> StepValues:
        """Make update 1, 2, … with this rank's rows."""

    def validate(self, batch: Batch) -> tuple[float, float]:
        """(cross entropy summed over labels, number of labels) of one validation batch, over all ranks."""

    def arrays(self, parts: Iterable[Part]) -> Iterable[tuple[str, np.ndarray]]:
        """The given parts of the training state in canonical form; nothing else leaves the device."""

    def restore(self, state: StepReader, updates: int) -> None:
        """Take over a training state."""

    def load(self, weights: Weights) -> None:
        """Take over parameters only."""

    def total(self, number: float) -> float:
        """The sum of a number over all ranks, exact for integers below 2^24; waits for all of them."""

    def barrier(self) -> None:
        """Wait for all ranks."""

    def memory_bytes(self) -> int:
        """Peak memory of this rank."""


class TrainingLoop:
    """One run on one rank of `world_size`. `resume`: None, "auto" or a step folder; `weights`: what a new run begins
    with instead of initial values."""

    def __init__(
        self,
        config: RunConfig,
        twin_name: str,
        rank: int,
        world_size: int,
        resume: str | None,
        force: bool,
        weights: Path | None = None,
    ):
        self.config, self.rank, self.world_size = config, rank, world_size
        self.resume, self.force, self.weights = resume, force, weights
        self.folder = RunFolder(config.run.dir, config.run.name, twin_name).create()
        self.on_stop: Callable[[], None] = lambda: None  # called when the ranks have agreed to stop early
        config.micro_batches(world_size)  # refuses what does not divide before any work is done

    def prepare(self) -> None:
        """Make or find the data, and the training state to go on from. Every rank calls it."""
        if self.rank == 0:
            self.folder.hold()
        self.state_folder = self._find_state()
        if self.state_folder is None and self.weights is not None:
            with open_weights(self.weights, self.config.model, verify=self.rank == 0):
                pass  # what is wrong with them is told before any work
        self.data_folder, self.data = find_data(self.config, quiet=self.rank != 0)
        if self.data.vocab_size > self.config.model.vocab_size:
            raise UserError(
                f"model.vocab_size={self.config.model.vocab_size}: the tokenizer of {self.data_folder} has "
                f"{self.data.vocab_size} tokens, and its ids must fit"
            )
        length = self.config.train.sequence_length
        dataset = PackedDataset(self.data_folder, "train", length)
        sampler = Sampler(len(dataset), self.config.run.seed)
        self.batches = Batches(dataset, sampler, self.config.train.global_batch_size, self.rank, self.world_size)
        self.start, self.consumed = 0, 0
        if self.state_folder is not None:
            meta, state = read_step(self.state_folder, verify=self.rank == 0)
            with state:
                check_resumable(meta, self.config, self.data.key, str(self.state_folder), self.force)
                state.check(expected_arrays(self.config), [np.float32])
            self.start, self.consumed = meta["step"], meta["consumed_samples"]

    def run(self, twin: Twin) -> None:
        """Train to the end, or until a rank is asked to stop."""
        if twin.total(self.start if self.rank == 0 else 0) != self.start:
            raise UserError(
                f"{self.folder.checkpoints}: rank {self.rank} finds the checkpoint of step {self.start} there, rank 0 "
                "another one: run.dir must be on a file system that all machines share"
            )
        if self.state_folder is not None:
            _, state = read_step(self.state_folder, verify=False)
            with state:
                twin.restore(state, self.start)
        elif self.weights is not None:
            with open_weights(self.weights, self.config.model, verify=False) as weights:
                twin.load(weights)
        twin.barrier()  # rank 0 may rename now what the others have read
        last = self.config.train.last_step
        recorder = None
        if self.rank == 0:
            resumed_here = self.state_folder is not None and self._is_own(self.state_folder)
            start = self.start if resumed_here else 0
            tensorboard = self.config.monitor.tensorboard
            recorder = Recorder(self.folder, last, start, resumed_here, tensorboard=tensorboard)
            self._announce(recorder, twin)
        twin.barrier()  # nobody looks at the checkpoints before rank 0 has put a former run's aside
        try:
            self._loop(twin, recorder, last)
        finally:
            if recorder:
                recorder.close()

    # --- the parts of a run ---

    def _loop(self, twin: Twin, recorder: Recorder | None, last: int) -> None:
        train, step, saved, stopped = self.config.train, self.start, self.start, False
        clock = Clock(train.global_batch_size * train.sequence_length)
        with Interrupt(announce=self.rank == 0) as interrupt:
            while step < last and not stopped:
                step += 1
                batch = training_batch(self.batches.at(self.consumed), self.config.model.num_nextn_predict_layers)
                lr = learning_rate(self.config.optim, step, train.steps)
                values = twin.step(batch, lr, step, interrupt.requested)
                self.consumed += train.global_batch_size
                stopped = values.stop > 0
                if stopped:
                    interrupt.settle()
                    self.on_stop()
                clock.tick()
                ends = step == last or stopped
                if recorder and (step % train.log_steps == 0 or step == self.start + 1 or ends):
                    recorder.train(self._row(step, values, lr, clock, twin.memory_bytes()))
                    clock.restart()
                if train.validate_steps and not stopped and (step % train.validate_steps == 0 or step == last):
                    value = self._validate(twin)
                    if recorder:
                        recorder.validation(step, value)
                    clock.restart()
                every = self.config.checkpoint.save_steps
                if ends or (every and step % every == 0):
                    self._save(twin, step)
                    saved = step
                    clock.restart()
        if recorder:
            self._conclude(recorder, step, last, saved, stopped)
        twin.barrier()

    def _row(self, step: int, values: StepValues, lr: float, clock: "Clock", memory: int) -> dict:
        layers = (str(layer) for layer in self.config.model.moe_layers)
        loads = values.counts / np.maximum(values.counts.sum(1, keepdims=True), 1)
        samples_of_tokens = self.consumed * self.config.train.sequence_length
        return {
            "step": step,
            "tokens": samples_of_tokens,
            "loss": values.loss,
            "aux_loss": values.aux_loss,
            "mtp_loss": values.mtp_loss,
            "grad_norm": values.grad_norm,
            "lr": lr,
            "tokens_per_second": clock.tokens_per_second,
            "step_seconds": clock.step_seconds,
            "expert_load": dict(zip(layers, loads, strict=True)),
            "memory_bytes": memory,
        }

    def _validate(self, twin: Twin) -> float:
        train = self.config.train
        dataset = PackedDataset(self.data_folder, "validation", train.sequence_length)
        total = labels = 0.0
        for rows in validation_batches(
            dataset, train.validation_sequences, train.global_batch_size, self.rank, self.world_size
        ):
            part_total, part_labels = twin.validate(
                training_batch(rows, self.config.model.num_nextn_predict_layers)
            )
            total, labels = total + part_total, labels + part_labels
        return total / max(labels, 1.0)

    def _save(self, twin: Twin, step: int) -> None:
        """Every rank writes its share."""
        parts = share_out(expected_arrays(self.config), self.world_size)[self.rank]
        arrays = ((name, part.place(array)) for part, (name, array) in zip(parts, twin.arrays(parts), strict=True))
        meta = state_meta(self.config, self.data.key, self.consumed)
        write_step(self.folder.checkpoints, step, arrays, meta, self.rank, self.world_size, twin.total)
        if self.rank == 0:
            rotate(self.folder.checkpoints, self.config.checkpoint.save_total_limit)
        twin.barrier()

    def _is_own(self, state_folder: Path) -> bool:
        """Whether a step folder is one of this run's, however its path is spelt."""
        return state_folder.parent.resolve() == self.folder.checkpoints.resolve()

    def _find_state(self) -> Path | None:
        if self.resume is None:
            return None
        if self.resume != "auto":
            read_step(Path(self.resume), verify=False)[1].close()  # what is wrong with it is told before any work
            return Path(self.resume)
        damages: list[str] = []
        newest = latest_step(self.folder.checkpoints, on_damage=damages.append)
        if newest is None and damages:
            raise UserError(
                f"--resume auto: no checkpoint in {self.folder.checkpoints} is whole ({damages[0]}); mend one, or "
                "start anew without --resume"
            )
        if self.rank == 0:
            for damage in damages:
                print(damage, flush=True)
        return newest

    def _announce(self, recorder: Recorder, twin: Twin) -> None:
        config, split = self.config, self.data.splits["train"]
        count = parameter_count(config.model)
        self.folder.write_config(config.to_yaml())
        entropy = split.unigram_entropy
        facts = {"parameters": count, "unigram_entropy": entropy, "ranks": self.world_size, "device": twin.device,
                 "data": str(self.data_folder)}  # fmt: skip
        self.folder.write_facts(facts)
        recorder.message(
            f"model {config.model.model_type}, {count / 1e6:,.1f} M parameters; {self.world_size} process(es) on "
            f"{twin.device}; {config.train.precision}"
        )
        recorder.message(
            f"data {self.data_folder}: {split.tokens:,} training tokens, unigram entropy {entropy:.4f} nats"
        )
        recorder.message(f"run folder {self.folder.path}")
        if self.state_folder is not None:
            recorder.message(f"going on after step {self.start}, from {self.state_folder}")
            if self.weights is not None:
                recorder.message(f"--weights {self.weights} is for a new run: not used")
        elif self.weights is not None:
            recorder.message(f"beginning with the weights in {self.weights}")
        if self.start >= config.train.last_step:
            recorder.message(
                "nothing left to do; to go on raise train.stop_after, or train.steps and --force a new schedule"
            )
        elif twin.first_step_notice:
            recorder.message(twin.first_step_notice)

    def _conclude(self, recorder: Recorder, step: int, last: int, saved: int, stopped: bool) -> None:
        recorder.progress.close()
        if len(recorder.history) and (text := recorder.summary()):
            recorder.message(text)
        entropy = self.data.splits["train"].unigram_entropy
        history = recorder.history
        for what, losses in (("final loss", history.train["loss"]), ("validation", history.validation["val_loss"])):
            if losses and entropy is not None:
                side = "below" if losses[-1] < entropy else "above"
                recorder.message(
                    f"{what} {losses[-1]:.4f}: {abs(entropy - losses[-1]):.4f} nats {side} the unigram entropy "
                    f"{entropy:.4f} of the data"
                )
        recorder.close()
        if self.config.monitor.report and len(recorder.history):
            write_report(self.folder.path)
            recorder.message(f"report      {self.folder.report}")
        recorder.message(f"metrics     {self.folder.metrics}")
        if saved > self.start or self.state_folder is not None:
            recorder.message(f"checkpoint  {self.folder.checkpoints / f'step_{saved:08d}'}")
        if stopped:
            recorder.message(f"stopped after step {step} of {last}; to go on, give the same command with --resume auto")


class Clock:
    """Seconds per step since the last restart; a process's first step, which compiles, is left out."""

    def __init__(self, tokens_per_step: int):
        self.tokens_per_step = tokens_per_step
        self.first = True
        self.began = time.perf_counter()
        self.steps, self.seconds = 0, 0.0

    def tick(self) -> None:
        """A step has ended."""
        self.seconds = time.perf_counter() - self.began
        self.steps += 1
        if self.first:  # it counts only as long as there is no other
            self.first, self.first_seconds = False, self.seconds
            self.steps, self.began = 0, time.perf_counter()

    def restart(self) -> None:
        """Begin a new measurement."""
        self.steps, self.began = 0, time.perf_counter()

    @property
    def step_seconds(self) -> float:
        return self.seconds / self.steps if self.steps else self.first_seconds

    @property
    def tokens_per_second(self) -> float:
        return self.tokens_per_step / max(self.step_seconds, 1e-9)


PREPARATION_SEED = 0  # decides which documents validate; the run's seed must not change that


def find_data(config: RunConfig, quiet: bool) -> tuple[Path, Manifest]:
    """The prepared folder of a run and its manifest; made from `data.source` where it is not there yet."""
    data = config.data
    if data.path is not None:
        return Path(data.path), load_manifest(Path(data.path))
    asked = json.dumps([data.sources, data.tokenizer, data.split]).encode()
    name = "-".join(Path(source).name or "root" for source in data.sources[:3])
    folder = Path(data.cache_dir) / f"{name}-{hashlib.blake2b(asked, digest_size=4).hexdigest()}"
    workers = os.cpu_count() or 1
    manifest = prepare(data.sources, folder, data.tokenizer, PREPARATION_SEED, tuple(data.split), workers, quiet)
    return folder, manifest
