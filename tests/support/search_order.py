"""A hook of mkdocs: what a search finds, in which order, and by which words of other libraries."""

from __future__ import annotations

from typing import Any

FIRST = ("reference/", "guides/", "optimizers")
NEVER = ("decisions/",)
# What newcomers type that a page calls otherwise, or mentions beside much else.
WORDS = {
    "benchmark.md": ["benchmark", "speed"],
    "containers.md": ["Docker", "CI", "GitHub Actions"],
    "checkpoints.md": ["save", "load", "restore", "resume training", "state_dict", "pickle"],
    "coming_from_pytorch.md": ["torch.optim"],
    "getting_started.md": ["install", "pip", "docker"],
    "guides/averages.md": ["EMA", "exponential moving average", "SWA"],
    "guides/differentiation.md": ["autograd", "backward", "loss"],
    "guides/embeddings.md": ["embedding", "sparse gradients"],
    "guides/gradient_accumulation.md": ["micro batches"],
    "guides/mixed_precision.md": ["AMP", "FP16", "float16", "half", "BF16", "bfloat16"],
    "guides/parameter_groups.md": ["param groups", "weight decay", "no decay"],
    "guides/reports.md": ["profile", "profiler"],
    "guides/schedules_and_clipping.md": [
        "learning rate decay",
        "lr scheduler",
        "warmup",
        "gradient clipping",
        "loss scaling",
        "GradScaler",
    ],
    "guides/several_processes.md": ["distributed", "multi node", "MPI", "NCCL"],
    "guides/slots_in_8_bits.md": ["8-bit", "bitsandbytes", "quantized"],
    "guides/rules.md": ["custom optimizer", "own optimizer"],
    "guides/training_loop.md": [
        "training loop",
        "freeze",
        "unfreeze",
        "requires_grad",
        "complex parameters",
        "maximize",
        "gradient ascent",
        "dict of parameters",
        "pytree",
        "list of parameters",
    ],
    "guides/workers_and_towers.md": [
        "two GPUs",
        "multi GPU",
        "data parallel",
        "distributed",
        "DDP",
    ],
    "on_a_gpu.md": ["CUDA", "streams", "CUDA graphs"],
    "on_the_cpu.md": ["threads", "compiler"],
    "report_a_bug.md": ["bug", "issue", "error report"],
    "optimizers.md": ["SGD", "Adam", "AdamW"],
}


def on_page_markdown(markdown: str, page: Any, **_: Any) -> None:
    """Sets what a page weighs in searches, by its folder, and the words that find it."""
    path = page.file.src_uri
    if path.startswith(FIRST):
        page.meta["search"] = {"boost": 2}
    elif path.startswith(NEVER):
        page.meta["search"] = {"exclude": True}
    if path in WORDS:
        page.meta["tags"] = WORDS[path]
