"""The workloads of `python -m bench`."""

from __future__ import annotations

import os

import numpy as np
import pytest

from bench import options
from bench.harness import Offer, take_samples
from bench.workloads import HOST_OFFERS, TARGETS, offer_host_workloads
from gpuopt.bench.contenders import Contender, compiled_as_now
from gpuopt.bench.peers import NUMPY_ALONE
from gpuopt.bench.workloads import Workload


def test_targets_are_of_workloads_with_names_of_their_own() -> None:
    names = [offer.name for offer in HOST_OFFERS]
    assert len(set(names)) == len(names)
    assert all(target.workload == offer.name for offer in HOST_OFFERS for target in offer.targets)
    assert len(TARGETS) == len({(each.workload, each.quantity, each.against) for each in TARGETS})


def test_only_workloads_whose_names_match_are_offered() -> None:
    offers = offer_host_workloads("host_*_1000x64")
    assert [offer.name.split("_")[-1] for offer in offers] == ["1000x64"] * 6
    assert not list(offer_host_workloads("momentum*"))


def test_slow_workloads_are_offered_if_they_are_asked_for() -> None:
    slow = {offer.name for offer in HOST_OFFERS if offer.is_slow}
    assert {offer.name for offer in HOST_OFFERS} - slow == {
        offer.name for offer in offer_host_workloads("*")
    }
    [offer] = offer_host_workloads("demo_in_float16")
    assert offer.name in slow
    assert {offer.name for offer in offer_host_workloads("*checkpoint")} < slow


def test_a_workload_has_the_contenders_of_its_targets() -> None:
    for offer in offer_host_workloads("step_*"):
        workload = offer.make()
        assert {target.against for target in offer.targets} < workload.contenders.keys()


_OF_OPTIONS = [each for each in options.OFFERS if not each.name.startswith(("host_", "append_"))]


@pytest.mark.parametrize("offer", _OF_OPTIONS, ids=[each.name for each in _OF_OPTIONS])
def test_every_contender_of_an_option_steps(offer: Offer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(options, "_draw_gradients", lambda shapes: [np.ones(300, np.float32)])
    with compiled_as_now():
        for contender in offer.make().contenders.values():
            contender()


def test_a_contender_is_prepared_before_each_step() -> None:
    calls: list[str] = []
    ours = Contender(lambda: calls.append("step"), None, lambda: calls.append("prepare"))
    take_samples(Workload("", {"gpuopt": ours}), rounds=2)
    assert calls == ["prepare", "step"] * (len(calls) // 2)


def test_numpy_alone_steps_without_compiled_rules() -> None:
    [offer] = offer_host_workloads("host_momentum_1000x64")
    seen = {}
    with compiled_as_now():
        for name, contender in offer.make().contenders.items():
            assert isinstance(contender, Contender)
            contender.prepare()
            contender()
            seen[name] = os.environ["GPUOPT_COMPILED"]
    assert (seen["gpuopt"], seen[NUMPY_ALONE]) == ("1", "0")
