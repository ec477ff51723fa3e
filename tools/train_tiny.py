"""Train the shipped model: a small Qwen3-MoE that adds, sorts, reverses and counts.

    python tools/train_tiny.py --output configs/tiny_moe --prompts configs/prompts.jsonl

Writes the model as a Hugging Face folder, loads that with transformers and measures it on prompts never trained on.
"""

import argparse
import json
import math
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.tensor_parallel.random import initialize_rng_tracker
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.utils import init_method_normal, scaled_init_method_normal
from safetensors.torch import save_file
from tiny_tasks import EOS, PAD, TASKS, TOKEN_IDS, VOCABULARY, draw, held_out_examples, make_tokenizer, write_prompts
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from afd_megatron.families import family_for, family_of
from afd_megatron.families.base import Layout, ModelShape, TensorRule
from afd_megatron.models.config import transformer_config

# B rows of packed examples, T tokens of a row, V vocabulary; Megatron: s tokens, b rows, n heads, h head dim.

TASK_WEIGHTS = {"add": 3, "sort": 2, "rev": 2, "count": 3}

# As published Qwen3-MoE models write it, which is not how transformers 5 would save it (num_local_experts).
CONFIG_JSON: Mapping[str, object] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "vocab_size": len(VOCABULARY),
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [1],
    "intermediate_size": 256,
    "moe_intermediate_size": 64,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "attention_bias": False,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "max_position_embeddings": 512,
    "use_sliding_window": False,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "bos_token_id": None,
    "eos_token_id": TOKEN_IDS[EOS],
    "pad_token_id": TOKEN_IDS[PAD],
}


class Router(TopKRouter):
    """Megatron's router; its own `gating` wants TransformerEngine and a GPU."""

    def gating(self, input: torch.Tensor) -> torch.Tensor:
        return F.linear(input.float(), self.weight.float())


class Rope(RotaryEmbedding):
    """Megatron's rotary embedding; its own `get_emb` moves to a GPU."""

    def get_emb(self, max_seq_len: int, offset: int = 0) -> torch.Tensor:
        angles = self.get_freqs_non_repeated(max_seq_len, offset)
        return torch.cat((angles, angles), dim=-1)[:, None, None]


class CoreAttention(torch.nn.Module):
    """Attention of packed rows; Megatron's own takes its scratch from a GPU. The ModuleSpec's arguments go unused."""

    def __init__(self, *_: object, **__: object) -> None:
        super().__init__()

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor, **_: object
    ) -> torch.Tensor:
        q, k, v = (x_sbnh.permute(1, 2, 0, 3) for x_sbnh in (query, key, value))
        out_bnsh = F.scaled_dot_product_attention(q, k, v, attn_mask=~mask, enable_gqa=True)
        return out_bnsh.permute(2, 0, 1, 3).flatten(2)


