"""The training of spaCy's text classifier with Thinc's Adam, and with gpuopt's in its place.

    make test-thinc ARGS="-k described"      # sets up spaCy
    .venv-thinc8/bin/python -m bench.spacy_training

`spacy train` runs by the config below on a corpus of made-up words, in turn with each optimizer.
What is timed is the whole training, and the part of it in which the optimizer is called. Steps
alone are timed for models of two widths.
"""

from __future__ import annotations

import io
import tempfile
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np

from bench.harness import ROOT, make_parser, report, take_samples, write_results
from gpuopt.bench.results import Run
from gpuopt.bench.workloads import Workload

OPTIMIZERS = {"gpuopt": "gpuopt.Adam.v1", "Thinc's": "Adam.v1"}
# The defaults of spaCy's configs, and its text classifier.
CONFIG = """
[nlp]
lang = "en"
pipeline = ["textcat"]

[components]

[components.textcat]
factory = "textcat"

[components.textcat.model]
@architectures = "spacy.TextCatEnsemble.v2"
nO = null

[components.textcat.model.linear_model]
@architectures = "spacy.TextCatBOW.v3"
exclusive_classes = true
length = 262144
ngram_size = 1
no_output_layer = false

[components.textcat.model.tok2vec]
@architectures = "spacy.HashEmbedCNN.v2"
pretrained_vectors = null
width = {width}
depth = 4
embed_size = 2000
window_size = 1
maxout_pieces = 3
subword_features = true

[corpora]

[corpora.train]
@readers = "spacy.Corpus.v1"
path = "{folder}/train.spacy"

[corpora.dev]
@readers = "spacy.Corpus.v1"
path = "{folder}/dev.spacy"

[training]
train_corpus = "corpora.train"
dev_corpus = "corpora.dev"
seed = 0
max_steps = {steps}
eval_frequency = {steps}

[training.batcher]
@batchers = "spacy.batch_by_sequence.v1"
size = {batch}

[training.optimizer]
@optimizers = "{optimizer}"
beta1 = 0.9
beta2 = 0.999
L2_is_weight_decay = true
L2 = 0.01
grad_clip = 1.0
use_averages = {averages}
eps = 0.00000001
learn_rate = 0.001
"""
_LABELS = ("A", "B", "C", "D")
_WORDS = 5000
# Of a text: how many words, and how many of them tell its label.
_LENGTH, _TELLING = 20, 4


class Training(NamedTuple):
    """What one training took, and came to.

    Attributes:
        total_s: From the first batch on, with the evaluation at the end.
        optimizer_s: Of these, in `finish_update` and `step_schedules`.
        loss: The sum of all losses.
        score: Of the last evaluation, from 0 to 1.
    """

    total_s: float
    optimizer_s: float
    loss: float
    score: float


