"""torch_proto against transformers on one GPU: bf16, torch.compile, some 400 million parameters, 4,096 tokens a step.

    python tests/benchmarks/gpu.py [--rounds N] [--peak-tflops X] [section.key=value …]

Each runs in a process of its own; they take turns step by step. A step is forward, backward, clipping and AdamW on
the same packed rows. transformers holds weights and moments in bf16, its fastest form: its grouped experts have no
compiled kernel for fp32 weights. torch_proto does more: master weights, moments and gradients are fp32.

Model FLOP utilisation = tokens/s * FLOPs per token / peak, the same FLOPs for both:
    6 * (matrix parameters that a token meets: all but the embedding, K/E of the routed experts)
    + 3 * layers * heads * (query width + value width) * sequence length
The second line is attention, forward and backward (3 times 2 FLOPs a product), with half the keys masked by
causality; borders of documents are not deducted, nothing is recomputed.
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence

from step_time import ask, rows, twin_step

from shared_ops.config import ModelConfig, RunConfig, load_run_config
from shared_ops.errors import UserError, run_cli
from shared_ops.params import manifest

CONTESTANTS = ("transformers", "torch_proto")
# dense bf16 peak of the SXM modules, TFLOP/s (vendor's data sheets)
PEAK_TFLOPS = {"A100": 312.0, "H100": 989.4, "H200": 989.4, "B200": 2250.0}
MODEL = {
    "model_type": "deepseek_v3", "vocab_size": 32768, "hidden_size": 1024, "intermediate_size": 2816,
    "moe_intermediate_size": 512, "num_hidden_layers": 12, "first_k_dense_replace": 1, "max_position_embeddings": 4096,
    "num_attention_heads": 8, "q_lora_rank": 512, "kv_lora_rank": 256, "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64, "v_head_dim": 128, "n_routed_experts": 16, "n_shared_experts": 1, "num_experts_per_tok": 4,
    "n_group": 4, "topk_group": 2, "topk_method": "noaux_tc", "scoring_func": "sigmoid", "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
}  # fmt: skip
FULL = [f"model={json.dumps(MODEL)}", "run.name=benchmark", "train.precision=bf16", "train.compile=true",
        "train.global_batch_size=4", "train.sequence_length=1024"]  # fmt: skip
# to see on CPU that everything runs; its figures mean nothing
TINY = [*FULL, "model.num_hidden_layers=2", "model.hidden_size=64", "model.intermediate_size=96",
        "model.moe_intermediate_size=32", "train.sequence_length=32", "train.compile=false"]  # fmt: skip


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=30, help="measured steps of each (default 30)")
    parser.add_argument("--peak-tflops", type=float, help="the GPU's dense bf16 peak, where its name does not tell")
    parser.add_argument("--tiny", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--worker", choices=CONTESTANTS, help=argparse.SUPPRESS)
    parser.add_argument("overrides", nargs="*", help="overrides of the run")
    arguments = parser.parse_intermixed_args(argv)
    config = load_run_config(None, [*(TINY if arguments.tiny else FULL), *arguments.overrides])
    if arguments.worker:
        serve(arguments.worker, config)
        return

    import torch

    if not torch.cuda.is_available() and not arguments.tiny:
        raise UserError("no GPU here (torch.cuda.is_available() is false): this benchmark needs one with bf16; "
                        "tests/benchmarks/step_time.py compares on CPU")  # fmt: skip
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    peak = arguments.peak_tflops or next((p for name, p in PEAK_TFLOPS.items() if name in device), None)
    command = [sys.executable, __file__, *argv]
    compare(config, command, arguments.rounds, device, peak)


def compare(config: RunConfig, command: list[str], rounds: int, device: str, peak_tflops: float | None) -> None:
    """Start the workers, let them take turns, print the table."""
    workers = {}
    for name in CONTESTANTS:
        workers[name] = subprocess.Popen(
            [*command, "--worker", name], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        print(f"{name}: {ask(workers[name])['ready']}", flush=True)
    seconds = {name: [] for name in CONTESTANTS}
    for _ in range(rounds):
        for name, worker in workers.items():
            seconds[name].append(ask(worker, "step")["seconds"])
    peaks = {name: ask(worker, "end")["peak_bytes"] for name, worker in workers.items()}
    tokens = config.train.global_batch_size * config.train.sequence_length
    total = sum(p.size for p in manifest(config.model))
    flops = flops_per_token(config.model, config.train.sequence_length)
    print(f"\n{device}; {total / 1e6:.0f} M parameters, {tokens} tokens a step, {flops / 1e9:.2f} GFLOP a token, "
          f"median of {rounds} steps; peak of the GPU {peak_tflops or 'unknown (--peak-tflops)'} TFLOP/s")  # fmt: skip
    print(f"{'':14}{'step ms':>9}{'min ms':>9}{'tokens/s':>10}{'to transformers':>17}{'peak MiB':>10}{'MFU':>8}")
    base = statistics.median(seconds[CONTESTANTS[0]])
    for name in CONTESTANTS:
        median = statistics.median(seconds[name])
        used = f"{tokens / median * flops / (peak_tflops * 1e12):.1%}" if peak_tflops else "-"
        print(f"{name:14}{1e3 * median:9.2f}{1e3 * min(seconds[name]):9.2f}{tokens / median:10.0f}"
              f"{f'{median / base:.2f}':>17}{peaks[name] / 2**20:10.0f}{used:>8}")  # fmt: skip


def flops_per_token(c: ModelConfig, length: int) -> float:
    """Forward and backward, as the docstring on top says."""
    met = sum(
        p.size * (c.num_experts_per_tok / c.n_routed_experts if p.stacked_experts else 1)
        for p in manifest(c)
        if len(p.shape) > 1 and p.name != "model.embed_tokens.weight"
    )
    if c.tie_word_embeddings:
        met += c.vocab_size * c.hidden_size
    attention = c.num_hidden_layers * c.num_attention_heads * (c.qk_head_dim + c.v_head_dim) * length
    return 6 * met + 3 * attention


def serve(name: str, config: RunConfig) -> None:
    """Answer commands on standard input with JSON lines; a step ends when its loss has come from the GPU."""
    import torch

    began = time.perf_counter()
    step = transformers_step(config) if name == "transformers" else twin_step(config, name)
    losses = [step() for _ in range(5)]
    ready = f"losses {losses[0]:.4f} … {losses[-1]:.4f}, {time.perf_counter() - began:.0f} s to get there"
    print(json.dumps({"ready": ready}), flush=True)
    for line in sys.stdin:
        if line.strip() == "end":
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
            if torch.cuda.is_available():
                peak = torch.cuda.max_memory_allocated()
            print(json.dumps({"peak_bytes": peak}), flush=True)
            return
        began = time.perf_counter()
        step()
        print(json.dumps({"seconds": time.perf_counter() - began}), flush=True)


def transformers_step(config: RunConfig) -> Callable[[], float]:
    """The same step around transformers' model in bf16, compiled with its loss."""
    import torch
    import transformers

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    hf = transformers.AutoConfig.for_model(**config.model.to_hf())
    hf._experts_implementation = "grouped_mm"
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(hf, attn_implementation="sdpa", dtype=torch.bfloat16)
    model.to(device)
    optim = config.optim
    adam = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=tuple(optim.betas), eps=optim.eps, fused=True)
    batch = {key: torch.from_numpy(value).long().to(device) for key, value in rows(config).items()}
    segments, length = batch["segment_ids"], config.train.sequence_length
    visible = (segments[:, :, None] == segments[:, None, :]) & torch.ones(length, length, device=device).tril().bool()

    def loss_of(input_ids, position_ids, attention_mask, labels):
        inputs = {"input_ids": input_ids, "position_ids": position_ids, "attention_mask": attention_mask}
        logits = model(**inputs, use_cache=False).logits
        return torch.nn.functional.cross_entropy(logits.view(-1, config.model.vocab_size).float(), labels.view(-1))

    forward = torch.compile(loss_of) if config.train.compile else loss_of

    def step() -> float:
        loss = forward(batch["input_ids"], batch["position_ids"], visible[:, None], batch["labels"])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), optim.clip_grad_norm)
        adam.step()
        adam.zero_grad(set_to_none=True)
        return loss.item()

    return step


if __name__ == "__main__":
    sys.exit(run_cli(main))