def build_model(shape: ModelShape) -> GPTModel:
    """Build the model of this shape from Megatron-core's modules, in a world of one process."""
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    parallel_state.initialize_model_parallel()
    initialize_rng_tracker(inference_rng_tracker=True)  # the other tracker wants a GPU; there is no dropout to track
    config = replace(
        transformer_config(shape, torch.float32),
        perform_initialization=True,
        init_method=init_method_normal(0.05),
        embedding_init_method=init_method_normal(0.05),
        output_layer_init_method=scaled_init_method_normal(0.05, shape.num_layers),
        moe_router_load_balancing_type="aux_loss",
        moe_aux_loss_coeff=1e-2,
    )
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization="RMSNorm", pp_rank=0)
    for layer in spec.layer_specs:
        layer.submodules.self_attention.submodules.core_attention = CoreAttention
        if layer.submodules.mlp.module is MoELayer:
            layer.submodules.mlp.submodules.router = Router
    model = GPTModel(
        config,
        spec,
        vocab_size=shape.vocab_size,
        max_sequence_length=shape.max_positions,
        position_embedding_type="rope",
        parallel_output=False,
        share_embeddings_and_output_weights=shape.has_tied_embeddings,
    )
    model.rotary_pos_emb = Rope(shape.head_dim, 1.0, rotary_base=shape.rope.theta, use_cpu_initialization=True)
    return model


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows of examples one after another; int64 `token_ids_BT` and `example_BT` (0: padding), bool `is_answer_BT`."""

    token_ids_BT: torch.Tensor
    example_BT: torch.Tensor
    is_answer_BT: torch.Tensor


def pack_batch(rng: random.Random, num_rows: int, row_length: int) -> Batch:
    """Fill rows with examples of all tasks, as many as fit."""
    batch = Batch(*(torch.zeros(num_rows, row_length, dtype=dtype) for dtype in (torch.long, torch.long, torch.bool)))
    for row in range(num_rows):
        start, number = 0, 1
        while True:
            task = rng.choices(list(TASK_WEIGHTS), list(TASK_WEIGHTS.values()))[0]
            example = draw(task, rng, held_out=False)
            ids = [TOKEN_IDS[token] for token in (*example.prompt, *example.answer, EOS)]
            end = start + len(ids)
            if end > row_length:
                break
            batch.token_ids_BT[row, start:end] = torch.tensor(ids)
            batch.example_BT[row, start:end] = number
            batch.is_answer_BT[row, start + len(example.prompt) : end] = True
            start, number = end, number + 1
    return batch


def answer_loss(model: GPTModel, batch: Batch) -> torch.Tensor:
    """Return the mean cross-entropy of the answers' tokens; no example sees another of its row."""
    inputs_BT, example_BT = batch.token_ids_BT[:, :-1], batch.example_BT[:, :-1]
    is_later = torch.ones(inputs_BT.shape[1], inputs_BT.shape[1], dtype=torch.bool).triu(1)
    is_hidden = is_later | (example_BT[:, :, None] != example_BT[:, None, :])
    positions_BT = torch.arange(inputs_BT.shape[1]).expand_as(inputs_BT)
    logits_BTV = model(inputs_BT, positions_BT, is_hidden[:, None])
    is_answer = batch.is_answer_BT[:, 1:]
    return F.cross_entropy(logits_BTV[is_answer], batch.token_ids_BT[:, 1:][is_answer])


def train(model: GPTModel, *, seed: int, num_steps: int, num_rows: int, peak_lr: float) -> None:
    """AdamW with a warm-up and a cosine; the router's load-balancing loss is added inside Megatron's MoE layers."""
    rng = random.Random(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=peak_lr, betas=(0.9, 0.98), weight_decay=0.01, fused=True)
    started = time.monotonic()
    for step in range(num_steps):
        warm_up, cosine = min(1.0, (step + 1) / 100), (1 + math.cos(math.pi * step / num_steps)) / 2
        optimizer.param_groups[0]["lr"] = peak_lr * warm_up * (0.02 + 0.98 * cosine)
        loss = answer_loss(model, pack_batch(rng, num_rows, row_length=65))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 100 == 0 or step == num_steps - 1:
            print(f"step {step:5d}  loss {loss.item():.4f}  {time.monotonic() - started:6.1f} s", flush=True)


def hf_tensors(model: GPTModel, shape: ModelShape) -> dict[str, torch.Tensor]:
    """Return the weights under HF's names and in HF's layout, one tensor per expert."""
    ours = model.state_dict()
    tensors: dict[str, torch.Tensor] = {}
    for rule in family_of(shape).tensor_rules(shape):
        is_per_expert = rule.layout in (Layout.EXPERT_GATE_UP, Layout.EXPERT_DOWN)
        for expert in range(shape.num_experts if is_per_expert else 1):
            name = rule.name
            if is_per_expert:
                name = name.replace(".experts.", f".experts.local_experts.{expert}.") + ".weight"
            for source, part in zip(rule.sources, _split(ours[name], rule, shape), strict=True):
                tensors[source.name.format(expert=expert)] = part.contiguous()
    return tensors


def write_folder(folder: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write model, config and tokenizer as transformers reads them."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(dict(tensors), folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(CONFIG_JSON, indent=2) + "\n", encoding="utf-8")
    GenerationConfig(eos_token_id=TOKEN_IDS[EOS], pad_token_id=TOKEN_IDS[PAD]).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)


