"""spaCy's own training, by a config that names gpuopt's optimizer: make test-thinc."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench import spacy_training

pytestmark = [pytest.mark.spacy, pytest.mark.filterwarnings("default")]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    spacy_training.make_corpus(folder, texts=200)
    return folder


@pytest.mark.parametrize("averages", [False, True])
def test_a_text_classifier_trains_as_with_thincs_adam(corpus: Path, averages: bool) -> None:
    trained = [
        spacy_training.train(corpus, optimizer, steps=12, width=16, averages=averages)
        for optimizer in spacy_training.OPTIMIZERS.values()
    ]
    ours, theirs = trained
    # Each step's rounding changes the gradients of the next one, and now and then a text's label.
    np.testing.assert_allclose(ours.loss, theirs.loss, rtol=1e-5)
    assert 0 < ours.optimizer_s < ours.total_s


def test_the_command_line_trains_by_the_config(corpus: Path, tmp_path: Path) -> None:
    import spacy
    from spacy.cli.init_config import fill_config
    from spacy.cli.train import train

    given: dict[str, Any] = {"width": 16, "batch": 16, "steps": 4, "averages": "true"}
    base = tmp_path / "base.cfg"
    text = spacy_training.CONFIG.format(folder=corpus, optimizer="gpuopt.Adam.v1", **given)
    base.write_text(text)
    fill_config(tmp_path / "full.cfg", base, silent=True)
    train(tmp_path / "full.cfg", tmp_path / "trained")
    nlp = spacy.load(tmp_path / "trained" / "model-last")
    assert nlp.config["training"]["optimizer"]["@optimizers"] == "gpuopt.Adam.v1"
    assert nlp("some words").cats.keys() == {"A", "B", "C", "D"}


def test_nlp_update_leaves_the_pipeline_up_to_date(corpus: Path) -> None:
    import spacy
    from spacy.tokens import DocBin
    from spacy.training import Example
    from thinc.api import registry

    losses = []
    for name in spacy_training.OPTIMIZERS.values():
        spacy.util.fix_random_seed(0)
        nlp = spacy.blank("en")
        nlp.add_pipe("textcat")
        docs = list(DocBin().from_disk(corpus / "train.spacy").get_docs(nlp.vocab))[:32]
        examples = [Example(nlp.make_doc(doc.text), doc) for doc in docs]
        nlp.initialize(lambda given=examples: given)
        optimizer = registry.optimizers.get(name)()
        of_run: list[float] = []
        for _ in range(4):  # and no step_schedules
            of_run.append(nlp.update(examples, sgd=optimizer)["textcat"])
        losses.append(of_run)
    np.testing.assert_allclose(*losses, rtol=1e-4)


def test_the_state_of_a_pipelines_training_is_saved(corpus: Path) -> None:
    import spacy
    from spacy.tokens import DocBin
    from spacy.training import Example
    from thinc.api import registry

    nlp = spacy.blank("en")
    nlp.add_pipe("textcat")
    docs = list(DocBin().from_disk(corpus / "train.spacy").get_docs(nlp.vocab))[:16]
    examples = [Example(nlp.make_doc(doc.text), doc) for doc in docs]
    nlp.initialize(lambda: examples)
    make = registry.optimizers.get("gpuopt.Adam.v1")
    optimizer = make()
    nlp.update(examples, sgd=optimizer)
    restored = make().from_bytes(optimizer.to_bytes(nlp), nlp)
    assert restored.nr_update == optimizer.nr_update
    for key, array in optimizer.mom2.items():
        np.testing.assert_array_equal(restored.mom2[key], array)
