"""What the page of optimizers says in words."""

from __future__ import annotations

import peers
from optimizer_page.forms import LEARNING_RATE

BEGINNING = """# Optimizers

<!-- `{command}` writes this page; `make gallery` draws its pictures. -->

Each optimizer is a class of `gpuopt`, and has a short name: `gpuopt.Adam` is
`gpuopt.AdamOptimizer`. [Its page](#all-of-them) has the formula, state and arguments.

## Choosing one

| your case | take | reason |
|---|---|---|
"""

# What one would train; the optimizers to try, best first; and why, or how.
GUIDE = (
    (
        "No preference",
        ("TorchAdamW",),
        "It trains most networks at a learning rate of 0.001 to 0.0001, with a "
        "[warm-up and a cosine](guides/schedules_and_clipping.md).",
    ),
    (
        "A program for TensorFlow 1, torch or optax",
        ("Adam", "TorchAdamW"),
        "Take the class of the same name, and read "
        "[one name, several formulas](#one-name-several-formulas) before you copy numbers.",
    ),
    (
        "Images, convolutions, a long run with a schedule",
        ("TorchSGD", "Momentum"),
        "With `use_nesterov=True` and a decay, the result is often better than Adam's, with half "
        "of the state, but you have to search for the learning rate.",
    ),
    (
        "Transformers",
        ("TorchAdamW", "Lion", "ScheduleFreeAdamW"),
        "Switch off decay for biases and norms by "
        "[`decay_variables`](guides/parameter_groups.md#weight-decay). Lion needs "
        "a third to a tenth of AdamW's learning rate, and 3 to 10 times its decay.",
    ),
    (
        "Embeddings: few rows in each step",
        ("LazyAdam", "Adagrad", "TorchAdamW", "RowWiseAdagrad", "PartialRowWiseAdam"),
        "The cost of a step grows with the gradient's rows. Optimizers that write every row "
        "([below](#all-of-them)) update the whole table in each step, as in TensorFlow. The last "
        "two keep one mean square for each row, for tables that fill the memory.",
    ),
    (
        "Sparse linear models, with weights that are exactly 0",
        ("Ftrl", "ProximalAdagrad", "AdagradDA"),
        "They take `l1_regularization_strength`.",
    ),
    (
        "Batches of many thousands",
        ("LARS",),
        "Each variable moves in proportion to its own norm. `skip_list` excludes biases and norms.",
    ),
    (
        "A run without a fixed end, or without a schedule",
        ("ScheduleFreeAdamW", "ScheduleFreeSGD"),
        "They average weights instead of following a schedule. Evaluate with `evaluation_weights`.",
    ),
    (
        "Adam diverges in its first steps",
        ("RAdam", "AMSGrad"),
        "RAdam starts like momentum. A warm-up helps, too.",
    ),
    (
        "Adam does not converge",
        ("AMSGrad", "AdaBelief", "AdaMax"),
        "AMSGrad's steps per gradient never grow; AdaBelief's are short if gradients differ from "
        "their average; AdaMax forgets large gradients slowly.",
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
        "[The table](#all-of-them) lists the state of each.",
    ),
    (
        "No learning rate to search for",
        ("Adadelta",),
        "With a learning rate of 1 it is the paper's. It is slow.",
    ),
)

ALL = """
## All of them

The state is in bytes for each parameter of a float32 variable. The last column shows the rows that
a step with a sparse gradient writes. Both are measured, in steps of each optimizer.

| | | state | a sparse step writes |
|---|---|---|---|
"""

COMMON = """
## Arguments of all

Instead of a number, you can pass a function without arguments, which each step calls once; only
initial values must be numbers. In addition to its own arguments, every optimizer takes:

- `use_locking`, `name` and `on_nonfinite`: see [`Optimizer`](reference/optimizers.md), and
  [NaN and infinity](guides/schedules_and_clipping.md#nan-and-infinity).
{options}

Slots are the arrays that an optimizer keeps for each variable.
"""

# Where an option of all optimizers is explained.
GUIDES = {
    "groups": "guides/parameter_groups.md",
    "clip_norm": "guides/schedules_and_clipping.md#in-the-step",
    "slot_bits": "guides/slots_in_8_bits.md",
    "slot_form": "guides/slots_in_8_bits.md",
    "slot_dtype": "guides/mixed_precision.md",
    "masters": "guides/mixed_precision.md",
    "stochastic_rounding": "guides/mixed_precision.md",
    "averages": "guides/averages.md",
    "gradient_dtype": "common_mistakes.md#gradients-of-another-dtype",
}

GALLERY = """
## Gallery

`make gallery` draws these pictures. Each optimizer has the demo's hyperparameters and its own
learning rate. Optimizers with equal curves share one.

![Paths of all optimizers on Rosenbrock's function, in panels by family. Its text lists rates and
ends.](images/rosenbrock.svg)

Rosenbrock's function, `(1 - x)^2 + 100 * (y - x^2)^2`: {rosenbrock_steps} steps from the circle
to the star; the last number is the value there. The learning rate is 1, 2 or 5 times a power of
ten: the rate with the lowest last tenth of its path, among paths that stay in the picture and do
not depend on rounding.

![Paths of all optimizers in a ravine, in panels by family. Its text lists rates and
ends.](images/ravine.svg)

A ravine that is not parallel to the axes, 50 times as steep across as along: {ravine_steps} steps,
with rates found in the same way. An optimizer with a step size for each weight cannot follow its
direction.

![Losses of all optimizers in the demo, in panels by family. Its text lists rates and
accuracies.](images/digits.svg)

The demo's digits: the mean loss of each 50 batches, and the accuracy on test images.
`python -m gpuopt.demo.tune` finds the learning rates by cross-validation on five parts of the
training images: the smallest rate that is about as good as the best. These pictures cannot choose
the best optimizer for your model: they show one small network, and two functions of two numbers
without noise.
"""

FORMS = f"""
## One name, several formulas

Libraries give the same name to different formulas. In gpuopt, an optimizer without a library in its
name has TensorFlow 1's form, if TensorFlow 1 has it. The tables show the distance between the
weights of two forms after {peers.STEPS} steps in float64, relative to the movement of the column's
weights, at a learning rate of {LEARNING_RATE}, with gradients that do not
depend on the weights. `make test-peers` runs torch, optax, Keras and others, and tests that each
has the form of its row.
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
ARGUMENTS = """In addition to [those of all optimizers](../optimizers.md#arguments-of-all):

| argument | default | |
|---|---|---|
"""
PROGRAM = """## Generated code

The update of one element, generated from the optimizer's rule. GPUs run it, and the CPU
if there is a C++ compiler ([how](../guides/rules.md#on-a-gpu))."""
DISTANCES = "../optimizers.md#one-name-several-formulas"

WRAPPERS = """
## Wrappers

A wrapper adds work to the steps of an optimizer, or of another wrapper. This work is part of the
step: a checkpoint has the results of both or of neither, and a step that is skipped or raises an
error has no effect. Slots, variables and `state_dict` are those of the wrapped optimizer
([compared with TensorFlow](coming_from_tensorflow.md#wrappers-of-contrib)).

| | | arguments |
|---|---|---|
"""

WORKERS = """
## Optimizers of workers

These wrap an optimizer, too. Several workers train separately, and combine their weights or
gradients ([guide](guides/workers_and_towers.md#workers-that-train-by-themselves),
[compared with TensorFlow](coming_from_tensorflow.md#workers-of-contrib)). The class of a custom
getter is named after its optimizer, as `contrib.AGNCustomGetter`.

| | | arguments |
|---|---|---|
"""
