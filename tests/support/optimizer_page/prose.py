"""What the page of optimizers says in words."""

from __future__ import annotations

import peers
from optimizer_page.forms import LEARNING_RATE

BEGINNING = """# Optimizers

<!-- `{command}` writes this page; `make gallery` draws its pictures. -->

All of them are classes of `gpuopt`, also under their short names: `gpuopt.Adam` is
`gpuopt.AdamOptimizer`. Each has [a page](#all-of-them) with its formula, state and arguments.

## Choosing one

| your case | take | because |
|---|---|---|
"""

# What one would train; the optimizers to try, best first; and why, or how.
GUIDE = (
    (
        "You do not know",
        ("TorchAdamW",),
        "It trains most networks at a learning rate of 0.001 to 0.0001, with a "
        "[warm-up and a cosine](guides/schedules_and_clipping.md).",
    ),
    (
        "A program for TensorFlow 1, torch or optax",
        ("Adam", "TorchAdamW"),
        "Take the class of the same name, and look it up under "
        "[one name, several formulas](#one-name-several-formulas) before you copy numbers.",
    ),
    (
        "Images, convolutions, a long run with a schedule",
        ("TorchSGD", "Momentum"),
        "With `use_nesterov=True` and a decay it often ends better than Adam, at half of the "
        "state, but the learning rate has to be searched.",
    ),
    (
        "Transformers",
        ("TorchAdamW", "Lion", "ScheduleFreeAdamW"),
        "No decay for biases and norms: [a group](guides/parameter_groups.md) says so. Lion wants "
        "a third to a tenth of AdamW's learning rate, and as much more decay.",
    ),
    (
        "Embeddings: few rows in each step",
        ("LazyAdam", "Adagrad", "TorchAdamW", "RowWiseAdagrad", "PartialRowWiseAdam"),
        "A step costs what its rows cost. Those that write every row [below](#all-of-them) go over "
        "the whole table in each step, as TensorFlow's do. The last two keep one mean square for "
        "each row, for tables that fill the memory.",
    ),
    (
        "Sparse linear models, with weights that are exactly 0",
        ("Ftrl", "ProximalAdagrad", "AdagradDA"),
        "They take `l1_regularization_strength`.",
    ),
    (
        "Batches of many thousands",
        ("LARS",),
        "Each variable moves in proportion to its own norm. `skip_list` leaves out biases and "
        "norms.",
    ),
    (
        "A run whose end is not known, or no wish for a schedule",
        ("ScheduleFreeAdamW", "ScheduleFreeSGD"),
        "They average instead. Evaluate with `evaluation_weights`.",
    ),
    (
        "Adam diverges in its first steps",
        ("RAdam", "AMSGrad"),
        "RAdam begins as momentum does; a warm-up is the other way.",
    ),
    (
        "Adam never settles",
        ("AMSGrad", "AdaBelief", "AdaMax"),
        "AMSGrad's steps never grow again; AdaBelief's are short where gradients are not as "
        "expected; AdaMax forgets no large gradient quickly.",
    ),
    (
        "Recurrent networks, reinforcement learning",
        ("RMSProp", "TorchRMSprop"),
        "The usual choice there. Mind [its forms](#which-rmsprop): numbers from torch fit the "
        "second alone.",
    ),
    (
        "Little memory",
        ("Lion", "Momentum", "GradientDescent"),
        "[The table](#all-of-them) says what each keeps.",
    ),
    (
        "No learning rate to search for",
        ("Adadelta",),
        "At a learning rate of 1 it is the paper's. It is slow.",
    ),
)

ALL = """
## All of them

The state is in bytes for each parameter of a float32 variable; rows are those that the step of a
sparse gradient writes. Both are measured, on steps of each optimizer.

| | | state | a sparse step writes |
|---|---|---|---|
"""

