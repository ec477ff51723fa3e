"""Measures decode speed on CPU cores: transformers' generate, our one process, and splits of it, in one run.

    python tools/bench_decode.py --output docs/perf/bench_decode_cpu.json
    python tools/bench_decode.py --batches 16 --layouts 1 1a2f --repeats 1

All run the same random Qwen3-MoE and the same prompts, in fp32, on the same cores. A split is tried with each of its
settings (threads per rank, stages) and its best is taken. Tokens are compared with those of transformers: a request
counts as equal, as excused (it differs first where the two likeliest logits are closer than 1e-5), or as different,
which is an error. Figures are generated tokens per second of whole batches, prompts included, the median of repeats.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from tqdm import tqdm

from afd_megatron.observability.summary import hardware

ROOT = Path(__file__).resolve().parent.parent
SHAPE = {
    "num_hidden_layers": 8,
    "hidden_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "num_experts": 32,
    "moe_intermediate_size": 384,
    "num_experts_per_tok": 4,
    "vocab_size": 512,
    "intermediate_size": 1024,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "norm_topk_prob": True,
}


class Setting(NamedTuple):
    """One way to run a layout: threads of each role's ranks, and stages."""

    attention_threads: int
    ffn_threads: int
    stages: int


class Machine(NamedTuple):
    """What all threads reach together: bytes read from memory, and large products in float32."""

    read_gbs: float
    gflops: float


class Case(NamedTuple):
    """A batch to decode: the model's folder, and `batch` prompts of token ids."""

    folder: Path
    prompts: list[list[int]]
    num_new: int


def main() -> int:
    args = parse_args()
    with tempfile.TemporaryDirectory(prefix="afd_bench_") as scratch:
        folder = make_model(Path(scratch) / "model", args.seed)
        machine = measure_machine(args.cores)
        print(f"{args.cores} threads: read {machine.read_gbs:.1f} GB/s, float32 product {machine.gflops:.0f} GFLOP/s")
        rows = []
        for batch in args.batches:
            case = Case(folder, make_prompts(batch, args.prompt, args.seed), args.new)
            rows.append(measure_batch(case, args, Path(scratch)) | {"floor": floor_tokens_per_s(batch, machine)})
            print(table_row(rows[-1]), flush=True)
    report = {
        "command": " ".join(["python", *sys.argv]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": git_commit(),
        "hardware": hardware(),
        "machine": machine._asdict(),
        "shape": SHAPE,
        "prompt_tokens": args.prompt,
        "new_tokens": args.new,
        "repeats": args.repeats,
        "rows": rows,
    }
    if args.output:
        args.output.write_text(json.dumps(report, indent=2) + "\n")
    return 0 if all(run["different"] == 0 for row in rows for run in row["runs"].values()) else 1


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16, 64], help="requests at a time")
    parser.add_argument("--layouts", nargs="+", default=["1", "1a1f", "1a2f"], choices=["1", "1a1f", "1a2f"])
    parser.add_argument("--prompt", type=int, default=32, help="tokens of a prompt")
    parser.add_argument("--new", type=int, default=64, help="tokens to generate per request")
    parser.add_argument("--cores", type=int, default=2, help="cores for each contestant in all")
    parser.add_argument("--repeats", type=int, default=3, help="batches in a row per measurement")
    parser.add_argument("--seed", type=int, default=0, help="of weights and prompts")
    parser.add_argument("--output", type=Path, help="JSON file for the figures")
    return parser.parse_args()


def measure_batch(case: Case, args: argparse.Namespace, scratch: Path) -> dict[str, object]:
    """Return the figures of all contestants for one batch."""
    batch = len(case.prompts)
    tokens_per_s, expected, margins = measure_transformers(case, args.cores, args.repeats)
    runs: dict[str, dict[str, object]] = {}
    for layout in args.layouts:
        tried = []
        for setting in tqdm(settings(layout, args.cores), desc=f"batch {batch}, {layout}", leave=False):
            tried.append(measure_ours(case, layout, setting, args.repeats, scratch))
        best = max(tried, key=lambda run: run["tokens_per_s"])
        best |= compare(best.pop("token_ids"), expected, margins)
        best["tried"] = [{key: run[key] for key in ("setting", "tokens_per_s")} for run in tried]
        runs[layout] = best
    return {"batch": batch, "transformers": tokens_per_s, "runs": runs}


