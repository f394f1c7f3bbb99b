"""Optimizers that have one name and several formulas, and how far these end from each other."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import peers
import textbook
from optimizer_page import formulas
from peers import Call, Weights

LEARNING_RATE = 0.01
# Optimizers in TensorFlow's form have hyperparameters, and powers of beta, in float32.
IN_FLOAT32 = 1e-5


class Form(NamedTuple):
    """One formula.

    Attributes:
        description: What it does that others do not.
        formula: Takes a weight, its history and `learning_rate`; returns the state.
        ours: The optimizer here that has it, if there is one.
        theirs: Optimizers of other libraries that have it.
        also: Who else has it; nothing compares them.
        within: How far `ours` and `theirs` may end from it, relative to the movement.
    """

    description: str
    formula: Callable[..., textbook.State]
    ours: Call | None = None
    theirs: tuple[Call, ...] = ()
    also: str = ""
    within: float = peers.ROUNDING


class Family(NamedTuple):
    """Forms of one name, with the heading and the text above them."""

    question: str
    text: str
    forms: tuple[Form, ...]


FAMILIES = (
    Family(
        "Which AMSGrad?",
        "All divide by the largest `v` so far. Its bias is corrected before the largest is taken, "
        "after, or never.",
        (
            Form(
                "the largest `v`, then corrected",
                textbook.ams_grad,
                Call("AMSGrad"),
                (Call("torch.optim.Adam", {"amsgrad": True}),),
            ),
            Form(
                "the largest corrected `v`",
                partial(textbook.ams_grad, form="optax"),
                Call("AMSGrad", {"form": "optax"}),
                (Call("optax.amsgrad"),),
            ),
            Form(
                "as the first, with epsilon added before the correction",
                formulas.ams_grad_with_epsilon_hat,
                theirs=(Call("keras.optimizers.Adam", {"amsgrad": True}),),
            ),
            Form(
                "no bias is corrected, and there is no epsilon",
                formulas.ams_grad_of_the_paper,
                also="the paper (Reddi, Kale & Kumar 2018)",
            ),
        ),
    ),
    Family(
        "Where is Adam's epsilon?",
        "With an epsilon of 1e-8, these forms differ only where gradients are as small. Here it is "
        "0.1: a value tuned for one form does not suit another.",
        (
            Form(
                "added to the root of the corrected `v`",
                partial(textbook.torch_adam_w, epsilon=0.1, weight_decay=0.0),
                Call("TorchAdamW", {"epsilon": 0.1, "weight_decay": 0.0}),
                (Call("torch.optim.Adam", {"eps": 0.1}), Call("optax.adam", {"eps": 0.1})),
            ),
            Form(
                "added to the root of `v` itself: the paper's epsilon hat",
                partial(textbook.adam, epsilon=0.1),
                Call("Adam", {"epsilon": 0.1}),
                (Call("keras.optimizers.Adam", {"epsilon": 0.1}),),
                also="TensorFlow 1",
                within=IN_FLOAT32,
            ),
            Form(
                "its square added below the root",
                partial(formulas.adam_with_epsilon_in_root, epsilon=0.1),
                theirs=(Call("optax.adam", {"eps": 0.0, "eps_root": 0.01}),),
            ),
        ),
    ),
    Family(
        "Which AdamW?",
        "A decay that is not multiplied by the learning rate is a hundred times as strong at a "
        "learning rate of 0.01. To go from the first form to the second, multiply `weight_decay` "
        "by the learning rate.",
        (
            Form(
                "the weights lose `learning_rate * weight_decay`",
                partial(textbook.torch_adam_w, weight_decay=0.01),
                Call("TorchAdamW", {"weight_decay": 0.01}),
                (
                    Call("torch.optim.AdamW", {"weight_decay": 0.01}),
                    Call("optax.adamw", {"weight_decay": 0.01}),
                ),
            ),
            Form(
                "the weights lose `weight_decay`",
                partial(textbook.adam, weight_decay=0.01),
                Call("AdamW", {"weight_decay": 0.01}),
                also="TensorFlow 1's contrib",
                within=IN_FLOAT32,
            ),
            Form(
                "L2: the gradient gains `weight_decay * w`",
                partial(formulas.adam_with_l2, weight_decay=0.01),
                theirs=(Call("torch.optim.Adam", {"weight_decay": 0.01}),),
            ),
        ),
    ),
    Family(
        "Which NAdam?",
        "All look ahead along `m`, by Dozat's `mu` or by `beta1`. They correct the bias of `m` and "
        "of the gradient in different ways.",
        (
            Form(
                "`mu` follows Dozat's schedule, slowly",
                textbook.torch_nadam,
                Call("TorchNAdam"),
                (Call("torch.optim.NAdam"),),
                within=1e-8,  # torch keeps its product in float32
            ),
            Form(
                "`mu` follows the schedule, 250 times as fast",
                partial(textbook.torch_nadam, momentum_decay=1.0),
                Call("TorchNAdam", {"momentum_decay": 1.0}),
                (Call("keras.optimizers.Nadam", {"epsilon": 1e-8}),),
                within=IN_FLOAT32,
            ),
            Form(
                "`beta1`; Adam's step size, and epsilon hat",
                textbook.nadam,
                Call("Nadam"),
                also="TensorFlow 1's contrib",
                within=IN_FLOAT32,
            ),
            Form(
                "`beta1`; `m` is corrected as if in the next step",
                formulas.nadam_of_optax,
                theirs=(Call("optax.nadam"),),
            ),
        ),
    ),
    Family(
        "Which RAdam?",
        "The first steps are momentum's, until `rho(t)` passes a threshold. Epsilon is 0.1 here, "
        "to be seen.",
        (
            Form(
                "threshold 5; epsilon is added before the correction of `v`",
                partial(textbook.r_adam, epsilon=0.1),
                Call("RAdam", {"epsilon": 0.1}),
                (Call("torch.optim.RAdam", {"eps": 0.1}),),
            ),
            Form(
                "threshold 5; epsilon is added after it",
                partial(formulas.r_adam_with_epsilon_after, epsilon=0.1),
                theirs=(Call("optax.radam", {"eps": 0.1}),),
            ),
            Form(
                "threshold 4; no epsilon",
                partial(formulas.r_adam_with_epsilon_after, epsilon=0.0, threshold=4.0),
                also="the paper (Liu et al. 2020)",
            ),
        ),
    ),
    Family(
        "Which Lion?",
        "There is one formula. Libraries differ in the decay that they have by default.",
        (
            Form(
                "no decay by default",
                textbook.lion,
                Call("Lion"),
                (Call("lion_pytorch.Lion"), Call("keras.optimizers.Lion")),
            ),
            Form(
                "a decay of 0.001 by default",
                partial(textbook.lion, weight_decay=0.001),
                Call("Lion", {"weight_decay": 0.001}),
                (Call("optax.lion"),),
            ),
        ),
    ),
    Family(
        "Which epsilon of AdaBelief?",
        "`s` may be tiny, so its epsilons matter more than Adam's. They are 0.01 here, to be seen; "
        "optax's are 1e-16, and the paper has 1e-8.",
        (
            Form(
                "one in `s` in every step, and one beside the root",
                partial(textbook.ada_belief, epsilon=0.01, epsilon_root=0.01),
                Call("AdaBelief", {"epsilon": 0.01, "epsilon_root": 0.01}),
                (Call("optax.adabelief", {"eps": 0.01, "eps_root": 0.01}),),
                also="the paper (Zhuang et al. 2020)",
            ),
            Form(
                "one beside the root alone",
                partial(textbook.ada_belief, epsilon=0.01, epsilon_root=0.0),
                Call("AdaBelief", {"epsilon": 0.01, "epsilon_root": 0.0}),
                (Call("optax.adabelief", {"eps": 0.01, "eps_root": 0.0}),),
            ),
            Form(
                "one below the root that does not add up, and one beside it",
                partial(formulas.ada_belief_with_epsilon_once, epsilon=0.01),
            ),
        ),
    ),
    Family(
        "Which LARS?",
        "The ratio of norms is taken before or after the decay is added to the gradient. The decay "
        "is 0.1 here.",
        (
            Form(
                "the norm of `w`, to that of `g` plus `weight_decay` times that of `w`",
                partial(textbook.lars, weight_decay=0.1),
                Call("LARS", {"weight_decay": 0.1}),
                also="the paper (You, Gitman & Ginsburg 2017), TensorFlow 1's contrib",
                within=IN_FLOAT32,
            ),
            Form(
                "the norm of `w`, to that of `g + weight_decay * w`",
                partial(formulas.lars_with_norm_of_sum, weight_decay=0.1),
                theirs=(Call("optax.lars", {"weight_decay": 0.1}),),
            ),
        ),
    ),
    Family(
        "Which RMSProp?",
        "TensorFlow's average of squares starts at 1, so its first steps are short where gradients "
        "are small, and its epsilon is below the root. `decay` is 0.9. The book Deep Learning from "
        "Scratch has form C, with an epsilon of 1e-7 and a decay of 0.99: "
        "`TorchRMSprop(epsilon=1e-7)`.",
        (
            Form(
                "starts at 1; epsilon below the root",
                textbook.rms_prop,
                Call("RMSProp"),
                (Call("optax.rmsprop", {"eps": 1e-10, "initial_scale": 1.0}),),
                also="TensorFlow 1",
                within=IN_FLOAT32,
            ),
            Form(
                "starts at 0; epsilon below the root",
                partial(formulas.rms_prop_from_zero, epsilon=1e-8, is_in_root=True),
                theirs=(
                    Call("optax.rmsprop"),
                    Call("keras.optimizers.RMSprop", {"epsilon": 1e-8}),
                ),
            ),
            Form(
                "starts at 0; epsilon beside the root",
                partial(textbook.torch_rms_prop, decay=0.9),
                Call("TorchRMSprop", {"decay": 0.9}),
                (
                    Call("torch.optim.RMSprop", {"alpha": 0.9}),
                    Call("optax.rmsprop", {"eps_in_sqrt": False}),
                ),
            ),
        ),
    ),
    Family(
        "Which Adagrad?",
        "The sum of squares starts above 0, or there is an epsilon, or both. The book Deep "
        "Learning from Scratch has form B, with an epsilon of 1e-7: "
        "`TorchAdagrad(epsilon=1e-7)`.",
        (
            Form(
                "starts at 0.1; no epsilon",
                textbook.adagrad,
                Call("Adagrad"),
                (
                    Call("torch.optim.Adagrad", {"initial_accumulator_value": 0.1, "eps": 0.0}),
                    Call("optax.adagrad", {"eps": 0.0}),
                    Call("keras.optimizers.Adagrad", {"epsilon": 0.0}),
                ),
                also="TensorFlow 1",
                within=IN_FLOAT32,
            ),
            Form(
                "starts at 0; epsilon beside the root",
                textbook.torch_adagrad,
                Call("TorchAdagrad"),
                (Call("torch.optim.Adagrad"),),
            ),
            Form(
                "starts at 0.1; epsilon below the root",
                partial(
                    formulas.adagrad_with_epsilon,
                    epsilon=1e-7,
                    initial_accumulator_value=0.1,
                    is_in_root=True,
                ),
                theirs=(Call("optax.adagrad"), Call("keras.optimizers.Adagrad")),
            ),
        ),
    ),
)


def weights_of(form: Form) -> Weights:
    """Returns where the weights end by a formula."""
    gradients = peers.gradients()
    return [
        form.formula(
            weight,
            [(step, of_step[index]) for step, of_step in enumerate(gradients, start=1)],
            learning_rate=LEARNING_RATE,
        )["var"]
        for index, weight in enumerate(peers.start())
    ]


def between(first: Form, second: Form) -> float:
    """Returns how far `first` ends from `second`, relative to the movement of `second`."""
    return peers.relative_distance(weights_of(first), weights_of(second))


def of_optimizer(name: str) -> list[tuple[Family, Form]]:
    """Returns the forms that an optimizer has, by its name without "Optimizer"."""
    return [
        (family, form)
        for family in FAMILIES
        for form in family.forms
        if form.ours is not None and form.ours.name == name
    ]