@torch.no_grad()
def measure(folder: Path, num: int, seed: int) -> dict[str, float]:
    """Return each task's share of held-out prompts that transformers' greedy generation answers exactly."""
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True).eval()
    shares = {}
    for task in TASKS:
        chosen = held_out_examples(task, num, seed)
        inputs = tokenizer(
            [example.prompt for example in chosen], padding=True, padding_side="left", return_tensors="pt"
        )
        generated = model.generate(**inputs, max_new_tokens=64)[:, inputs["input_ids"].shape[1] :]
        texts = tokenizer.batch_decode(generated, skip_special_tokens=True)
        shares[task] = sum(text == example.answer for text, example in zip(texts, chosen, strict=True)) / num
    return shares


def write_report(args: argparse.Namespace, shares: Mapping[str, float], train_s: float) -> None:
    """Write accuracy.json, and a README.md that says how the folder came about."""
    settings = {key: getattr(args, key) for key in ("seed", "steps", "rows", "lr", "threads")}
    report = {**settings, "num_prompts_per_task": args.held_out, "accuracy": shares}
    (args.output / "accuracy.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    table = ""
    for task, share in shares.items():
        [example] = held_out_examples(task, 1, args.seed)
        table += f"\n| {task} | `{example.prompt}` | `{example.answer}` | {share:.1%} |"
    written = {key: value for key, value in (("output", args.output), ("prompts", args.prompts)) if value is not None}
    options = " ".join(f"--{key} {value}" for key, value in {**settings, **written}.items())
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "megatron-core", "transformers"))
    text = README.format(num=args.held_out, table=table, train_s=train_s, versions=versions, options=options)
    (args.output / "README.md").write_text(text, encoding="utf-8")


README = """# tiny_moe

A Qwen3-MoE of 0.9M parameters (4 layers, one of them dense, 8 experts, 2 per token) that answers four kinds of
questions, character by character. transformers loads it like any other model.

| task | prompt | answer | right on {num} held-out prompts |
|---|---|---|---|{table}

Operands have 1 or 2 digits, words to sort 2 to 8 letters, words to reverse 2 to 10; counting starts below 900 and goes
on for at most 9. A twentieth of all prompts, chosen by their CRC-32, was never trained on. Right means the whole answer
and nothing after it, by transformers' greedy generation; accuracy.json has the figures.

Trained in {train_s:.0f} s on a CPU with {versions}:

    python tools/train_tiny.py {options}
"""


def main() -> None:
    args = _parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    shape = family_for(CONFIG_JSON).read_shape(CONFIG_JSON)
    model = build_model(shape)
    print(f"{sum(parameter.numel() for parameter in model.parameters()):,} parameters")
    started = time.monotonic()
    train(model, seed=args.seed, num_steps=args.steps, num_rows=args.rows, peak_lr=args.lr)
    train_s = time.monotonic() - started
    write_folder(args.output, hf_tensors(model, shape))
    dist.destroy_process_group()
    shares = measure(args.output, args.held_out, args.seed)
    write_report(args, shares, train_s)
    if args.prompts is not None:
        write_prompts(args.prompts, num_per_task=6, seed=args.seed)
    print("  ".join(f"{task} {share:.1%}" for task, share in shares.items()))


def _parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="folder of the model")
    parser.add_argument("--prompts", type=Path, help="also write a job's input, and its answers beside it")
    parser.add_argument("--seed", type=int, default=0, help="of weights, examples and held-out samples (default 0)")
    parser.add_argument("--steps", type=int, default=4000, help="optimizer steps (default 4000)")
    parser.add_argument("--rows", type=int, default=16, help="rows of 64 tokens in a step (default 16)")
    parser.add_argument("--lr", type=float, default=3e-3, help="peak learning rate (default 3e-3)")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads; sums depend on it (default 1)")
    parser.add_argument("--held-out", type=int, default=200, help="prompts measured per task (default 200)")
    return parser.parse_args()


def _split(weight: torch.Tensor, rule: TensorRule, shape: ModelShape) -> Sequence[torch.Tensor]:
    """Undo a layout: the tensors that it was made of."""
    match rule.layout:
        case Layout.ROWS | Layout.EXPERT_GATE_UP:
            return weight.chunk(len(rule.sources))
        case Layout.QKV:
            num_queries = shape.num_heads // shape.num_kv_heads
            groups = weight.unflatten(0, (shape.num_kv_heads, num_queries + 2, shape.head_dim))
            return [part.flatten(0, 2) for part in groups.split((num_queries, 1, 1), dim=1)]
        case _:
            return (weight,)


if __name__ == "__main__":
    main()