COMMON = """
## Arguments of all

A number may also be a function without arguments that returns one, which is called once in each
step; only initial values may not. Beside its own arguments, every optimizer takes:

| argument | for |
|---|---|
| `use_locking`, `name` | as in TensorFlow: see `Optimizer` |
| `groups` | [other numbers for some variables](guides/parameter_groups.md) |
| `clip_norm`, `clip_value`, `clip_form` | [clip](guides/schedules_and_clipping.md#in-the-step) |
| `on_nonfinite` | [NaN and infinity](guides/schedules_and_clipping.md#nan-and-infinity) |
| `averages` | [moving averages](guides/averages.md) that follow its steps |
| `masters`, `slot_dtype`, `stochastic_rounding` | [mixed precision](guides/mixed_precision.md) |
| `slot_bits`, `slot_form` | [slots in 8 bits](guides/slots_in_8_bits.md), where its rule allows |

Slots are the arrays that an optimizer keeps for each variable.
"""

GALLERY = """
## Gallery

`make gallery` draws these pictures. Each optimizer has the numbers that the
[demo](getting_started.md) gives it, and a learning rate of its own. Those whose curves are the
same share one.

![Paths of all optimizers on Rosenbrock's function, in panels by family. Its text lists rates and
ends.](images/rosenbrock.svg)

Rosenbrock's function, `(1 - x)^2 + 100 * (y - x^2)^2`: {rosenbrock_steps} steps from the circle
to the star; the last number is the value there. A learning rate is 1, 2 or 5 times a power of
ten: the one whose path is lowest in its last tenth, among those that stay in the picture and do
not depend on rounding.

![Paths of all optimizers in a ravine, in panels by family. Its text lists rates and
ends.](images/ravine.svg)

A ravine that lies across the axes, 50 times as steep as it is long: {ravine_steps} steps, with
rates found in the same way. An optimizer with a learning rate for each weight does not know where
the ravine leads.

![Losses of all optimizers in the demo, in panels by family. Its text lists rates and
accuracies.](images/digits.svg)

The demo's digits: the mean loss of each 50 batches, and the share of test images that are read
correctly. `python -m gpuopt.demo.tune` finds the learning rates: the least that is about as good as
the best, over five parts of the training images that a model has not seen. No picture says which
optimizer is the best for your model: these are one small network, and two functions of two numbers
without noise.
"""

FORMS = f"""
## One name, several formulas

Libraries give the same name to different formulas. Here, an optimizer without a library in its name
has TensorFlow 1's form, if TensorFlow 1 has it. The distances are computed as this page is written:
how far the weights end from each other after {peers.STEPS} steps in float64, relative to how far
those of the column have moved, at a learning rate of {LEARNING_RATE}, with gradients that do not
depend on the weights. `make test-peers` runs torch, optax, Keras and others, and sees that each has
the form of its line.
"""

# Of an optimizer's own page.
EXAMPLE = """import numpy as np
import gpuopt

w = gpuopt.Variable(np.ones((4, 3), np.float32), name="w")
{step}optimizer = gpuopt.{name}({arguments})
for _ in range(10):
    optimizer.minimize(lambda: np.sum((w - 2.0) ** 2){given})"""
STEP = """step = gpuopt.Variable(0, name="global_step", trainable=False)
"""
ARGUMENTS = """Beside [those of all optimizers](../optimizers.md#arguments-of-all):

| argument | default | |
|---|---|---|
"""
PROGRAM = """## Generated code

The update of one element, as it is generated from the optimizer's rule. GPUs run it, and the CPU
where there is a C++ compiler ([how](../guides/rules.md#on-a-gpu))."""
DISTANCES = "../optimizers.md#one-name-several-formulas"

WRAPPERS = """
## Wrappers

These wrap an optimizer, or another wrapper, and add to its steps. What they add is a part of the
step: a save sees both or neither, and a step that is skipped or refused has none of it. Slots,
variables and `state_dict` are those of the optimizer inside
([TensorFlow's and these](coming_from_tensorflow.md#wrappers-of-contrib)).

| | | arguments |
|---|---|---|
"""

WORKERS = """
## Optimizers of workers

These wrap an optimizer, too. Several workers train by themselves, and what they have in common
follows them ([guide](guides/workers_and_towers.md#workers-that-train-by-themselves),
[TensorFlow's and these](coming_from_tensorflow.md#workers-of-contrib)). A custom getter is of the
class that is named after the optimizer, as `contrib.AGNCustomGetter`.

| | | arguments |
|---|---|---|
"""