def measure_machine(cores: int) -> Machine:
    import torch

    torch.set_num_threads(cores)
    values, square = torch.ones(1 << 28), torch.randn(2048, 2048)
    read_s = min(timed(values.sum) for _ in range(5))
    product_s = min(timed(lambda: square @ square) for _ in range(5))
    return Machine(values.nbytes / read_s / 1e9, 2 * 2048**3 / product_s / 1e9)


def timed(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def floor_tokens_per_s(batch: int, machine: Machine) -> float:
    """Return what no decoder of this shape can pass: per step, the larger of weights read once and products done.

    Experts hit are those expected of even routing, E * (1 - (1 - k / E) ** batch). KV cache and prompts are left out.
    """
    layers, hidden, experts = SHAPE["num_hidden_layers"], SHAPE["hidden_size"], SHAPE["num_experts"]
    expert = 3 * hidden * SHAPE["moe_intermediate_size"]
    heads = 2 * SHAPE["num_attention_heads"] + 2 * SHAPE["num_key_value_heads"]
    attention = hidden * heads * SHAPE["head_dim"]
    top_k, head = SHAPE["num_experts_per_tok"], hidden * SHAPE["vocab_size"]
    num_hit = experts * (1 - (1 - top_k / experts) ** batch)
    num_bytes = 4 * (layers * (num_hit * expert + attention) + head)
    operations = 2 * batch * (layers * (top_k * expert + attention) + head)
    return batch / max(num_bytes / machine.read_gbs / 1e9, operations / machine.gflops / 1e9)


def settings(layout: str, cores: int) -> list[Setting]:
    """Return the settings worth trying for a layout on so many cores."""
    if layout == "1":
        return [Setting(cores, cores, 1), Setting(1, 1, 1)]
    if layout == "1a1f":
        return [Setting(cores, cores, 1), Setting(1, 1, 2)]
    return [Setting(cores, 1, 1), Setting(1, 1, 1)]


def measure_ours(case: Case, layout: str, setting: Setting, repeats: int, scratch: Path) -> dict[str, object]:
    """Run one job of `repeats` batches through the command line and return its speed and tokens."""
    job, output = scratch / "job.jsonl", scratch / "results.jsonl"
    lines = [
        {"id": f"{repeat}-{index}", "prompt_token_ids": prompt}
        for repeat in range(repeats)
        for index, prompt in enumerate(case.prompts)
    ]
    job.write_text("".join(json.dumps(line) + "\n" for line in lines))
    batch, length = len(case.prompts), len(case.prompts[0])
    num_ffn = 2 if layout == "1a2f" else 1
    threads = {"attention": setting.attention_threads, "ffn": setting.ffn_threads}
    if layout == "1":
        del threads["ffn"]  # one rank has both roles
    config = {
        "model": {"path": str(case.folder)},
        "topology": {"attention": {"dp": 1}, "ffn": {"ep": num_ffn}},
        "connector": {"kind": "local" if layout == "1" else "gloo"},
        "pipeline": {"stages": setting.stages},
        "engine": {
            "max_requests_per_rank": batch,
            "max_context": length + case.num_new,
            "prefill_chunk": batch * length,
        },
        "sampling": {"max_new_tokens": case.num_new, "ignore_eos": True},
        "job": {"input": str(job), "output": str(output)},
        "launch": {"threads": threads},
        "observe": {"log_level": "warning"},
    }
    path = scratch / "job.yaml"
    path.write_text(json.dumps(config))  # JSON is YAML
    command = [sys.executable, str(ROOT / "launch/afd_decode.py"), "--config", str(path), "--overwrite"]
    subprocess.run(command, check=True)
    summary = json.loads(output.with_suffix(".summary.json").read_text())
    records = {record["id"]: record["token_ids"] for record in map(json.loads, output.open())}
    return {
        "setting": setting._asdict(),
        "tokens_per_s": summary["metrics"]["output_throughput"],
        "mean_ttft_ms": summary["metrics"]["mean_ttft_ms"],
        "median_itl_ms": summary["metrics"]["median_itl_ms"],
        "token_ids": [records[f"0-{index}"] for index in range(batch)],
    }


def measure_transformers(case: Case, cores: int, repeats: int) -> tuple[float, list[list[int]], list[list[float]]]:
    """Return transformers' tokens per second, its tokens, and the margin of the two likeliest logits of each."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(cores)
    model = AutoModelForCausalLM.from_pretrained(case.folder, dtype=torch.float32).eval()
    prompts = torch.tensor(case.prompts)
    wanted = {"max_new_tokens": case.num_new, "min_new_tokens": case.num_new, "do_sample": False, "pad_token_id": 0}
    wanted["attention_mask"] = torch.ones_like(prompts)
    model.generate(prompts, **{**wanted, "max_new_tokens": 4, "min_new_tokens": 4})
    speeds = []
    for _ in range(repeats):
        start = time.perf_counter()
        out = model.generate(prompts, **wanted, output_logits=True, return_dict_in_generate=True)
        speeds.append(len(case.prompts) * case.num_new / (time.perf_counter() - start))
    top = torch.stack(out.logits, dim=1).topk(2, dim=-1).values
    tokens = out.sequences[:, prompts.shape[1] :]
    return statistics.median(speeds), tokens.tolist(), (top[..., 0] - top[..., 1]).tolist()


def compare(token_ids: list[list[int]], expected: list[list[int]], margins: list[list[float]]) -> dict[str, int]:
    """Return how many requests are equal, excused and different."""
    counts = {"equal": 0, "excused": 0, "different": 0}
    for ours, theirs, margin in zip(token_ids, expected, margins, strict=True):
        first = next((place for place, pair in enumerate(zip(ours, theirs, strict=True)) if pair[0] != pair[1]), None)
        if first is None:
            counts["equal"] += 1
        else:
            counts["excused" if margin[first] < 1e-5 else "different"] += 1
    return counts


def make_model(folder: Path, seed: int) -> Path:
    """Save a random Qwen3-MoE of SHAPE in Hugging Face layout."""
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(seed)
    config = Qwen3MoeConfig(**SHAPE, initializer_range=0.05, bos_token_id=None, eos_token_id=None, pad_token_id=None)
    Qwen3MoeForCausalLM(config).save_pretrained(folder)
    return folder


def make_prompts(batch: int, length: int, seed: int) -> list[list[int]]:
    import torch

    generator = torch.Generator().manual_seed(seed + batch)
    return torch.randint(0, SHAPE["vocab_size"], (batch, length), generator=generator).tolist()


def table_row(row: dict[str, object]) -> str:
    """Return a line for the reader: speeds, and ratios to transformers and to the one process."""
    cells = [f"batch {row['batch']:>3}: transformers {row['transformers']:.0f} tok/s, floor {row['floor']:.0f} tok/s"]
    whole = row["runs"].get("1")
    for layout, run in row["runs"].items():
        ratio = f"{run['tokens_per_s'] / row['transformers']:.2f} x transformers"
        if whole is not None and layout != "1":
            ratio += f", {run['tokens_per_s'] / whole['tokens_per_s']:.2f} x one process"
        tokens = f"{run['equal']} equal, {run['excused']} excused, {run['different']} different"
        cells.append(f"  {layout:>5} {run['tokens_per_s']:.0f} tok/s ({ratio}); {run['setting']}; tokens: {tokens}")
    return "\n".join(cells)


def git_commit() -> str:
    done = subprocess.run(["git", "-C", ROOT, "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    return done.stdout.strip() or "unknown"


if __name__ == "__main__":
    sys.exit(main())
