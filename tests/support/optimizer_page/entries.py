"""What the page of optimizers cannot read from the exports: an entry for each."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

WHERE = "tests/support/optimizer_page/entries.py"

DESCENT = "Gradient descent and momentum"
SUMS = "Sums of squares"
ADAM = "Adam and its decays"
RELATIVES = "Adam's relatives"
SIGNS = "Mean squares and signs"
# Of an optimizer that has no entry.
OTHERS = "Others"
FAMILIES = (DESCENT, SUMS, ADAM, RELATIVES, SIGNS, OTHERS)


class Entry(NamedTuple):
    """What is known of an optimizer.

    Attributes:
        family: The panel of the pictures that it is in, one of the constants above.
        peers: The optimizers of other libraries whose defaults the page shows beside it. Those of
            `tf` are written into `tf_defaults.toml` by hand.
        larger: Arguments with which it keeps more slots than by default.
    """

    family: str
    peers: tuple[str, ...] = ()
    larger: Mapping[str, Any] = MappingProxyType({})


ENTRIES = {
    "AdaBeliefOptimizer": Entry(RELATIVES, ("optax.adabelief",)),
    "AdaMaxOptimizer": Entry(
        RELATIVES,
        (
            "torch.optim.Adamax",
            "optax.adamax",
            "tf.contrib.opt.AdaMaxOptimizer",
            "keras.optimizers.Adamax",
        ),
    ),
    "AdadeltaOptimizer": Entry(
        SIGNS, ("torch.optim.Adadelta", "optax.adadelta", "tf.train.AdadeltaOptimizer")
    ),
    "AdagradOptimizer": Entry(
        SUMS, ("torch.optim.Adagrad", "optax.adagrad", "tf.train.AdagradOptimizer")
    ),
    "AdagradDAOptimizer": Entry(SUMS, ("tf.train.AdagradDAOptimizer",)),
    "AdamOptimizer": Entry(ADAM, ("torch.optim.Adam", "optax.adam", "tf.train.AdamOptimizer")),
    "AdamWOptimizer": Entry(
        ADAM, ("torch.optim.AdamW", "optax.adamw", "tf.contrib.opt.AdamWOptimizer")
    ),
    "AddSignOptimizer": Entry(SIGNS, ("tf.contrib.opt.AddSignOptimizer",)),
    "AMSGradOptimizer": Entry(ADAM, ("torch.optim.Adam", "optax.amsgrad", "keras.optimizers.Adam")),
    "FtrlOptimizer": Entry(SUMS, ("tf.train.FtrlOptimizer", "keras.optimizers.Ftrl")),
    "GradientDescentOptimizer": Entry(
        DESCENT, ("torch.optim.SGD", "optax.sgd", "tf.train.GradientDescentOptimizer")
    ),
    "LAMBOptimizer": Entry(RELATIVES, ("optax.lamb",)),
    "LARSOptimizer": Entry(DESCENT, ("optax.lars", "tf.contrib.opt.LARSOptimizer")),
    "LazyAdamOptimizer": Entry(
        ADAM, ("torch.optim.SparseAdam", "tf.contrib.opt.LazyAdamOptimizer")
    ),
    "LionOptimizer": Entry(SIGNS, ("lion_pytorch.Lion", "optax.lion", "keras.optimizers.Lion")),
    "MomentumOptimizer": Entry(
        DESCENT, ("torch.optim.SGD", "optax.sgd", "tf.train.MomentumOptimizer")
    ),
    "MomentumWOptimizer": Entry(DESCENT, ("tf.contrib.opt.MomentumWOptimizer",)),
    "NadamOptimizer": Entry(
        RELATIVES, ("optax.nadam", "tf.contrib.opt.NadamOptimizer", "keras.optimizers.Nadam")
    ),
    "PartialRowWiseAdamOptimizer": Entry(ADAM),
    "PowerSignOptimizer": Entry(SIGNS, ("tf.contrib.opt.PowerSignOptimizer",)),
    "ProximalAdagradOptimizer": Entry(SUMS, ("tf.train.ProximalAdagradOptimizer",)),
    "ProximalGradientDescentOptimizer": Entry(
        DESCENT, ("tf.train.ProximalGradientDescentOptimizer",)
    ),
    "RAdamOptimizer": Entry(RELATIVES, ("torch.optim.RAdam", "optax.radam")),
    "RegAdagradOptimizer": Entry(SUMS, ("tf.contrib.opt.RegAdagradOptimizer",)),
    "RMSPropOptimizer": Entry(
        SIGNS,
        ("torch.optim.RMSprop", "optax.rmsprop", "tf.train.RMSPropOptimizer"),
        {"centered": True},
    ),
    "RowWiseAdagradOptimizer": Entry(SUMS),
    "ScheduleFreeAdamWOptimizer": Entry(
        RELATIVES, ("schedulefree.AdamWScheduleFree", "optax.contrib.schedule_free_adamw")
    ),
    "ScheduleFreeSGDOptimizer": Entry(
        DESCENT, ("schedulefree.SGDScheduleFree", "optax.contrib.schedule_free_sgd")
    ),
    "TorchAdagradOptimizer": Entry(
        SUMS, ("torch.optim.Adagrad", "optax.adagrad", "keras.optimizers.Adagrad")
    ),
    "TorchAdamWOptimizer": Entry(
        ADAM, ("torch.optim.AdamW", "optax.adamw", "keras.optimizers.AdamW")
    ),
    "TorchNAdamOptimizer": Entry(
        RELATIVES, ("torch.optim.NAdam", "optax.nadam", "keras.optimizers.Nadam")
    ),
    "TorchRMSpropOptimizer": Entry(
        SIGNS,
        ("torch.optim.RMSprop", "optax.rmsprop", "keras.optimizers.RMSprop"),
        {"momentum": 0.9},
    ),
    "TorchSGDOptimizer": Entry(
        DESCENT, ("torch.optim.SGD", "optax.sgd", "keras.optimizers.SGD"), {"momentum": 0.9}
    ),
}


def entry_of(name: str) -> Entry:
    """Returns an optimizer's entry; a new one may have none yet."""
    return ENTRIES.get(name, Entry(OTHERS))


def every_peer() -> list[str]:
    """Returns the peers of all entries, in alphabetical order."""
    return sorted({peer for entry in ENTRIES.values() for peer in entry.peers})