def make_corpus(folder: Path, texts: int, seed: int = 0) -> None:
    """Writes train.spacy and dev.spacy: texts of made-up words, common ones more often.

    Some words of a text are taken from those that only texts of its label have.
    """
    import spacy
    from spacy.tokens import Doc, DocBin

    rng = np.random.default_rng(seed)
    letters = np.array(list("abcdefghijklmnopqrstuvwxyz"))
    words = np.array(["".join(rng.choice(letters, rng.integers(2, 9))) for _ in range(_WORDS)])
    common = 1.0 / np.arange(1, _WORDS + 1)
    common /= common.sum()
    vocab = spacy.blank("en").vocab
    for name, number in (("train", texts), ("dev", max(texts // 10, 1))):
        docs = DocBin()
        for _ in range(number):
            label = int(rng.integers(len(_LABELS)))
            ids = rng.choice(_WORDS, _LENGTH, p=common)
            # Each label's words are every so many of all.
            telling = rng.integers(_WORDS // len(_LABELS), size=_TELLING) * len(_LABELS) + label
            ids[rng.choice(_LENGTH, _TELLING, replace=False)] = telling
            doc = Doc(vocab, words=words[ids].tolist())
            doc.cats = {each: float(each == _LABELS[label]) for each in _LABELS}
            docs.add(doc)
        docs.to_disk(folder / f"{name}.spacy")


def train(folder: Path, optimizer: str, steps: int, width: int, averages: bool) -> Training:
    """Trains a text classifier on a folder's corpus as `spacy train` does, and times it."""
    import spacy
    from spacy.training.initialize import init_nlp
    from spacy.training.loop import train as train_nlp
    from spacy.util import load_config_from_str, registry
    from thinc.api import Model

    given = {"folder": folder, "optimizer": optimizer, "steps": steps, "width": width, "batch": 32}
    config = CONFIG.format(averages=str(averages).lower(), **given)
    filled = spacy.util.load_model_from_config(load_config_from_str(config), auto_fill=True).config
    nlp = init_nlp(filled)
    spent = 0.0

    def timed(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            nonlocal spent
            started = perf_counter()
            try:
                return method(*arguments)
            finally:
                spent += perf_counter() - started

        return call

    optimizer_class = type(registry.get("optimizers", optimizer)())
    seen: dict[str, Any] = {}

    def keep_last() -> Any:
        def setup(*_: Any) -> Any:
            return (lambda info: seen.update(info or {})), lambda: None

        return setup

    registry.loggers.register("gpuopt.bench.v1", func=keep_last)
    nlp.config["training"]["logger"] = {"@loggers": "gpuopt.bench.v1"}
    methods = [(Model, "finish_update"), (optimizer_class, "step_schedules")]
    before = [getattr(owner, name) for owner, name in methods]
    started = perf_counter()
    try:
        for (owner, name), method in zip(methods, before, strict=True):
            setattr(owner, name, timed(method))
        train_nlp(nlp, stdout=io.StringIO(), stderr=io.StringIO())
    finally:
        for (owner, name), method in zip(methods, before, strict=True):
            setattr(owner, name, method)
    total = perf_counter() - started
    return Training(total, spent, seen["losses"]["textcat"], seen["score"])


def training_workloads(
    rounds: int, steps: int, texts: int, width: int, averages: bool
) -> dict[str, Run]:
    """Times trainings in turn, and returns their results."""
    samples: dict[str, dict[str, list[float]]] = {"total": {}, "optimizer": {}}
    with tempfile.TemporaryDirectory() as name:
        make_corpus(Path(name), texts)
        for number in range(-1, rounds):
            for contender, optimizer in OPTIMIZERS.items():
                done = train(Path(name), optimizer, steps, width, averages)
                print(f"{contender}: {done}", flush=True)
                if number >= 0:
                    samples["total"].setdefault(contender, []).append(1e3 * done.total_s)
                    samples["optimizer"].setdefault(contender, []).append(1e3 * done.optimizer_s)
    what = f"{steps} steps of spaCy's text classifier of width {width}, averages {averages}"
    described = {
        "total": f"{what}: all of the training",
        "optimizer": f"{what}: its calls of the optimizer",
    }
    runs = {}
    for part, of_part in samples.items():
        named = f"spacy_train_{width}{'_averages' * averages}_{part}"
        runs[named] = report(named, Workload(described[part], {}), of_part)
    return runs


def step_workload(width: int, averages: bool) -> Workload:
    """Returns steps of Thinc's model of three layers, as users measured them."""
    from thinc.api import Relu, Softmax, chain, registry

    def step(name: str) -> Callable[[], None]:
        model = chain(Relu(nO=width, nI=64), Relu(nO=width, nI=width), Softmax(nO=10, nI=width))
        model.initialize()
        rng = np.random.default_rng(0)
        for node in model.walk():
            for param in node.param_names:
                shape = node.get_param(param).shape
                node.set_grad(param, rng.normal(0, 0.01, shape).astype(np.float32))
        optimizer = registry.optimizers.get(name)(L2=0.01, use_averages=averages)

        def run() -> None:
            model.finish_update(optimizer)
            optimizer.step_schedules()

        return run

    return Workload(
        f"a step of Thinc's three layers of width {width}, averages {averages}",
        {contender: step(name) for contender, name in OPTIMIZERS.items()},
    )


def main() -> None:
    parser = make_parser("bench.spacy_training", __doc__, rounds=5)
    parser.add_argument("--steps", type=int, default=400, help="of each training")
    parser.add_argument("--texts", type=int, default=4000, help="to train on")
    options = parser.parse_args()
    runs = {}
    for averages in (False, True):
        for width in (64, 1024):
            workload = step_workload(width, averages)
            samples = take_samples(workload, 40 * options.rounds)
            name = f"thinc_step_{width}{'_averages' * averages}"
            runs[name] = report(name, workload, samples)
    for averages in (False, True):
        given = options.rounds, options.steps, options.texts, 64, averages
        runs.update(training_workloads(*given))
    if not options.no_results:
        print(f"written: {write_results(runs).relative_to(ROOT)}")


if __name__ == "__main__":
    main()
